"""What programs of the time of NumPy 1 do with arrays, in their own files."""
