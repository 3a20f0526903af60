"""The sizes of convolutions and of their inverse."""

from __future__ import annotations


def get_conv_outsize(size: int, k: int, s: int, p: int, cover_all: bool = False, d: int = 1) -> int:
    """How many outputs a window of ``k`` elements, ``d`` apart, has on ``size`` inputs with ``p`` zeros on both sides.

    The window moves by ``s``; with ``cover_all`` a last step covers what would be left over.
    """
    reach = k + (k - 1) * (d - 1)
    room = size + p * 2 - reach
    return (room + s - 1) // s + 1 if cover_all else room // s + 1


def get_deconv_outsize(size: int, k: int, s: int, p: int, cover_all: bool = False, d: int = 1) -> int:
    """The size whose convolution has ``size`` outputs: the smallest one that fits."""
    reach = k + (k - 1) * (d - 1)
    return s * (size - 1) + reach - (s - 1 if cover_all else 0) - 2 * p
