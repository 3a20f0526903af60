"""Starts MPI programs, watches over them, and says why they ended. Standard library and click only."""


def __getattr__(name: str) -> object:
    """`run`, `Result` and `JobError`: loaded at their first use, since this package is loaded before each rank."""
    if name in ("run", "Result", "JobError"):
        from importlib import import_module

        return getattr(import_module(".api", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
