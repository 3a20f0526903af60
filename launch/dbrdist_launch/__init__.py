"""Starts MPI programs, watches over them, and says why they ended. Standard library and click only."""
