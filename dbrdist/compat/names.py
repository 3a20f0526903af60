"""Names of Chainer's modules that programs use and that no module of dbrdist has under the same name."""

from __future__ import annotations

import collections.abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist import optimizers
from dbrdist.compat import windows
from dbrdist.core.array.types import Array, PerAxis
from dbrdist.core.model import pickles_of_chainer
from dbrdist.core.tape import type_check
from dbrdist.core.tape.node import VariableNode
from dbrdist.datasets.loading.convert import stack
from dbrdist.functions import log_softmax
from dbrdist.links import initializers, local_convolution, n_step_rnn, rnn

_workspace_bytes = [8 * 1024 * 1024]  # Chainer's default


def _get_max_workspace_size() -> int:
    """What was last given to ``set_max_workspace_size``, in bytes."""
    return _workspace_bytes[0]


def _set_max_workspace_size(size: int) -> None:
    """Remember the limit of cuDNN's workspace in bytes. It changes no result, and here no kernel either."""
    _workspace_bytes[0] = int(size)


def _pair(x: PerAxis) -> Any:
    """(x, x) of a number; a sequence as it is."""
    return x if hasattr(x, "__getitem__") else (x, x)


def _concat_arrays(arrays: Any, padding: Any) -> Any:
    """Arrays or numbers along a new first axis, filled up with ``padding``."""
    return stack(arrays, padding, None)


def _log_softmax(x: Any, axis: int = 1) -> Any:
    """:func:`dbrdist.functions.log_softmax` of an array, as an array."""
    return log_softmax(x, axis).array


def _matmul(a: Any, b: Any, transa: bool = False, transb: bool = False, transout: bool = False) -> Any:
    """The product of two arrays, or of stacks of matrices; ``transout``: its transpose."""
    a, b = (x.swapaxes(-1, -2) if is_swapped and x.ndim > 1 else x for x, is_swapped in ((a, transa), (b, transb)))
    y = a @ b
    return y.swapaxes(-1, -2) if transout and y.ndim > 1 else y


def _check_ndim(in_type: Any, lower: int = 1, upper: int = 2) -> None:
    type_check.expect(in_type.ndim >= lower, in_type.ndim <= upper)


def _get_check_index(trans: bool, right: bool, row_idx: int = 0, col_idx: int = 1) -> int:
    """The axis of an operand that a product sums over: the last of the left one, unless it is transposed."""
    return row_idx if trans != right else col_idx


def _argsort_list_descent(xs: Sequence[Array]) -> Array:
    """The places of sequences, the longest first."""
    return np.argsort([-len(x) for x in xs]).astype(np.int32)


def _permutate_list(xs: Any, places: Any, inv: bool) -> list[Any] | None:
    """A list in another order; ``inv`` undoes that."""
    if not inv:
        return [xs[i] for i in places]
    moved = [None] * len(xs)
    for x, i in zip(xs, places):
        moved[i] = x
    return moved


def _linear_filter(size: int, ndim: int, upsampling: bool = True) -> Any:
    """The weights of linear interpolation over ``ndim`` axes."""
    kind = initializers.UpsamplingDeconvFilter if upsampling else initializers.DownsamplingConvFilter
    return functools.reduce(np.multiply.outer, [kind().window(size)] * ndim, np.ones(()))


def _ravel(a: Array) -> Array:
    """An array with one axis."""
    return a.ravel() if a.ndim != 1 else a


def _rows(a: Array) -> Any:
    """An array with two axes: each example is a row."""
    return a.reshape(len(a), -1) if a.ndim != 2 else a


# Where the rules of optimizers are in Chainer.
_RULES = {
    f"chainer.optimizers.{module}.{name}Rule": getattr(optimizers, name).rule_class
    for module, name in (
        ("ada_delta", "AdaDelta"), ("ada_grad", "AdaGrad"), ("corrected_momentum_sgd", "CorrectedMomentumSGD"),
        ("momentum_sgd", "MomentumSGD"), ("msvag", "MSVAG"), ("nesterov_ag", "NesterovAG"), ("rmsprop", "RMSprop"),
        ("rmsprop_graves", "RMSpropGraves"), ("sgd", "SGD"), ("smorms3", "SMORMS3"),
    )
}  # fmt: skip
_OF_RECURRENT_LINKS = {
    "chainer.links.rnn.gru.GRUBase": rnn._GRUBase,
    "chainer.links.rnn.lstm.LSTMBase": rnn._LSTMBase,
    "chainer.links.rnn.mgu.MGUBase": rnn._MGUBase,
    "chainer.links.rnn.n_step_rnn.argsort_list_descent": _argsort_list_descent,
    "chainer.links.rnn.n_step_rnn.permutate_list": _permutate_list,
    **{
        f"chainer.links.rnn.n_step_{kind.lower()}.NStep{kind}Base": n_step_rnn._NStepBase
        for kind in ("GRU", "LSTM", "RNN")
    },
}


_BY_PATH: dict[str, Any] = {
    "chainer.backends.cuda.get_max_workspace_size": _get_max_workspace_size,
    "chainer.backends.cuda.set_max_workspace_size": _set_max_workspace_size,
    "chainer.cuda.get_max_workspace_size": _get_max_workspace_size,
    "chainer.cuda.set_max_workspace_size": _set_max_workspace_size,
    "chainer.dataset.convert._concat_arrays": _concat_arrays,
    "chainer.functions.activation.log_softmax._log_softmax": _log_softmax,
    "chainer.functions.math.basic_math.div": lambda a, b: a / b,
    "chainer.functions.math.basic_math.mul": lambda a, b: a * b,
    "chainer.functions.math.basic_math.neg": lambda a: -a,
    "chainer.functions.math.basic_math.pow": lambda a, b: a**b,
    "chainer.functions.math.basic_math.sub": lambda a, b: a - b,
    "chainer.functions.math.matmul._check_ndim": _check_ndim,
    "chainer.functions.math.matmul._get_check_index": _get_check_index,
    "chainer.functions.math.matmul._matmul": _matmul,
    "chainer.initializer.get_fans": initializers.get_fans,
    "chainer.initializers.sampling._get_linear_filter": _linear_filter,
    "chainer.initializers._get_initializer": initializers.get_initializer,
    "chainer.links.connection.deformable_convolution_2d.DeformableConvolution2DSampler": local_convolution._Sampler,
    "chainer.utils.collections_abc": collections.abc,
    "chainer.optimizer._Hookable": pickles_of_chainer.PickledHooks,
    "chainer.optimizer._OptimizerHookable": pickles_of_chainer.PickledHooks,
    "chainer.variable.VariableNode": VariableNode,
    "chainer.variable._create_variable": pickles_of_chainer.create_variable,
    "chainer.variable._recover_parameter": pickles_of_chainer.recover_parameter,
    "chainer.utils.array.as_mat": _rows,
    "chainer.utils.array.as_vec": _ravel,
    **windows.NAMES,
    **_RULES,
    **_OF_RECURRENT_LINKS,
}
# In any module of a package.
_BY_PACKAGE: dict[tuple[str, str], Callable[..., Any]] = {
    ("chainer.functions", "_as_tuple"): windows.as_tuple,
    ("chainer.functions", "_pair"): _pair,
    ("chainer.links", "_pair"): _pair,
}


def find(path: str, name: str) -> Any:
    """What ``name`` of Chainer's module ``path`` is here, or None."""
    found = _BY_PATH.get(f"{path}.{name}")
    return _BY_PACKAGE.get((".".join(path.split(".")[:2]), name)) if found is None else found
