"""Elementwise links with parameters: Scale, Bias, Parameter, PReLU, Swish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dbrdist.core.array.types import Array
from dbrdist.core.files.serializer import AbstractSerializer, loads, saved_entry
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter as CoreParameter
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.tape.node import note_assignment
from dbrdist.functions.activation import prelu, swish
from dbrdist.functions.math import bias, scale
from dbrdist.links.initializers import InitialValue, get_initializer

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Operand, Variable


class _WrongCount(TypeError, AssertionError):
    """Another number of arguments than the link takes, about which Chainer raises AssertionError."""


class Bias(Link):
    """y = x + b, whose axes are those of x from ``axis`` on; ``shape`` None: b is given to each call.

    Args:
        axis: first axis of the input to which the bias belongs; default 1.
        shape: shape of the bias; None adds the second argument of the call in its place.

    Example:
        >>> L.Bias(1, (3,))(np.ones((2, 3), np.float32)).array
        array([[1., 1., 1.],
               [1., 1., 1.]], dtype=float32)
    """

    def __init__(self, axis: int = 1, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.axis = axis
        with self.init_scope():
            if shape is not None:
                self.b = CoreParameter(0.0, shape)

    def forward(self, *xs: Operand) -> Variable:
        """``xs`` is x, or x and b where the link has no b; the result has the shape of x."""
        if len(xs) != (1 if "b" in self._params else 2):
            raise _WrongCount(f"Bias: expected {'x' if 'b' in self._params else 'x and b'}, got {len(xs)} arguments")
        return bias(xs[0], self.b if len(xs) == 1 else xs[1], self.axis)


class Scale(Chain):
    """y = x W, whose axes are those of x from ``axis`` on; with ``bias_term`` plus a :class:`Bias`.

    ``W_shape`` None: W is given to each call. The initial values are 1 and 0.

    Args:
        axis: first axis of the input to which the factors belong; default 1.
        W_shape: shape of the factors; None takes the second argument of the call in their place.
        bias_term: add a bias after the product; default False.
        bias_shape: shape of the bias where W_shape is None.

    Example:
        >>> L.Scale(1, (3,))(np.ones((2, 3), np.float32)).array
        array([[1., 1., 1.],
               [1., 1., 1.]], dtype=float32)
    """

    former_paths: ClassVar[dict[str, str]] = {"/bias/b": "/b"}  # for the states of optimizers

    def __init__(
        self, axis: int = 1, W_shape: tuple[int, ...] | None = None, bias_term: bool = False,
        bias_shape: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.axis = axis
        self.with_bias = bias_term
        with self.init_scope():
            if W_shape is not None:
                self.W = CoreParameter(1.0, W_shape)
            if bias_term:
                shape = W_shape if bias_shape is None else bias_shape
                if shape is None:
                    raise ValueError("Scale: bias_shape: expected a shape, since bias_term is True and W_shape is None")
                self.bias = Bias(axis, shape)

    def forward(self, *xs: Operand) -> Variable:
        """``xs`` is x, or x and W where the link has no W; the result has the shape of x."""
        axis = self.axis
        if len(xs) != (1 if "W" in self._params else 2):
            raise _WrongCount(f"Scale: expected {'x' if 'W' in self._params else 'x and W'}, got {len(xs)} arguments")
        x = scale(xs[0], self.W if len(xs) == 1 else xs[1], axis)
        return self.bias(x) if self.with_bias else x

    @property
    def b(self) -> Any:
        """The parameter of ``bias``, which was this link's own once."""
        return self.bias.b

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load W and ``bias`` by ``serializer``, also from files in which b is this link's own."""
        old = saved_entry(serializer, "b") if self.with_bias and loads(serializer) else None
        if old is None:
            super().serialize(serializer)
        else:
            Link.serialize(self, serializer)
            serializer("b", self.bias.b.array)  # which fills it
            note_assignment(self.bias.b)

    def __setstate__(self, state: dict[str, Any]) -> None:
        b = None if "bias" in state else state.pop("b", None)
        super().__setstate__(state)
        if "_children" not in state:  # pickled when b was this link's own
            self._children = []
        self.__dict__.setdefault("with_bias", "bias" in state)  # Chainer's has none
        if b is not None:
            self._params = [name for name in self._params if name != "b"]
            with self.init_scope():
                self.bias = Bias(self.axis)
            with self.bias.init_scope():
                self.bias.b = b  # with its gradient and the state of its update


class Parameter(Link):
    """A link that returns its one parameter W, whose initial value is ``array``.

    Args:
        array: initial value of the parameter W.

    Example:
        >>> L.Parameter(np.ones(2, np.float32))().array
        array([1., 1.], dtype=float32)
    """

    def __init__(self, array: Array) -> None:
        super().__init__()
        with self.init_scope():
            self.W = CoreParameter(array)

    def forward(self, volatile: Any = None) -> Variable:
        """W, as it is; ``volatile`` is accepted for compatibility with Chainer."""
        return self.W


class PReLU(Link):
    """x where x >= 0, else W x with a learned W of ``shape``, initially ``init`` (He et al. 2015).

    Args:
        shape: shape of the slopes, which are the axes of the input from 1 on; () for one slope; default ().
        init: initial slope; default 0.25.

    Example:
        >>> L.PReLU()(np.array([[-4.0, 2.0]], np.float32)).array
        array([[-1.,  2.]], dtype=float32)
    """

    def __init__(self, shape: tuple[int, ...] = (), init: Any = 0.25) -> None:
        super().__init__()
        with self.init_scope():
            self.W = CoreParameter(get_initializer(init), shape)

    def forward(self, x: Operand) -> Variable:
        """``x`` (N, ...) to the same shape; the axes of W are those of ``x`` from 1 on."""
        return prelu(x, self.W)


class Swish(Link):
    """x sigmoid(beta x) with a learned beta; ``beta_shape`` None takes the shape of the first input's examples.

    Args:
        beta_shape: shape of beta, the axes of the input from 1 on; None takes it from the first input.
        beta_init: initial value of beta; default 1.0.

    Example:
        >>> L.Swish(())(np.ones((2, 3), np.float32)).shape
        (2, 3)
    """

    def __init__(self, beta_shape: tuple[int, ...] | None, beta_init: InitialValue = 1.0) -> None:
        super().__init__()
        with self.init_scope():
            self.beta = CoreParameter(get_initializer(beta_init), beta_shape)

    def forward(self, x: Operand) -> Variable:
        """``x`` (N, ...) to the same shape; the axes of beta are those of ``x`` from 1 on."""
        if not self.beta.is_initialized:
            self.beta.initialize(x.shape[1:])
        return swish(x, self.beta)


explain_constructors(globals())
