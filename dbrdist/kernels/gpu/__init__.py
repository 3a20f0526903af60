"""Providers for GPUs: cuDNN and kernels of our own in CUDA C++."""
