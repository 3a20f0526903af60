"""Failures that end the job with a report: exceptions, deadlocks, ranks that have left."""
