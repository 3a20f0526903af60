"""What a process has for GPUs, and the memory of these."""
