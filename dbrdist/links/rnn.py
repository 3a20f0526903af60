"""Recurrent links of a single step, with and without a state of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import dbrdist.functions as F
from dbrdist.core.array import backend
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.types import Array
from dbrdist.core.model.chain import Chain
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.tape.checks import OperandTypeError, describe, expected
from dbrdist.core.tape.variable import Operand, Variable, as_variable
from dbrdist.core.usage.mistakes import warn
from dbrdist.links.connection import Linear
from dbrdist.links.initializers import Initializer, InitialValue, LeCunNormal, get_initializer

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link


def zeros_beside(x: Any, *shape: int) -> Variable:
    """A state of zeros beside the input x: its type and its device."""
    x = as_variable(x)
    return as_variable(backend.zeros_as(x.array, shape, x.dtype))


class _Stateful(Chain):
    """Keeps states between calls: Variables, or None before the first call."""

    _states: ClassVar[tuple[str, ...]] = ("h",)

    def reset_state(self) -> None:
        """Forget the state: the next call begins a sequence."""
        for name in self._states:
            setattr(self, name, None)

    def _set(self, **states: Operand | None) -> None:
        for name, value in states.items():
            if value is None:
                raise expected(type(self).__name__, name, "a state (N, U)", "None", "reset_state() begins a sequence")
            setattr(self, name, as_variable(self.device.send(getattr(value, "array", value)))
                    if not isinstance(value, Variable) else value)  # fmt: skip

    def _continued(self, x: Operand) -> Variable:
        """The state before, or None; it has a row for each example of x."""
        h: Any = getattr(self, "h", None)
        if h is not None and len(h) != len(x):
            what = f"{len(h)} examples, as in the call before (or reset_state())"
            raise expected(type(self).__name__, "x", what, x)
        return h

    def device_resident_accept(self, visitor: Any) -> None:
        super().device_resident_accept(visitor)
        for name in self._states:
            state = getattr(self, name, None)
            if state is not None:
                state.to_device(self.device)


# ---- long short-term memory -----------------------------------------------------------------------------------------


class _LSTMBase(Chain):
    def __init__(
        self, in_size: int | None, out_size: int | None = None, lateral_init: InitialValue = None,
        upward_init: InitialValue = None, bias_init: InitialValue = None, forget_bias_init: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if out_size is None:
            in_size, out_size = None, in_size
        if out_size is None:
            raise ValueError(f"{type(self).__name__}: out_size: expected a number of units, got None for both sizes")
        self.state_size = out_size
        self.lateral_init, self.upward_init = lateral_init, upward_init
        self.bias_init = 0 if bias_init is None else bias_init
        self.forget_bias_init = 1 if forget_bias_init is None else forget_bias_init
        with self.init_scope():
            self.upward = Linear(in_size, 4 * out_size, initialW=0)
            self.lateral = Linear(out_size, 4 * out_size, initialW=0, nobias=True)
        if in_size is not None:
            self._initialize_params()

    def _initialize_params(self) -> None:
        """The four gates of each unit are drawn by themselves; forget gates begin open."""
        size = self.state_size
        for link, init in ((self.lateral, self.lateral_init), (self.upward, self.upward_init)):
            draw = get_initializer(init, LeCunNormal())
            for k in range(4):
                draw(link.W.array[k * size : (k + 1) * size])
        b = self.upward.b.array.reshape(size, 4)  # a, i, f, o of each unit stand side by side
        for k in (0, 1, 3):
            part = np.ascontiguousarray(backend.to_cpu(b[:, k]))
            get_initializer(self.bias_init)(part)
            b[:, k] = self.device.send(part)
        part = np.ascontiguousarray(backend.to_cpu(b[:, 2]))
        get_initializer(self.forget_bias_init)(part)
        b[:, 2] = self.device.send(part)

    def _gates(self, h: Variable | None, x: Operand | Sequence[Sequence[float]]) -> Any:
        """The sources of all gates, from the input and the output before (None: there is none)."""
        if not self.upward.W.is_initialized:
            self.upward.W.initialize((4 * self.state_size, int(np.prod(x.shape[1:]))))
            self.upward.in_size = self.upward.W.shape[1]
            self._initialize_params()
        gates = self.upward(x)
        return gates if h is None else gates + self.lateral(h)


class StatelessLSTM(_LSTMBase):
    """Long short-term memory; ``c, h = lstm(c, h, x)``, with None for states of zeros.

    Args:
        in_size: elements of x; None takes them from the first one. ``StatelessLSTM(n)`` means ``(None, n)``.
        out_size: U, units.
        lateral_init, upward_init: initializers of the weights for h and for x; default LeCunNormal for each gate.
        bias_init, forget_bias_init: of the biases; default 0, and 1 for forget gates.

    Children: ``upward`` (in_size to 4 U) and ``lateral`` (U to 4 U, without biases).

    Example:
        >>> c, h = L.StatelessLSTM(3, 4)(None, None, np.ones((2, 3), np.float32))
        >>> c.shape, h.shape
        ((2, 4), (2, 4))
    """

    def forward(self, c: Operand | None, h: Operand | None, x: Operand) -> tuple[Any, Any]:
        """``c`` and ``h`` (N, U) or None; ``x`` (N, in_size): the new c and h."""
        gates = self._gates(h, x)
        return F.lstm(zeros_beside(gates, len(x), self.state_size) if c is None else c, gates)


class LSTM(_Stateful, _LSTMBase):
    """Long short-term memory that keeps its cell ``c`` and output ``h`` between calls (Gers et al. 2000).

    A batch may be smaller than the one before (sequences sorted by descending length). ``reset_state()`` starts anew.

    Args:
        in_size: number of inputs per example; None takes it from the first input.
        out_size: number of units U; ``LSTM(n)`` means ``LSTM(None, n)``.
        kwargs: the initializers ``lateral_init``, ``upward_init``, ``bias_init`` and ``forget_bias_init`` of
            :class:`StatelessLSTM`.

    Example:
        >>> lstm = L.LSTM(3, 4)
        >>> for step in range(2):
        ...     h = lstm(np.ones((2, 3), np.float32))
        >>> h.shape, lstm.c.shape
        ((2, 4), (2, 4))
    """

    _states = ("c", "h")

    def __init__(self, in_size: int | None, out_size: int | None = None, **kwargs: Initializer | float) -> None:
        super().__init__(in_size, out_size, **kwargs)
        self.reset_state()

    def set_state(self, c: Operand | None, h: Operand | None) -> None:
        """Go on from the cell ``c`` and the output ``h``, both (N, U)."""
        self._set(c=c, h=h)

    def forward(self, x: Operand | Sequence[Sequence[float]]) -> Any:
        """``x`` (N, in_size): the output h (N, U)."""
        n = len(x)
        h, rest = self.h, None
        if h is not None:
            if n > len(h):
                what = f"at most {len(h)} examples, as in the call before (or reset_state())"
                raise OperandTypeError("LSTM", "x", what, describe(x))
            if n < len(h):
                h, rest = F.split_axis(h, [n], axis=0)
        gates = self._gates(h, x)
        c = zeros_beside(gates, n, self.state_size) if self.c is None else self.c
        self.c, y = F.lstm(c, gates)
        self.h = y if rest is None else F.concat([y, rest], axis=0)
        return y


class StatefulZoneoutLSTM(_Stateful, _LSTMBase):
    """LSTM whose cells and outputs stay as they were with the probabilities ``c_ratio`` and ``h_ratio`` in training
    (Krueger et al. 2016, arXiv:1606.01305).

    Args:
        in_size: number of inputs per example; None takes it from the first input.
        out_size: number of units U; ``StatefulZoneoutLSTM(n)`` means ``StatefulZoneoutLSTM(None, n)``.
        c_ratio: probability that an element of the cell keeps its value; default 0.5.
        h_ratio: probability that an element of the output keeps its value; default 0.5.
        kwargs: the initializers ``lateral_init``, ``upward_init``, ``bias_init`` and ``forget_bias_init`` of
            :class:`StatelessLSTM`.

    Example:
        >>> L.StatefulZoneoutLSTM(3, 4)(np.ones((2, 3), np.float32)).shape
        (2, 4)
    """

    _states = ("c", "h")

    def __init__(
        self, in_size: int | None, out_size: int | None = None, c_ratio: float = 0.5, h_ratio: float = 0.5,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        if as_chainer[0]:  # whose forget gates begin half open here
            kwargs.setdefault("forget_bias_init", 0)
        super().__init__(in_size, out_size, **kwargs)
        self.c_ratio, self.h_ratio = c_ratio, h_ratio
        self.reset_state()

    def set_state(self, c: Operand, h: Operand) -> None:
        """Go on from the cell ``c`` and the output ``h``, both (N, U)."""
        self._set(c=c, h=h)

    def forward(self, x: Operand) -> Any:
        """``x`` (N, in_size): the output h (N, U)."""
        gates = self._gates(self._continued(x), x)
        before = zeros_beside(gates, len(x), self.state_size) if self.c is None else self.c
        c, h = F.lstm(before, gates)
        self.c = F.zoneout(before, c, self.c_ratio)
        old = as_variable(backend.zeros_as(h.array, h.shape, h.dtype)) if self.h is None else self.h
        h = self.h = F.zoneout(old, h, self.h_ratio)
        return h


class StatefulPeepholeLSTM(_Stateful):
    """LSTM whose gates see the cell (Gers, Schraudolph and Schmidhuber 2002), with its own ``c`` and ``h``.

    Children: ``upward`` (in_size to 4 U), ``lateral`` (U to 4 U), ``peep_i``, ``peep_f`` and ``peep_o`` (U to U), all
    but the first without biases.

    Args:
        in_size: number of inputs per example; None takes it from the first input.
        out_size: number of units.

    Example:
        >>> L.StatefulPeepholeLSTM(3, 4)(np.ones((2, 3), np.float32)).shape
        (2, 4)
    """

    _states = ("c", "h")

    def __init__(self, in_size: int | None, out_size: int) -> None:
        super().__init__()
        self.state_size = out_size
        with self.init_scope():
            self.upward = Linear(in_size, 4 * out_size)
            self.lateral = Linear(out_size, 4 * out_size, nobias=True)
            self.peep_i = Linear(out_size, out_size, nobias=True)
            self.peep_f = Linear(out_size, out_size, nobias=True)
            self.peep_o = Linear(out_size, out_size, nobias=True)
        self.reset_state()

    def forward(self, x: Any) -> Any:
        """``x`` (N, in_size): the output h (N, U)."""
        gates, h = self.upward(x), self._continued(x)
        if h is not None:
            gates += self.lateral(h)
        n = len(x)
        a, i, f, o = (g[:, :, 0] for g in F.split_axis(F.reshape(gates, (n, self.state_size, 4)), 4, axis=2))
        if self.c is None:
            c = F.sigmoid(i) * F.tanh(a)
        else:
            i, f = i + self.peep_i(self.c), f + self.peep_f(self.c)
            c = F.sigmoid(i) * F.tanh(a) + F.sigmoid(f) * self.c
        self.c = c
        h = self.h = F.sigmoid(o + self.peep_o(c)) * F.tanh(c)
        return h


def _no_input(link: Link, states: Sequence[Array | None]) -> Any:
    """Zeros as the input of a node that has none, beside the first state that is there."""
    there = next((s for s in states if s is not None), None)
    if there is None:
        raise ValueError(f"{type(link).__name__}: all inputs (cells, outputs and x) are None")
    return zeros_beside(there, len(there), link.in_size)


class ChildSumTreeLSTM(Chain):
    """Tree-LSTM for any number of children, whose outputs are summed (Tai et al. 2015, arXiv:1503.00075, eq. 2-8).

    Children: ``W_x`` (in_size to 4 U), ``W_h_aio`` (U to 3 U) and ``W_h_f`` (U to U), the last two without biases.

    Args:
        in_size: number of inputs per example; None takes it from the first input.
        out_size: number of units.

    Example:
        >>> c, h = L.ChildSumTreeLSTM(3, 4)(None, None, np.ones((2, 3), np.float32))
        >>> c.shape
        (2, 4)
    """

    def __init__(self, in_size: int | None, out_size: int) -> None:
        super().__init__()
        self.in_size, self.state_size = in_size, out_size
        with self.init_scope():
            self.W_x = Linear(in_size, 4 * out_size)
            self.W_h_aio = Linear(out_size, 3 * out_size, nobias=True)
            self.W_h_f = Linear(out_size, out_size, nobias=True)

    def forward(self, *cshsx: Any) -> tuple[Any, Any]:
        """``cshsx`` is c_1, ..., c_n, h_1, ..., h_n, x: x (N, in_size), the others (N, U). The new c and h."""
        *states, x = cshsx
        if len(states) % 2:
            raise TypeError(f"ChildSumTreeLSTM: expected as many cells as outputs and x, got {len(cshsx)} arguments")
        num = len(states) // 2
        size = self.state_size
        if x is None:
            x = _no_input(self, states)
        if any(s is None for s in states):
            zeros = zeros_beside(x, len(x), size)
            states = [zeros if s is None else s for s in states]
        cs, hs = states[:num], states[num:]
        aio, f = F.split_axis(self.W_x(x), [3 * size], axis=1)
        if not num:
            return F.tree_lstm(zeros_beside(f, len(x), size), F.concat([aio, f], axis=1))
        aio += self.W_h_aio(sum(hs[1:], hs[0]))
        fs = [f + self.W_h_f(h) for h in hs]
        return F.tree_lstm(*cs, F.concat([aio, *fs], axis=1))


class NaryTreeLSTM(Chain):
    """Tree-LSTM for nodes with up to ``n_ary`` children in order (Tai et al. 2015, arXiv:1503.00075, eq. 9-14).

    Children: ``W_x`` (in_size to (3 + n_ary) U) and, without biases, ``W_h1``, ``W_h2``, ... (U to (3 + n_ary) U).

    Args:
        in_size: number of inputs per example; None takes it from the first input.
        out_size: number of units.
        n_ary: number of children of each node; default 2.

    Example:
        >>> c, h = L.NaryTreeLSTM(3, 4)(None, None, None, None, np.ones((2, 3), np.float32))
        >>> c.shape
        (2, 4)
    """

    def __init__(self, in_size: int | None, out_size: int, n_ary: int = 2) -> None:
        super().__init__()
        if n_ary < 1:
            raise ValueError(f"NaryTreeLSTM: n_ary: expected at least 1, got {n_ary}")
        self.in_size, self.state_size, self.n_ary = in_size, out_size, n_ary
        with self.init_scope():
            self.W_x = Linear(in_size, (3 + n_ary) * out_size)
            for k in range(1, n_ary + 1):
                setattr(self, f"W_h{k}", Linear(out_size, (3 + n_ary) * out_size, nobias=True))

    def forward(self, *cshsx: Any) -> tuple[Any, Any]:
        """``cshsx`` is c_1, ..., c_n, h_1, ..., h_n, x with n = ``n_ary``; None for children that are not there."""
        num = self.n_ary
        if len(cshsx) != 2 * num + 1:
            raise TypeError(f"NaryTreeLSTM: expected {num} cells, {num} outputs and x, got {len(cshsx)} arguments")
        cs, hs, x = cshsx[:num], cshsx[num:-1], cshsx[-1]
        if x is None:
            x = _no_input(self, cshsx[:-1])
        gates = self.W_x(x)
        for k, h in enumerate(hs):
            if h is not None:
                gates += getattr(self, f"W_h{k + 1}")(h)
        zeros = zeros_beside(gates, len(x), self.state_size)
        return F.tree_lstm(*[zeros if c is None else c for c in cs], gates)


# ---- gated recurrent units, minimal gated units ---------------------------------------------------------------------


class _GRUBase(Chain):
    def __init__(
        self,
        in_size: int | None,
        out_size: int,
        init: Initializer | float | None = None,
        inner_init: InitialValue = None,
        bias_init: InitialValue = None,
    ) -> None:
        super().__init__()
        if type(init) is int and init > 1:
            warn(
                f"{type(self).__name__}: init: {init} fills all weights with it, so that all units are alike; for "
                f"{init} layers write NStepGRU({init}, in_size, out_size, dropout)"
            )
        self.state_size = out_size
        with self.init_scope():
            for name in ("_r", "_z", ""):
                setattr(self, f"W{name}", Linear(in_size, out_size, initialW=init, initial_bias=bias_init))
                setattr(self, f"U{name}", Linear(out_size, out_size, initialW=inner_init, initial_bias=bias_init))

    def _step(self, h: Any, x: Any) -> Variable:
        if h is None:
            return F.sigmoid(self.W_z(x)) * F.tanh(self.W(x))
        r = F.sigmoid(self.W_r(x) + self.U_r(h))
        z = F.sigmoid(self.W_z(x) + self.U_z(h))
        y = F.tanh(self.W(x) + self.U(r * h))
        return F.linear_interpolate(z, y, h)


class StatelessGRU(_GRUBase):
    """Gated recurrent units (Chung et al. 2014, arXiv:1412.3555); ``h = gru(h, x)``, with None for h = 0.

    r = s(W_r x + U_r h), z = s(W_z x + U_z h), y = tanh(W x + U (r h)), h' = (1 - z) h + z y.

    Args:
        in_size: elements of x; None takes them from the first one.
        out_size: units.
        init, inner_init, bias_init: initializers of the weights W, W_r, W_z, of U, U_r, U_z, and of all biases.

    Example:
        >>> L.StatelessGRU(3, 4)(None, np.ones((2, 3), np.float32)).shape
        (2, 4)
    """

    def forward(self, h: Operand | None, x: Operand) -> Any:
        """``h`` (N, out_size) or None, ``x`` (N, in_size): the new h."""
        return self._step(h, x)


class StatefulGRU(_Stateful, _GRUBase):
    """Gated recurrent units that keep their state ``h`` between calls; for the arguments see :class:`StatelessGRU`.

    Args:
        in_size: number of inputs per example; None takes it from the first input.
        out_size: number of units.
        init: initializer of the weights of the input; None for LeCunNormal.
        inner_init: initializer of the weights of the state; None for LeCunNormal.
        bias_init: initial value of the biases; default 0.

    Example:
        >>> L.StatefulGRU(3, 4)(np.ones((2, 3), np.float32)).shape
        (2, 4)
    """

    def __init__(
        self,
        in_size: int | None,
        out_size: int,
        init: Initializer | float | None = None,
        inner_init: InitialValue = None,
        bias_init: InitialValue = 0,
    ) -> None:
        super().__init__(in_size, out_size, init, inner_init, bias_init)
        self.reset_state()

    def set_state(self, h: Operand) -> None:
        """Go on from the state ``h`` (N, out_size)."""
        self._set(h=h)

    def forward(self, x: Operand) -> Any:
        """``x`` (N, in_size): the new state (N, out_size)."""
        h = self.h = self._step(self._continued(x), x)
        return h


class _WrongCount(TypeError, ValueError):
    """Another number of arguments than the link takes, about which Chainer raises ValueError."""


class GRU(StatefulGRU):
    """Another name of :class:`StatefulGRU`.

    Args:
        in_size: number of inputs per example; None takes it from the first input.
        out_size: number of units.
        init: initializer of the weights of the input; None for LeCunNormal.
        inner_init: initializer of the weights of the state; None for LeCunNormal.
        bias_init: initial value of the biases; default 0.

    Example:
        >>> L.GRU(3, 4)(np.ones((2, 3), np.float32)).shape
        (2, 4)
    """

    def forward(self, *xs: Any, x: Operand | None = None) -> Any:
        """The new state (N, out_size): ``x`` (N, in_size), by position (``xs``) or by name."""
        xs = xs if x is None else (*xs, x)
        if len(xs) != 1:
            raise _WrongCount(f"GRU: expected x alone, got {len(xs)} arguments; StatelessGRU takes h and x")
        return super().forward(*xs)


class _MGUBase(Chain):
    def __init__(self, n_inputs: int, n_units: int) -> None:
        super().__init__()
        self.state_size = n_units
        with self.init_scope():
            self.W_f = Linear(n_inputs + n_units, n_units)
            self.W_h = Linear(n_inputs + n_units, n_units)

    def _step(self, h: Operand, x: Operand) -> Variable:
        f = F.sigmoid(self.W_f(F.concat([h, x])))
        return F.linear_interpolate(f, F.tanh(self.W_h(F.concat([f * h, x]))), h)


class StatelessMGU(_MGUBase):
    """Minimal gated units (Zhou et al. 2016, arXiv:1603.09420); ``h = mgu(h, x)``.

    f = s(W_f [h, x]), y = tanh(W_h [f h, x]), h' = (1 - f) h + f y.

    Args:
        n_inputs: number of inputs per example; None takes it from the first input.
        n_units: number of units.

    Example:
        >>> L.StatelessMGU(3, 4)(np.zeros((2, 4), np.float32), np.ones((2, 3), np.float32)).shape
        (2, 4)
    """

    def forward(self, h: Operand, x: Operand) -> Any:
        """``h`` (N, n_units), ``x`` (N, n_inputs): the new h."""
        return self._step(h, x)


class StatefulMGU(_Stateful, _MGUBase):
    """Minimal gated units that keep their state ``h`` between calls.

    Args:
        in_size: number of inputs per example; None takes it from the first input.
        out_size: number of units.

    Example:
        >>> L.StatefulMGU(3, 4)(np.ones((2, 3), np.float32)).shape
        (2, 4)
    """

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__(in_size, out_size)
        self.reset_state()

    def set_state(self, h: Operand) -> None:
        """Go on from the state ``h`` (N, out_size)."""
        self._set(h=h)

    def forward(self, x: Operand) -> Any:
        """``x`` (N, in_size): the new state (N, out_size)."""
        h = self._continued(x)
        h = zeros_beside(x, len(x), self.W_f.b.size) if h is None else h  # what Chainer pickled has no state_size
        h = self.h = self._step(h, x)
        return h


explain_constructors(globals())
