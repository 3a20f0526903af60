"""Whether, where and when a job starts again."""
