"""What the launcher reads and writes while a job runs: the ranks' output, the terminal, lines of events."""
