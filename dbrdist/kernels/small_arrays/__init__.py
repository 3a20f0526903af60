"""What small steps do to arrays of the host: compiled loops, or NumPy's calls where dbrdist is not compiled."""
