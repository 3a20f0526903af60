"""Variables: arrays whose history is recorded."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.core.array.backend import (
    Array,
    Device,
    accumulation_dtype,
    device_of,
    fill,
    get_array_module,
    get_device,
    is_array,
    is_floating,
    on,
    to_device,
)
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.tape.arithmetic import Arithmetic
from dbrdist.core.tape.fusion import settle, waiting
from dbrdist.core.tape.node import made_variables, make_node
from dbrdist.core.tape.variable_words import (
    NoArray,
    as_float,
    formatted,
    not_assigned,
    not_compared,
    refuse_order,
    statistics,
    warn_of_zerograd,
)
from dbrdist.core.usage.foreign_names import add_hints, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dbrdist.core.array.backend import DeviceSpec
    from dbrdist.core.array.types import Axes, DType, Module, Number, Shape
    from dbrdist.core.chainer.function import Function
    from dbrdist.core.tape.function_node import FunctionNode

# Bound by the package (__init__.py): the operators of Variables, and the backward pass.
operators: Any = None
backward: Any = None


# NumPy's names of the operators between an array and a Variable, and ours.
_OPERATORS = {
    "add": "add", "divide": "div", "floor_divide": "floor_div", "matmul": "matmul", "multiply": "mul", "power": "power",
    "remainder": "remainder", "subtract": "sub",
}  # fmt: skip


class Variable(Arithmetic):
    """An array that remembers how it was computed.

    ``Variable(array)`` is a leaf. Functions and operators give Variables that know their creator; ``backward`` of a
    result fills ``grad`` of the leaves behind it. Where no gradient can be asked for (``requires_grad=False``, or
    within :func:`no_backprop_mode`) nothing is recorded.

    Args:
        data: an array of NumPy or CuPy; None for a variable that gets its array later.
        name: shown in messages and graphs.
        grad: the gradient to begin with, an array in the shape of ``data``.
        requires_grad: False records nothing, so that no gradient is computed.

    Raises:
        TypeError: ``data`` is no array.

    Example:
        >>> x = dbrdist.Variable(np.array([1.0, 2.0]))
        >>> y = F.sum(x * x)
        >>> y.backward()
        >>> x.grad
        array([2., 4.])
    """

    __slots__ = ()
    __array_priority__ = 200  # for CuPy: ndarray * Variable asks the Variable
    __array__ = NoArray()
    __float__ = as_float

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Operand | Number, **kwargs: Any
    ) -> Variable | tuple[Variable, Variable]:
        """For NumPy: ndarray * Variable, and ndarray *= Variable, which gives a Variable too, as in Chainer."""
        name = _OPERATORS.get(ufunc.__name__)
        if method == "__call__" and ufunc.__name__ == "divmod":
            return operators.floor_div(*inputs), operators.remainder(*inputs)
        if ufunc.__name__ in ("equal", "not_equal"):
            raise not_compared("==" if ufunc.__name__ == "equal" else "!=")
        if method != "__call__" or name is None or set(kwargs) - {"axes", "out"}:  # axes: of @=
            raise TypeError(
                f"numpy.{ufunc.__name__} takes arrays, got a Variable: use dbrdist.functions, or the Variable's array"
            )
        if "out" in kwargs and kwargs["out"][0] is not inputs[0]:  # as it is in a *= x
            words = "nothing is written into an array where an operand is a Variable; write out[...] = y.array"
            raise TypeError(f"numpy.{ufunc.__name__}: out: {words}")
        return getattr(operators, name)(*inputs)

    def __init__(
        self,
        data: Array | None = None,
        *,
        name: str | None = None,
        grad: Array | None = None,
        requires_grad: bool = True,
    ) -> None:
        if data is not None and not is_array(data):
            raise TypeError(f"expected an array of NumPy or CuPy, got {type(data).__name__}; convert it first")
        self._array = data
        shape, dtype = (None, None) if data is None else (data.shape, data.dtype)
        self.node = make_node(None, 0, 0, requires_grad and (data is None or data.dtype.kind in "fcV"), shape, dtype)
        if as_chainer[0]:
            made_variables[self.node] = weakref.ref(self)
        if name is not None:
            self.node.name = name
        if grad is not None:
            self.grad = grad

    # ---- the array --------------------------------------------------------------------------------------------------

    @property
    def array(self) -> Array:
        """The array."""
        if waiting:
            settle()
        return self._array

    @array.setter
    def array(self, a: Array) -> None:
        if a is not None:
            if not is_array(a):
                raise TypeError(f"array: expected an array of NumPy or CuPy, got {type(a).__name__}; convert it first")
            self.node.shape, self.node.dtype = a.shape, a.dtype
        self._array = a

    @property
    def is_initialized(self) -> bool:
        """True; a Parameter may have to wait for its shape."""
        return True

    def copy_for_reading(self) -> Any:
        """None; a Parameter may have a copy of its array for a device."""
        return None

    @property
    def data(self) -> Array:
        """Chainer's older name of :attr:`array`."""
        return self.array

    @data.setter
    def data(self, a: Array) -> None:
        self.array = a

    @property
    def shape(self) -> Shape:
        return self._array.shape

    @property
    def dtype(self) -> DType:
        return self._array.dtype

    @property
    def ndim(self) -> int:
        return len(self._array.shape)

    @property
    def size(self) -> int:
        return int(self._array.size)

    @property
    def xp(self) -> Module:
        """The module that owns the array."""
        return get_array_module(self._array)

    @property
    def device(self) -> Device:
        """Where the array lies."""
        return device_of(self._array)

    @property
    def name(self) -> str | None:
        return self.node.name

    @name.setter
    def name(self, name: str | None) -> None:
        self.node.name = name

    @property
    def label(self) -> str:
        """Shape and type, as in graphs: ``(2, 3), float32``."""
        return "(None)" if self._array is None else f"{self.shape}, {self.dtype}"

    def item(self) -> float:
        """The one element as a number."""
        return self.array.item()

    def __len__(self) -> int:
        return len(self._array)

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<variable{name}>" if self._array is None else f"variable{name}({self.array})"

    def __bool__(self) -> bool:
        raise TypeError("a Variable has no truth value; compare its array instead")

    def __eq__(self, other: object) -> bool:
        if other is self:  # weak sets ask so
            return True
        raise not_compared("==")

    def __ne__(self, other: object) -> bool:
        if other is self:
            return False
        raise not_compared("!=")

    def __lt__(self, other: Operand) -> bool:
        return refuse_order("<", other)

    def __le__(self, other: Operand) -> bool:
        return refuse_order("<=", other)

    def __gt__(self, other: Operand) -> bool:
        return refuse_order(">", other)

    def __ge__(self, other: Operand) -> bool:
        return refuse_order(">=", other)

    def __format__(self, spec: str) -> str:
        return formatted(self, spec)

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"array": self.array, "grad": self.grad, "name": self.name, "requires_grad": self.requires_grad}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Variable.__init__(self, state["array"], name=state["name"], requires_grad=state["requires_grad"])
        self.node.gradient = state["grad"]

    # ---- the gradient -----------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Array:
        """The gradient as an array, or None."""
        g = self.node.gradient
        return g.array if isinstance(g, Variable) else g

    @grad.setter
    def grad(self, g: Array) -> None:
        self._check_gradient(g)
        self.node.gradient = g

    @property
    def grad_var(self) -> Variable | None:
        """The gradient as a Variable, or None."""
        g = self.node.gradient
        if g is not None and not isinstance(g, Variable):
            g = self.node.gradient = Variable(g)
        return g

    @grad_var.setter
    def grad_var(self, g: Any) -> None:
        self._check_gradient(g)
        self.node.gradient = g

    def _check_gradient(self, g: Operand | None) -> None:
        if g is None or self._array is None:
            return
        if not is_array(g) and not isinstance(g, Variable):
            raise TypeError(f"grad: expected an array or None, got {type(g).__name__}")
        if g.shape != self.shape or g.dtype != self.dtype:
            want = f"shape {self.shape} and dtype {self.dtype} to match the array"
            raise ValueError(f"grad: expected {want}, got shape {g.shape} and dtype {g.dtype}")

    @property
    def requires_grad(self) -> bool:
        return self.node.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        raise not_assigned()

    def cleargrad(self) -> None:
        """Forget the gradient."""
        self.node.gradient = None

    def zerograd(self) -> None:
        """Fill the gradient with zeros; deprecated, as in Chainer: :meth:`cleargrad` takes less time."""
        warn_of_zerograd()
        with on(self.array):
            self.grad = get_array_module(self.array).zeros_like(self.array)

    def addgrad(self, var: Variable) -> None:
        """Add the gradient of ``var``, of the same shape, to this one's."""
        if var.grad is not None:
            g = to_device(var.grad, self.device)
            with on(g):
                self.grad = g.copy() if self.grad is None else self.grad + g

    def copydata(self, var: Variable) -> None:
        """Copy the array of ``var``, of the same shape, into this one's."""
        if var._array is not None:
            fill(self.array, to_device(var.array, self.device))

    def retain_data(self) -> None:
        """Let the node in the graph keep the array, too, as ``node.data``."""
        self.node.data = self.array

    def set_creator(self, gen_func: FunctionNode) -> None:
        """As :meth:`set_creator_node`, for ``gen_func``."""
        self.set_creator_node(getattr(gen_func, "node", gen_func))  # the node of a function of the old style

    def set_creator_node(self, fnode: FunctionNode) -> None:
        """Make this the first output of the function ``fnode``."""
        self.node.creator_node, self.node.rank = fnode, fnode.rank + 1

    @property
    def layout(self) -> None:
        """None: layouts are in the strides."""
        return None

    def as_layout(self, layout: None) -> Variable:
        """Itself: the only ``layout`` is None."""
        if layout is not None:
            raise ValueError(f"as_layout: expected None, got {layout!r}; shapes are NCHW, the layout is in the strides")
        return self

    @property
    def raw_array(self) -> Array:
        """As :attr:`array`."""
        return self.array

    def summary(self) -> str:
        """Name, shape and type in one line."""
        if self._array is None:
            return f"<variable {self.name or ''} None>"
        return f"<variable {self.name or ''} shape={self.shape} dtype={self.dtype}>"

    def debug_print(self) -> str:
        """Name, place, shape, type and statistics of the array and the gradient, in several lines as in Chainer."""
        a, g = self.array, self.grad
        lines = {
            "device": None if a is None else getattr(a, "device", "CPU") if not isinstance(a, np.ndarray) else "CPU",
            "backend": None if a is None else type(a),
            "shape": getattr(a, "shape", None),
            "dtype": getattr(a, "dtype", None),
            "statistics": statistics(a),
            "grad": 0 if g is not None and g.size and not g.any() else statistics(g),
        }
        return "\n".join([self.summary(), *(f"- {name}: {value}" for name, value in lines.items())])

    # ---- the graph --------------------------------------------------------------------------------------------------

    @property
    def creator(self) -> FunctionNode | Function | None:
        """The function that computed it, or None for a leaf: a FunctionNode, or a Function of the old style."""
        node = self.creator_node
        return None if node is None else node.as_called

    @creator.setter
    def creator(self, function: FunctionNode | None) -> None:
        self.creator_node = function

    @property
    def creator_node(self) -> FunctionNode | None:
        """As :attr:`creator`, always the FunctionNode."""
        creator: FunctionNode | None = self.node.creator_node
        return None if creator is None or creator.inputs == () else creator  # cut there; None before its call

    @creator_node.setter
    def creator_node(self, function: FunctionNode | None) -> None:
        if function is None:
            self.unchain()
        else:
            self.set_creator_node(function)

    @property
    def rank(self) -> int:
        """The number of functions on the longest path to it."""
        return self.node.rank

    def backward(
        self, retain_grad: bool = False, enable_double_backprop: bool = False, loss_scale: float | None = None
    ) -> None:
        """Fill ``grad`` of all leaves behind this variable; see :func:`dbrdist.backward`.

        Args:
            retain_grad: keep the gradients of the variables between, not only those of leaves.
            enable_double_backprop: make the gradients differentiable themselves.
            loss_scale: factor of the gradient to begin with, for 16-bit types; None for none.
        """
        backward((self,), None, retain_grad, enable_double_backprop, loss_scale, None)

    def unchain(self) -> None:
        """Cut the link from this variable to its creator."""
        self.node.creator_node = None
        self.node.rank = 0

    def unchain_backward(self) -> None:
        """Cut the whole graph behind this variable, for truncated backpropagation through time."""
        stack = [self.node.living_creator()]
        while stack:
            function = stack.pop()
            if function is not None and function.inputs:
                stack.extend(node.living_creator() for node in function.inputs)
                function.unchain()

    # ---- devices ----------------------------------------------------------------------------------------------------

    def to_device(self, device: DeviceSpec) -> None:
        """Move array and gradient to ``device``, a Device or its name such as ``"@cupy:0"``."""
        device = get_device(device)
        g = self.grad
        if self._array is not None:
            self.array = to_device(self.array, device)
        self.node.gradient = None if g is None else to_device(g, device)

    def to_cpu(self) -> None:
        """Move array and gradient to host memory."""
        self.to_device("@numpy")

    def to_gpu(self, device: int | None = None) -> None:
        """Move array and gradient to the GPU number ``device`` (None: the first)."""
        self.to_device(get_device(0 if device is None else device))

    # ---- shapes and sums ---------------------------------------------------------------------------------------------

    def reshape(self, *shape: int | Sequence[int]) -> Variable:
        """The same elements in another ``shape``, as integers or one tuple; one length may be -1."""
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        return operators.reshape(self, shape)

    def transpose(self, *axes: int | Sequence[int] | None) -> Variable:
        """The axes in the order ``axes``, given as integers or one tuple; reversed where none are given."""
        if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list))):
            axes = () if axes[0] is None else tuple(axes[0])
        return operators.transpose(self, axes or None)

    @property
    def T(self) -> Variable:
        """The axes reversed."""
        return operators.transpose(self)

    def sum(self, axis: Axes = None, keepdims: bool = False, *, out: None = None, **unknown: int) -> Variable:
        """The sum over ``axis`` (None: all), kept as length 1 with ``keepdims``; ``numpy.sum`` passes ``out``, None.

        Other names (``unknown``) are refused.
        """
        if unknown:
            refuse_unknown("Variable.sum", Variable.sum, unknown)
        return operators.sum(self, axis, keepdims)

    def mean(
        self, axis: Axes = None, *, weights: Operand | None = None, keepdims: bool = False, dtype: None = None,
        out: None = None, **unknown: int,
    ) -> Variable:  # fmt: skip
        """The mean over ``axis`` (None: all), kept as length 1 with ``keepdims``; ``weights`` has its shape.
        ``numpy.mean`` passes ``dtype`` and ``out``, None. Other names (``unknown``) are refused.
        """
        if unknown:
            refuse_unknown("Variable.mean", Variable.mean, unknown)
        if dtype is not None or out is not None:
            raise TypeError("mean: dtype and out: expected None; cast the result with F.cast")
        if weights is not None:
            shape = [1] * self.ndim
            axes = range(self.ndim) if axis is None else (axis if isinstance(axis, (tuple, list)) else (axis,))
            for a, n in zip(axes, weights.shape):
                shape[a] = n
            x, w = operators.matched((self, operators.reshape(weights, tuple(shape))))
            given = x.dtype
            if is_floating(given):  # of 16 bits sums overflow where the mean does not
                x, w = (operators.cast(v, accumulation_dtype(given)) for v in (x, w))
            total = operators.sum(operators.mul(x, w), axis, keepdims)
            y = operators.div(total, operators.sum(operators.broadcast_to(w, x.shape), axis, keepdims))
            return operators.cast(y, given) if is_floating(given) else y
        return operators.mean(self, axis, keepdims)


add_hints(Variable, "Variable")


def as_variable(obj: Operand) -> Variable:
    """A Variable as it is, or an array as a Variable that gets no gradient.

    Args:
        obj: a Variable or an array.

    Example:
        >>> dbrdist.as_variable(np.array([1.0])).requires_grad
        False
    """
    return obj if isinstance(obj, Variable) else Variable(obj, requires_grad=False)


def as_array(obj: Operand) -> Array:
    """The array of a Variable, or an array as it is.

    Args:
        obj: a Variable or an array.

    Example:
        >>> dbrdist.as_array(dbrdist.Variable(np.array([1.0])))
        array([1.])
    """
    return obj.array if isinstance(obj, Variable) else obj


Operand: TypeAlias = Variable | Array  # what functions take: no gradient goes to an array
