"""Names that modules do not have: hints, paths that have moved, and what a bug report should include."""
