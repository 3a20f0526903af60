"""How a window moves over an image: numbers that convolution and pooling share.

Legend: h, w rows and columns; k kernel; s stride; p padding; d dilation; o output.
"""

from __future__ import annotations

from typing import NamedTuple


def out_size(size: int, k: int, s: int, p: int, d: int, cover_all: bool) -> int:
    """Number of window positions along one axis; with ``cover_all`` every input element lies in some window."""
    extent = (k - 1) * d + 1
    free = size + 2 * p - extent
    return (free + s - 1) // s + 1 if cover_all else free // s + 1


class ConvGeometry(NamedTuple):
    """Stride, padding, dilation and groups of a 2-d convolution. Hashable: provider caches use it as a key."""

    sh: int = 1
    sw: int = 1
    ph: int = 0
    pw: int = 0
    dh: int = 1
    dw: int = 1
    groups: int = 1
    cover_all: bool = False

    def out_hw(self, h: int, w: int, kh: int, kw: int) -> tuple[int, int]:
        """Rows and columns of the output of an ``h`` x ``w`` image under a ``kh`` x ``kw`` kernel."""
        return (
            out_size(h, kh, self.sh, self.ph, self.dh, self.cover_all),
            out_size(w, kw, self.sw, self.pw, self.dw, self.cover_all),
        )


class PoolGeometry(NamedTuple):
    """Kind ('max' or 'average'), kernel, stride and padding of a 2-d pooling.

    The average counts padding as zeros, so that every window divides by ``kh * kw``.
    """

    kind: str
    kh: int
    kw: int
    sh: int
    sw: int
    ph: int = 0
    pw: int = 0
    cover_all: bool = False

    def out_hw(self, h: int, w: int) -> tuple[int, int]:
        """Rows and columns of the output of an ``h`` x ``w`` image."""
        return (
            out_size(h, self.kh, self.sh, self.ph, 1, self.cover_all),
            out_size(w, self.kw, self.sw, self.pw, 1, self.cover_all),
        )
