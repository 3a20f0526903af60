"""Recurrent links: single steps with and without a state of their own, and whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

import dbrdist.functions as F
from dbrdist.core import backend
from dbrdist.core.chain import Chain, ChainList
from dbrdist.core.checks import expected
from dbrdist.core.link import Link
from dbrdist.core.parameter import Parameter
from dbrdist.core.variable import Variable, as_variable
from dbrdist.links.connection import Linear
from dbrdist.links.initializers import LeCunNormal, get_initializer


def _zeros(x: Any, *shape: int) -> Variable:
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

    def _set(self, **states: Any) -> None:
        for name, value in states.items():
            setattr(self, name, as_variable(self.device.send(getattr(value, "array", value)))
                    if not isinstance(value, Variable) else value)  # fmt: skip

    def device_resident_accept(self, visitor: Any) -> None:
        super().device_resident_accept(visitor)
        for name in self._states:
            state = getattr(self, name, None)
            if state is not None:
                state.to_device(self.device)


# ---- long short-term memory -----------------------------------------------------------------------------------------


class _LSTMBase(Chain):
    def __init__(
        self, in_size: int | None, out_size: int | None = None, lateral_init: Any = None, upward_init: Any = None,
        bias_init: Any = None, forget_bias_init: Any = None,
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

    def _gates(self, h: Any, x: Any) -> Any:
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
    """

    def forward(self, c: Any, h: Any, x: Any) -> tuple[Any, Any]:
        """c, h (N, U) or None; x (N, in_size): the new c and h."""
        gates = self._gates(h, x)
        return F.lstm(_zeros(gates, len(x), self.state_size) if c is None else c, gates)


