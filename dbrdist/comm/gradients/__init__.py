"""The reduction of gradients: its plan, shared memory, overlap with backward, compression, division over ranks."""
