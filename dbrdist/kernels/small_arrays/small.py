"""What small steps do to arrays of the host, where NumPy's calls take longer than the arithmetic.

Where dbrdist is compiled, loops in C serve small arrays of float32 in C order, with the same results bit for bit.
"""

try:
    from dbrdist.kernels.small_arrays import small_loops as _found
except ImportError:
    from dbrdist.kernels.small_arrays import small_numpy as _found

add_to_rows = _found.add_to_rows
are_classes = _found.are_classes
below_largest = _found.below_largest
cross_entropy_gradient = _found.cross_entropy_gradient
divide_rows = _found.divide_rows
masked = _found.masked
masked_images = _found.masked_images
mean_cross_entropy = _found.mean_cross_entropy
momentum_sgd = _found.momentum_sgd
scale_sum = _found.scale_sum