class LSTM(_Stateful, _LSTMBase):
    """Long short-term memory that keeps its cell ``c`` and output ``h`` between calls; :class:`StatelessLSTM` has the
    arguments. A batch may be smaller than the one before (sequences sorted by descending length).
    """

    _states = ("c", "h")

    def __init__(self, in_size: int | None, out_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(in_size, out_size, **kwargs)
        self.reset_state()

    def set_state(self, c: Any, h: Any) -> None:
        """Go on from this cell and output, both (N, U)."""
        self._set(c=c, h=h)

    def forward(self, x: Any) -> Any:
        """x (N, in_size): the output h (N, U)."""
        n = len(x)
        h, rest = self.h, None
        if h is not None:
            if n > len(h):
                raise expected("LSTM", "x", f"at most {len(h)} examples, as in the call before (or reset_state())", x)
            if n < len(h):
                h, rest = F.split_axis(h, [n], axis=0)
        gates = self._gates(h, x)
        c = _zeros(gates, n, self.state_size) if self.c is None else self.c
        self.c, y = F.lstm(c, gates)
        self.h = y if rest is None else F.concat([y, rest], axis=0)
        return y


class StatefulZoneoutLSTM(_Stateful, _LSTMBase):
    """LSTM whose cells and outputs stay as they were with the probabilities ``c_ratio`` and ``h_ratio`` in training
    (Krueger et al. 2016, arXiv:1606.01305)."""

    _states = ("c", "h")

    def __init__(
        self, in_size: int | None, out_size: int | None = None, c_ratio: float = 0.5, h_ratio: float = 0.5,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_size, out_size, **kwargs)
        self.c_ratio, self.h_ratio = c_ratio, h_ratio
        self.reset_state()

    def set_state(self, c: Any, h: Any) -> None:
        """Go on from this cell and output, both (N, U)."""
        self._set(c=c, h=h)

    def forward(self, x: Any) -> Any:
        """x (N, in_size): the output h (N, U)."""
        gates = self._gates(self.h, x)
        before = _zeros(gates, len(x), self.state_size) if self.c is None else self.c
        c, h = F.lstm(before, gates)
        self.c = F.zoneout(before, c, self.c_ratio)
        self.h = F.zoneout(as_variable(backend.zeros_as(h.array, h.shape, h.dtype)) if self.h is None else self.h,
                           h, self.h_ratio)  # fmt: skip
        return self.h


class StatefulPeepholeLSTM(_Stateful):
    """LSTM whose gates see the cell (Gers, Schraudolph and Schmidhuber 2002), with its own ``c`` and ``h``.

    Children: ``upward`` (in_size to 4 U), ``lateral`` (U to 4 U), ``peep_i``, ``peep_f`` and ``peep_o`` (U to U), all
    but the first without biases.
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
        """x (N, in_size): the output h (N, U)."""
        gates = self.upward(x)
        if self.h is not None:
            gates += self.lateral(self.h)
        n = len(x)
        a, i, f, o = (g[:, :, 0] for g in F.split_axis(F.reshape(gates, (n, self.state_size, 4)), 4, axis=2))
        if self.c is None:
            c = F.sigmoid(i) * F.tanh(a)
        else:
            i, f = i + self.peep_i(self.c), f + self.peep_f(self.c)
            c = F.sigmoid(i) * F.tanh(a) + F.sigmoid(f) * self.c
        self.c = c
        self.h = F.sigmoid(o + self.peep_o(c)) * F.tanh(c)
        return self.h


class ChildSumTreeLSTM(Chain):
    """Tree-LSTM for any number of children, whose outputs are summed (Tai et al. 2015, arXiv:1503.00075, eq. 2-8).

    Children: ``W_x`` (in_size to 4 U), ``W_h_aio`` (U to 3 U) and ``W_h_f`` (U to U), the last two without biases.
    """

    def __init__(self, in_size: int | None, out_size: int) -> None:
        super().__init__()
        self.in_size, self.state_size = in_size, out_size
        with self.init_scope():
            self.W_x = Linear(in_size, 4 * out_size)
            self.W_h_aio = Linear(out_size, 3 * out_size, nobias=True)
            self.W_h_f = Linear(out_size, out_size, nobias=True)

    def forward(self, *cshsx: Any) -> tuple[Any, Any]:
        """``link(c_1, ..., c_n, h_1, ..., h_n, x)``, x (N, in_size) and the others (N, U): the new c and h."""
        *states, x = cshsx
        if len(states) % 2:
            raise TypeError(f"ChildSumTreeLSTM: expected as many cells as outputs and x, got {len(cshsx)} arguments")
        num = len(states) // 2
        cs, hs = states[:num], states[num:]
        size = self.state_size
        aio, f = F.split_axis(self.W_x(x), [3 * size], axis=1)
        if not num:
            return F.tree_lstm(_zeros(f, len(x), size), F.concat([aio, f], axis=1))
        aio += self.W_h_aio(sum(hs[1:], hs[0]))
        fs = [f + self.W_h_f(h) for h in hs]
        return F.tree_lstm(*cs, F.concat([aio, *fs], axis=1))


class NaryTreeLSTM(Chain):
    """Tree-LSTM for nodes with up to ``n_ary`` children in order (Tai et al. 2015, arXiv:1503.00075, eq. 9-14).

    Children: ``W_x`` (in_size to (3 + n_ary) U) and, without biases, ``W_h1``, ``W_h2``, ... (U to (3 + n_ary) U).
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
        """``link(c_1, ..., c_n, h_1, ..., h_n, x)`` with n = ``n_ary``; None for children that are not there."""
        num = self.n_ary
        if len(cshsx) != 2 * num + 1:
            raise TypeError(f"NaryTreeLSTM: expected {num} cells, {num} outputs and x, got {len(cshsx)} arguments")
        cs, hs, x = cshsx[:num], cshsx[num:-1], cshsx[-1]
        gates = self.W_x(x)
        for k, h in enumerate(hs):
            if h is not None:
                gates += getattr(self, f"W_h{k + 1}")(h)
        zeros = _zeros(gates, len(x), self.state_size)
        return F.tree_lstm(*[zeros if c is None else c for c in cs], gates)


# ---- gated recurrent units, minimal gated units ---------------------------------------------------------------------


class _GRUBase(Chain):
    def __init__(
        self, in_size: int | None, out_size: int, init: Any = None, inner_init: Any = None, bias_init: Any = None
    ) -> None:
        super().__init__()
        if out_size is None:
            raise ValueError(f"{type(self).__name__}: out_size: expected a number of units, got None")
        self.state_size = out_size
        with self.init_scope():
            for name in ("_r", "_z", ""):
                setattr(self, f"W{name}", Linear(in_size, out_size, initialW=init, initial_bias=bias_init))
                setattr(self, f"U{name}", Linear(out_size, out_size, initialW=inner_init, initial_bias=bias_init))

    def _step(self, h: Any, x: Any) -> Any:
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
    """

    def forward(self, h: Any, x: Any) -> Any:
        """h (N, out_size) or None, x (N, in_size): the new h."""
        return self._step(h, x)


class StatefulGRU(_Stateful, _GRUBase):
    """Gated recurrent units that keep their state ``h`` between calls; :class:`StatelessGRU` has the arguments."""

    def __init__(
        self, in_size: int | None, out_size: int, init: Any = None, inner_init: Any = None, bias_init: Any = 0
    ) -> None:
        super().__init__(in_size, out_size, init, inner_init, bias_init)
        self.reset_state()

    def set_state(self, h: Any) -> None:
        """Go on from this state (N, out_size)."""
        self._set(h=h)

    def forward(self, x: Any) -> Any:
        """x (N, in_size): the new state (N, out_size)."""
        self.h = self._step(self.h, x)
        return self.h


class GRU(StatefulGRU):
    """Another name of :class:`StatefulGRU`."""


class _MGUBase(Chain):
    def __init__(self, n_inputs: int, n_units: int) -> None:
        super().__init__()
        self.state_size = n_units
        with self.init_scope():
            self.W_f = Linear(n_inputs + n_units, n_units)
            self.W_h = Linear(n_inputs + n_units, n_units)

    def _step(self, h: Any, x: Any) -> Any:
        f = F.sigmoid(self.W_f(F.concat([h, x])))
        return F.linear_interpolate(f, F.tanh(self.W_h(F.concat([f * h, x]))), h)


class StatelessMGU(_MGUBase):
    """Minimal gated units (Zhou et al. 2016, arXiv:1603.09420); ``h = mgu(h, x)``.

    f = s(W_f [h, x]), y = tanh(W_h [f h, x]), h' = (1 - f) h + f y.
    """

    def forward(self, h: Any, x: Any) -> Any:
        """h (N, n_units), x (N, n_inputs): the new h."""
        return self._step(h, x)


class StatefulMGU(_Stateful, _MGUBase):
    """Minimal gated units that keep their state ``h`` between calls."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__(in_size, out_size)
        self.reset_state()

    def set_state(self, h: Any) -> None:
        """Go on from this state (N, out_size)."""
        self._set(h=h)

    def forward(self, x: Any) -> Any:
        """x (N, in_size): the new state (N, out_size)."""
        h = _zeros(x, len(x), self.state_size) if self.h is None else self.h
        self.h = self._step(h, x)
        return self.h


# ---- whole sequences ------------------------------------------------------------------------------------------------


class _NStepBase(ChainList):
    """Layers of a kind over sequences of different lengths, given in any order."""

    n_weights: ClassVar[int]
    use_bi_direction: ClassVar[bool] = False
    n_cells: ClassVar[int] = 1

    def __init__(
        self, n_layers: int, in_size: int, out_size: int, dropout: float, *, initialW: Any = None,
        initial_bias: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if kwargs:
            raise TypeError(f"{type(self).__name__}: unexpected argument {sorted(kwargs)[0]!r}")
        super().__init__()
        self.n_layers, self.out_size, self.dropout = n_layers, out_size, dropout
        directions = 2 if self.use_bi_direction else 1
        for layer in range(n_layers):
            for _ in range(directions):
                link = Link()
                with link.init_scope():
                    for j in range(self.n_weights):
                        is_input = j < self.n_weights // 2
                        width = (in_size if layer == 0 else out_size * directions) if is_input else out_size
                        setattr(link, f"w{j}", Parameter(get_initializer(initialW), (out_size, width)))
                    for j in range(self.n_weights):
                        bias = get_initializer(0 if initial_bias is None else initial_bias)
                        setattr(link, f"b{j}", Parameter(bias, (out_size,)))
                self.append(link)

    @property
    def ws(self) -> list[list[Parameter]]:
        """The weights of each layer and direction."""
        return [[getattr(link, f"w{j}") for j in range(self.n_weights)] for link in self]

    @property
    def bs(self) -> list[list[Parameter]]:
        """The biases of each layer and direction."""
        return [[getattr(link, f"b{j}") for j in range(self.n_weights)] for link in self]

    def init_hx(self, xs: Sequence[Any]) -> Variable:
        """A state of zeros for these sequences."""
        return _zeros(xs[0], len(self), len(xs), self.out_size)

    def rnn(self, *args: Any) -> Any:
        """The function behind the link."""
        raise NotImplementedError

    def _run(self, states: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, ...]:
        name = type(self).__name__
        if not isinstance(xs, (list, tuple)):
            raise expected(name, "xs", "a list or tuple of sequences, arrays (L, I)", type(xs).__name__)
        if not len(xs):
            raise expected(name, "xs", "at least one sequence", "none")
        order = sorted(range(len(xs)), key=lambda i: -len(xs[i]))
        back = sorted(range(len(xs)), key=order.__getitem__)
        is_sorted = order == back == list(range(len(xs)))
        sequences = [xs[i] for i in order]
        states = tuple(self.init_hx(xs) if s is None else s for s in states)
        if not is_sorted:
            states = tuple(F.permutate(s, np.array(order, np.int32), axis=1) for s in states)
        steps = F.transpose_sequence(sequences)
        *lasts, ys = self.rnn(self.n_layers, self.dropout, *states, self.ws, self.bs, list(steps))
        if ys:
            found = list(F.transpose_sequence(ys))
        else:
            found = []
        width = self.out_size * (2 if self.use_bi_direction else 1)
        found += [_zeros(xs[0], 0, width) for _ in range(len(xs) - len(found))]  # sequences without any step
        if not is_sorted:
            lasts = [F.permutate(s, np.array(back, np.int32), axis=1) for s in lasts]
        return (*lasts, [found[i] for i in back])


class _WithoutCell(_NStepBase):
    def forward(self, hx: Any, xs: Sequence[Any], **kwargs: Any) -> tuple[Any, Any]:
        """hx (layers, N, U) or None for zeros; xs: N sequences (L, I). The last states and the N outputs (L, U)."""
        hy, ys = self._run((hx,), xs)
        return hy, ys


class _WithCell(_NStepBase):
    n_cells = 2

    def forward(self, hx: Any, cx: Any, xs: Sequence[Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        """hx, cx (layers, N, U) or None for zeros; xs: N sequences (L, I). The last states, and the outputs (L, U)."""
        hy, cy, ys = self._run((hx, cx), xs)
        return hy, cy, ys


_ARGUMENTS = """

    Args:
        n_layers: number of layers.
        in_size: I, elements of a step.
        out_size: U, units of a layer{both}.
        dropout: how likely elements of the input of each layer but the first are dropped in training.
        initialW, initial_bias: initializers; default LeCunNormal and 0.
    """


def _n_step(name: str, base: Any, rnn: Any, n_weights: int, is_both: bool, what: str) -> Any:
    doc = f"{what} over sequences of different lengths, in any order; see :func:`dbrdist.functions.{rnn.__name__}`."
    doc += _ARGUMENTS.format(both=", in each direction" if is_both else "")
    body = {"n_weights": n_weights, "use_bi_direction": is_both, "__doc__": doc, "__module__": __name__}
    return type(name, (base,), {**body, "rnn": lambda self, *args: rnn(*args)})


def _relu_of(rnn: Any) -> Any:
    def with_relu(*args: Any) -> Any:
        return rnn(*args, activation="relu")

    with_relu.__name__ = rnn.__name__
    return with_relu


_LSTM_TEXT, _GRU_TEXT = "Long short-term memory", "Gated recurrent units"
NStepLSTM = _n_step("NStepLSTM", _WithCell, F.n_step_lstm, 8, False, _LSTM_TEXT)
NStepBiLSTM = _n_step("NStepBiLSTM", _WithCell, F.n_step_bilstm, 8, True, f"{_LSTM_TEXT}, in both directions,")
NStepGRU = _n_step("NStepGRU", _WithoutCell, F.n_step_gru, 6, False, _GRU_TEXT)
NStepBiGRU = _n_step("NStepBiGRU", _WithoutCell, F.n_step_bigru, 6, True, f"{_GRU_TEXT}, in both directions,")
NStepRNNTanh = _n_step("NStepRNNTanh", _WithoutCell, F.n_step_rnn, 2, False, "Plain recurrent units with tanh")
NStepRNNReLU = _n_step(
    "NStepRNNReLU", _WithoutCell, _relu_of(F.n_step_rnn), 2, False, "Plain recurrent units with ReLU"
)
NStepBiRNNTanh = _n_step(
    "NStepBiRNNTanh", _WithoutCell, F.n_step_birnn, 2, True, "Plain recurrent units with tanh, in both directions,"
)
NStepBiRNNReLU = _n_step(
    "NStepBiRNNReLU", _WithoutCell, _relu_of(F.n_step_birnn), 2, True,
    "Plain recurrent units with ReLU, in both directions,",
)  # fmt: skip
