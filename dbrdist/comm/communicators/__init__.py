"""The public communicators and how they add arrays: MPI, threads of one process, shared memory, NCCL."""
