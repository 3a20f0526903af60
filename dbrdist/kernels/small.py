"""What small steps do to arrays of the host, where NumPy's calls take longer than the arithmetic.

Where dbrdist is compiled, loops in C serve small arrays of float32 in C order, with the same results bit for bit.
"""

try:
    from dbrdist.kernels.small_loops import (
        add_to_rows,
        are_classes,
        below_largest,
        cross_entropy_gradient,
        divide_rows,
        masked,
        masked_images,
        momentum_sgd,
    )
except ImportError:
    from dbrdist.kernels.small_numpy import (
        add_to_rows,
        are_classes,
        below_largest,
        cross_entropy_gradient,
        divide_rows,
        masked,
        masked_images,
        momentum_sgd,
    )

__all__ = [
    "add_to_rows",
    "are_classes",
    "below_largest",
    "cross_entropy_gradient",
    "divide_rows",
    "masked",
    "masked_images",
    "momentum_sgd",
]
