"""How each starter of MPI programs is called: one file per dialect."""
