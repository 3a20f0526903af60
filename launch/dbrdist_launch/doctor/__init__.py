"""`dbrdist-launch doctor`: finds out before a job does what would make it fail or slow."""
