"""The life of a run: training, resuming, measuring its speed."""
