"""Providers for processors: oneDNN, and small convolutions as one gather and one product of BLAS."""
