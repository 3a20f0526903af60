"""The reference provider: plain array code for any float type, on NumPy and on CuPy arrays."""
