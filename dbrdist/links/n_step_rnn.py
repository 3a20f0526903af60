"""Recurrent links over whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

import dbrdist.functions as F
from dbrdist.core.model.chain import ChainList
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.links.initializers import InitialValue, get_initializer
from dbrdist.links.rnn import zeros_beside


class _NStepBase(ChainList):
    """Layers of a kind over sequences of different lengths, given in any order."""

    n_weights: ClassVar[int]
    use_bi_direction: ClassVar[bool] = False
    n_cells: ClassVar[int] = 1

    def __init__(
        self, n_layers: int, in_size: int, out_size: int, dropout: float, *, initialW: InitialValue = None,
        initial_bias: InitialValue = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        _refuse(type(self).__name__, kwargs)
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

    def init_hx(self, xs: Sequence[Operand]) -> Variable:
        """A state of zeros (layers, N, U) for the N sequences ``xs``."""
        return zeros_beside(xs[0], len(self), len(xs), self.out_size)

    def rnn(self, *args: Any) -> Any:
        """The function behind the link."""
        raise NotImplementedError

    def _run(self, states: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, ...]:
        name = type(self).__name__
        if not isinstance(xs, (list, tuple)):
            hint = f"write link({'None, ' * len(states)}xs) for first states of zeros" if xs is None else ""
            hint = "write list(xs) for sequences (N, L, I)" if getattr(xs, "ndim", 0) == 3 else hint
            raise expected(name, "xs", "a list or tuple of sequences, arrays (L, I)", type(xs).__name__, hint)
        if not len(xs):
            raise expected(name, "xs", "at least one sequence", "none")
        for k, x in enumerate(xs):
            if len(getattr(x, "shape", ())) != 2:
                raise expected(name, f"xs[{k}]", "a sequence, shape (L, I)", x)
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
        found += [zeros_beside(xs[0], 0, width) for _ in range(len(xs) - len(found))]  # sequences without any step
        if not is_sorted:
            lasts = [F.permutate(s, np.array(back, np.int32), axis=1) for s in lasts]
        return (*lasts, [found[i] for i in back])


def _refuse(name: str, kwargs: dict[str, bool]) -> None:
    if kwargs:
        raise TypeError(f"{name}: unexpected argument {sorted(kwargs)[0]!r}; use dbrdist.using_config in its place")


class _WithoutCell(_NStepBase):
    def forward(self, hx: Operand | None, xs: Sequence[Any] | None = None, **kwargs: Any) -> tuple[Any, Any]:
        """hx (layers, N, U) or None for zeros; xs: N sequences (L, I). The last states and the N outputs (L, U).

        Args:
            hx: the first states (layers, N, U); None for zeros.
            xs: N sequences (L, I), of any lengths.
            kwargs: refused: arguments of Chainer 1.
        """
        _refuse(type(self).__name__, kwargs)
        hy, ys = self._run((hx,), xs)
        return hy, ys


class _WithCell(_NStepBase):
    n_cells = 2

    def forward(
        self, hx: Operand | None, cx: Operand | None = None, xs: Sequence[Any] | None = None, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """hx, cx (layers, N, U) or None for zeros; xs: N sequences (L, I). The last states, and the outputs (L, U).

        Args:
            hx, cx: the first states and cells (layers, N, U); None for zeros.
            xs: N sequences (L, I), of any lengths.
            kwargs: refused: arguments of Chainer 1.
        """
        _refuse(type(self).__name__, kwargs)
        hy, cy, ys = self._run((hx, cx), xs)
        return hy, cy, ys


_ARGUMENTS = """

    Args:
        n_layers: number of layers.
        in_size: I, elements of a step.
        out_size: U, units of a layer{both}.
        dropout: the probability that elements of the input of each layer but the first are dropped in training.
        initialW, initial_bias: initializers; default LeCunNormal and 0.
        kwargs: accepted for no name; Chainer 1's ``use_cudnn`` raises a TypeError with a hint.

    Example:
        >>> xs = [np.ones((5, 3), np.float32), np.ones((2, 3), np.float32)]  # two sequences
        >>> *states, ys = L.{name}(1, 3, 4, 0.0)({states}, xs)
        >>> states[0].shape, [y.shape for y in ys]
        (({layers}, 2, 4), [(5, {width}), (2, {width})])
    """


def _n_step(name: str, base: Any, rnn: Any, n_weights: int, is_both: bool, what: str) -> Any:
    doc = f"{what} over sequences of different lengths, in any order; see :func:`dbrdist.functions.{rnn.__name__}`."
    both, states = ", in each direction" if is_both else "", "None, None" if base is _WithCell else "None"
    doc += _ARGUMENTS.format(both=both, name=name, states=states, layers=1 + is_both, width=4 + 4 * is_both)
    body = {"n_weights": n_weights, "use_bi_direction": is_both, "__doc__": doc, "__module__": __name__}
    return type(name, (base,), {**body, "rnn": lambda self, *args: rnn(*args)})


def _relu_of(rnn: Any) -> Any:
    def with_relu(*args: Any) -> tuple[Variable, list[Variable]]:
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


explain_constructors(globals())
