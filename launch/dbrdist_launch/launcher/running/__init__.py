"""One run of a job: its processes, the connections to its ranks, and how it ended."""
