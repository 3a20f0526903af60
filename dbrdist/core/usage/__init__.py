"""What a probable mistake of a program leads to: an error or a warning, and names of PyTorch with ours beside them."""
