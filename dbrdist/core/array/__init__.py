"""Arrays of NumPy and CuPy: which module owns them, where memory comes from, elementwise formulas, random numbers."""
