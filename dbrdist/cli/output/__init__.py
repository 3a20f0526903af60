"""What a run says and where it says it: words, console, the run's folder and its lock. It knows nothing else of cli."""
