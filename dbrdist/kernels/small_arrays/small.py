"""What small steps do to arrays of the host, where NumPy's calls take longer than the arithmetic.

Where dbrdist is compiled, loops in C serve small arrays of float32 in C order, with the same results bit for bit.
"""

try:
    from dbrdist.kernels.small_arrays import small_loops as _found
except ImportError:
    from dbrdist.kernels.small_arrays import small_numpy as _found

are_classes = _found.are_classes
below_largest = _found.below_largest
cross_entropy_gradient = _found.cross_entropy_gradient
divide_by_sums = _found.divide_by_sums
masked = _found.masked
masked_images = _found.masked_images
mean_cross_entropy = _found.mean_cross_entropy
momentum_sgd = _found.momentum_sgd
rows_times = _found.rows_times
scale_sum = _found.scale_sum
times = _found.times
turned_times = _found.turned_times
weighted_rows = _found.weighted_rows
