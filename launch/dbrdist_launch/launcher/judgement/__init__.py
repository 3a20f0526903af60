"""What the launcher knows of its ranks, which failure came first, and the report of it."""
