"""How bytes travel: MPI, memory that ranks of a host share, sockets; what each rank has done, for reports."""
