"""Links with weights: Linear, EmbedID, Bilinear."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.config import MIXED, config, get_dtype
from dbrdist.core.array.types import Array
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.variable import Operand, as_array
from dbrdist.functions.connection import bilinear, embed_id, linear, whole_batch_axes
from dbrdist.links.initializers import InitialValue, Normal, get_initializer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dbrdist.core.tape.variable import Variable


def see_biases(link: type[Link], out_size: int, b: Array | None) -> None:
    """Raise unless given biases, if there are any, are as many as outputs."""
    if b is not None and b.size != out_size:
        raise expected(f"{link.__name__}.from_params", "b", f"{out_size} biases, one for each output", b)


class Linear(Link):
    """y = x W^T + b, W (out_size, in_size), b (out_size,).

    Args:
        in_size: elements per example; None takes them from the first input. ``Linear(n)`` means ``Linear(None, n)``.
        out_size: outputs per example.
        nobias: True leaves b out.
        initialW: an initializer, number or array; default LeCunNormal.
        initial_bias: likewise; default 0.

    Example:
        >>> L.Linear(4, 3)(np.ones((2, 4), np.float32)).shape
        (2, 3)
    """

    def __init__(
        self,
        in_size: int | None,
        out_size: int | None = None,
        nobias: bool = False,
        initialW: InitialValue = None,
        initial_bias: InitialValue = None,
    ) -> None:
        super().__init__()
        if out_size is None:
            in_size, out_size = None, in_size
        if out_size is None:
            raise ValueError("Linear: out_size: expected a number of outputs, got None for both sizes")
        self.in_size = in_size
        self.out_size = out_size
        with self.init_scope():
            self.W = Parameter(get_initializer(initialW), None if in_size is None else (out_size, in_size))
            if nobias:
                self.b = None
            else:
                self.b = Parameter(get_initializer(0 if initial_bias is None else initial_bias), out_size)

    @property
    def printable_specs(self) -> Iterator[tuple[str, object]]:
        yield "in_size", self.in_size
        yield "out_size", self.out_size
        yield "nobias", self.b is None

    @classmethod
    def from_params(cls, W: Any, b: Any = None, nobias: bool = False) -> Linear:
        """A link with these weights (out_size, in_size) and biases (out_size,), which are copied.

        Args:
            W: the weights (out_size, in_size).
            b: the biases (out_size,); None for zeros.
            nobias: whether the link has no biases; default False.
        """
        see_biases(cls, W.shape[0], b)
        return cls(W.shape[1], W.shape[0], nobias, as_array(W), None if b is None else as_array(b))

    def forward(self, x: Operand, n_batch_axes: int = 1) -> Variable:
        """``x`` to its first ``n_batch_axes`` axes (default 1), which count examples, and ``out_size``."""
        W = self.W
        if W._array is None:
            if x.ndim < 2:
                words = "a first axis that counts examples, then their elements"
                raise expected("Linear", "x", words, x, "a single example is x[None]")
            self.in_size = math.prod(x.shape[whole_batch_axes(n_batch_axes) :])
            W.initialize((self.out_size, self.in_size))
        return linear(x, W, self.b, n_batch_axes)


class EmbedID(Link):
    """y = W[x], one vector of ``out_size`` per id from 0 to ``in_size`` - 1; W (in_size, out_size).

    ``initialW`` defaults to Normal(1.0); ids equal to ``ignore_label`` give zeros. With ``dtype`` ``mixed16`` or
    ``mixedbf16`` the table is float32 and its rows leave in 16 bits, so that what follows computes in 16 bits.

    Args:
        in_size: number of ids.
        out_size: length of the vectors.
        initialW: initializer of the vectors; None for normal numbers of variance 1.
        ignore_label: id whose output is zeros, without a gradient; None for no such id.

    Example:
        >>> L.EmbedID(100, 8)(np.array([[1, 2, 3]])).shape
        (1, 3, 8)
    """

    ignore_label: int | None = None  # pickles of Chainer 1 have none

    def __init__(
        self, in_size: int, out_size: int, initialW: InitialValue = None, ignore_label: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_label = ignore_label
        with self.init_scope():
            self.W = Parameter(get_initializer(initialW, Normal(1.0)), (in_size, out_size))

    @classmethod
    def from_params(cls, W: Any, ignore_label: int | None = None) -> EmbedID:
        """A link with these vectors (in_size, out_size), which are copied.

        Args:
            W: the vectors (in_size, out_size).
            ignore_label: the integer whose vector is 0; None for none.
        """
        return cls(*W.shape, as_array(W), ignore_label)

    @property
    def printable_specs(self) -> Iterator[tuple[str, object]]:
        yield "in_size", self.W.shape[0]
        yield "out_size", self.W.shape[1]
        yield "ignore_label", self.ignore_label

    def forward(self, x: Operand) -> Variable:
        """``x``, integers of any shape, to its shape and (out_size,)."""
        y = embed_id(x, self.W, self.ignore_label)
        return ops.cast(y, get_dtype()) if config.dtype in MIXED and y.dtype == np.float32 else y


class Bilinear(Link):
    """y[n, k] = sum e1[n, i] e2[n, j] W[i, j, k] + e1 V1 + e2 V2 + b; see :func:`dbrdist.functions.bilinear`.

    ``initial_bias``: a triple of initial values for V1, V2 and b.

    Args:
        left_size: number of inputs on the left.
        right_size: number of inputs on the right.
        out_size: number of outputs.
        nobias: leave out the linear terms and the bias; default False.
        initialW: initializer of W; None for normal numbers of variance 1 / (left_size right_size).
        initial_bias: triple of initializers of V1, V2 and b; None for LeCunNormal, LeCunNormal and zeros.

    Example:
        >>> L.Bilinear(2, 3, 4)(np.ones((5, 2), np.float32), np.ones((5, 3), np.float32)).shape
        (5, 4)
    """

    def __init__(
        self,
        left_size: int,
        right_size: int,
        out_size: int,
        nobias: bool = False,
        initialW: InitialValue = None,
        initial_bias: InitialValue = None,
    ) -> None:
        super().__init__()
        self.nobias = nobias
        if initialW is None:
            initialW = Normal(math.sqrt(1.0 / (left_size * right_size)))
        V1, V2, b = (None, None, 0) if initial_bias is None else initial_bias
        with self.init_scope():
            self.W = Parameter(get_initializer(initialW), (left_size, right_size, out_size))
            if not nobias:
                self.V1 = Parameter(get_initializer(V1), (left_size, out_size))
                self.V2 = Parameter(get_initializer(V2), (right_size, out_size))
                self.b = Parameter(get_initializer(b), (out_size,))

    def forward(self, e1: Operand, e2: Operand) -> Variable:
        """``e1`` (N, left_size) and ``e2`` (N, right_size) to (N, out_size)."""
        if self.nobias:
            return bilinear(e1, e2, self.W)
        return bilinear(e1, e2, self.W, self.V1, self.V2, self.b)
