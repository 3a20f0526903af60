"""The sizes of convolutions and of their inverse."""

from __future__ import annotations


def get_conv_outsize(size: int, k: int, s: int, p: int, cover_all: bool = False, d: int = 1) -> int:
    """How many outputs a convolution has along an axis.

    Args:
        size: the number of inputs.
        k: the length of the window.
        s: the step of the window.
        p: zeros on each side.
        cover_all: add a last step that covers what would be left over.
        d: the distance between the window's elements.

    Example:
        >>> dbrdist.utils.get_conv_outsize(10, 3, 2, 1)
        5
    """
    reach = k + (k - 1) * (d - 1)
    room = size + p * 2 - reach
    return (room + s - 1) // s + 1 if cover_all else room // s + 1


def get_deconv_outsize(size: int, k: int, s: int, p: int, cover_all: bool = False, d: int = 1) -> int:
    """The smallest size whose convolution has ``size`` outputs.

    Args:
        size: the number of inputs of the deconvolution.
        k: the length of the window.
        s: the step of the window.
        p: zeros on each side, which are cut off.
        cover_all: whether the convolution adds a last step that covers what would be left over.
        d: the distance between the window's elements.

    Example:
        >>> dbrdist.utils.get_deconv_outsize(5, 3, 2, 1)
        9
    """
    reach = k + (k - 1) * (d - 1)
    return s * (size - 1) + reach - (s - 1 if cover_all else 0) - 2 * p
