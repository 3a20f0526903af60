"""What the graphs before an optimizer's first update show: pixels that were not scaled, errors of each with each."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.tape.backprop import watching_backward
from dbrdist.core.usage.mistakes import warn

if TYPE_CHECKING:
    from dbrdist.core.array.types import Array
    from dbrdist.core.model.link import Link
    from dbrdist.core.tape.function_node import FunctionNode
    from dbrdist.core.tape.node import VariableNode
    from dbrdist.core.tape.variable import Variable

_MANY_PASSES = 16  # before the first update: further ones are not looked at
_MANY_CALLS = 20_000  # of one graph
_LOOKED_AT = 4096  # elements of an input
_FEWEST_PIXELS = 64  # of a row that may be a flattened image
_WHITE = 255
_FEWEST_BRIGHT = 0.01  # the share of values in the upper half: of counts, such as those of words, there are fewer
_DARK = 16  # on the average, of what is not 0: counts are smaller
_GROUPS = "GroupNormalization"  # which consists of several calls, the first of which takes means away
_NORMALIZATIONS = (
    "BatchNormalization", "FixedBatchNormalization", _GROUPS, "LayerNormalization", "MultiNodeBatchNormalization",
    "NormalizedConvolution", "RMSNormalization", "RectifiedConvolution", "RectifiedSum", "ResidualBlock",
    "SharedBatchNormalization",
)  # fmt: skip
_KEEP_SCALE = (  # functions of which c x gives c y
    "AveragePooling2D", "Cast", "Concat", "Dropout", "MaxPooling2D", "ReLU", "Reshape", "Transpose", "leaky_relu",
)  # fmt: skip
_LAYERS = (
    "Convolution2D", "ConvolutionND", "LinearFunction", "NormalizedConvolution", "RectifiedConvolution",
    "ResidualBlock",
)  # fmt: skip


class FirstGraphs:
    """Looks at the graphs of the backward passes between an optimizer's setup and its first update.

    It warns once of each of two mistakes that let a network learn badly or nothing, without an error.
    """

    def __init__(self, target: Link) -> None:
        self._target = weakref.ref(target)
        self._thread = threading.get_ident()  # other threads may be ranks, with optimizers of their own
        self._num_passes = 0
        self._is_known: set[str] = set()
        watching_backward.append(self)

    def before(self, outputs: Sequence[Variable]) -> None:
        """Look at the calls behind ``outputs``."""
        if threading.get_ident() != self._thread:
            return
        self._num_passes += 1
        if self._num_passes > _MANY_PASSES:
            self.end()
            return
        seen: set[int] = set()
        waiting = [(y.node, "", True) for y in outputs]
        while waiting and len(seen) < _MANY_CALLS:
            node, user, is_of_loss = waiting.pop()
            call = node.living_creator()
            if call is not None and id(call) not in seen:
                seen.add(id(call))
                name = _name(call)
                self._see(call, name, user, is_of_loss)
                if name not in _KEEP_SCALE and (name, user) != ("Mean", _GROUPS):
                    user = _GROUPS if name == "sub" and _takes_mean_away(call) else name
                waiting += [(x, user, is_of_loss and name not in (*_LAYERS, "MatMul")) for x in call.inputs]

    def after(self) -> None:
        """The pass changes nothing in the graph."""

    def end(self) -> None:
        """Look no more."""
        if self in watching_backward:
            watching_backward.remove(self)

    def _see(self, call: FunctionNode, name: str, user: str, is_of_loss: bool) -> None:
        """Look at a call; ``user`` takes its output; ``is_of_loss``: no layer is between it and the loss."""
        if name in _LAYERS and user not in _NORMALIZATIONS:  # which take the scale of the input away
            words = _words_of_pixels(call)
            if words and self._learns(call.inputs[1]):
                self._warn_once("pixels", words)
        elif name == "sub" and is_of_loss:
            self._warn_once("errors", _words_of_errors(call))

    def _learns(self, weights: VariableNode) -> bool:
        """Whether weights are the target's and not frozen: frozen ones were made for such an input."""
        target = self._target()
        if weights.living_creator() is not None or target is None:  # such as those of spectral normalization
            return True
        return any(p.node is weights and not p.is_frozen for p in target.params())

    def _warn_once(self, mistake: str, words: str) -> None:
        if words and mistake not in self._is_known:
            self._is_known.add(mistake)
            warn(words)


def _name(call: FunctionNode) -> str:
    """The name of its class; nothing where that is the program's own, which may do something else."""
    kind = type(call)
    return kind.__name__ if kind.__module__.startswith("dbrdist.") else ""


def _takes_mean_away(call: FunctionNode) -> bool:
    """The first step of normalizations that are made of other functions, as that of groups is."""
    mean = call.inputs[1].living_creator()
    return mean is not None and _name(mean) == "Mean"


def _words_of_pixels(call: FunctionNode) -> str:
    """A first layer whose input has the values of pixels, whole numbers up to 255."""
    node = call.inputs[0]
    if node.living_creator() is not None:
        return ""
    kept = zip(call._keep_inputs or (), call._kept_xs or ())
    x = next((a for i, a in kept if a is not None and call.inputs[i] is node), None)
    if not isinstance(x, np.ndarray) or not _has_shape_of_images(x):
        return ""
    some = x[: -(-_LOOKED_AT // max(x[0].size, 1))].reshape(-1)
    some = some[:: -(-some.size // _LOOKED_AT)]
    low, high = float(some.min()), float(some.max())
    if not (low >= 0 and _WHITE / 2 < high <= _WHITE and bool((some == np.rint(some)).all())):
        return ""
    is_dark = some[some > 0].mean(dtype=np.float64) < _DARK
    if is_dark or np.count_nonzero(some > _WHITE / 2) < _FEWEST_BRIGHT * some.size:
        return ""
    what = "convolution" if x.ndim > 2 else "Linear"
    return (
        f"the first {what} of the network gets pixels from {low:.0f} to {high:.0f}, with which it learns badly; scale "
        "them in training, evaluation and prediction, for example by x.astype(numpy.float32) / 255, or in a "
        "configuration by the transform normalize"
    )


def _has_shape_of_images(x: Array) -> bool:
    """Whether rows are long enough for flattened images, or there are 1, 3 or 4 channels."""
    if x.ndim == 2:
        return bool(len(x) and x.shape[1] >= _FEWEST_PIXELS)
    return bool(x.ndim == 4 and x.size and x.shape[1] in (1, 3, 4) and min(x.shape[2:]) > 1)


def _words_of_errors(call: FunctionNode) -> str:
    """A difference of one column of outputs and a vector of targets, which is a square."""
    a, b = call.inputs
    if a.ndim == 1:
        a, b = b, a
    is_each_with_each = a.ndim == 2 and b.ndim == 1 and a.shape == (*b.shape, 1) and len(b.shape) and b.shape[0] > 1
    if not is_each_with_each or a.requires_grad == b.requires_grad or not _is_target(b if a.requires_grad else a):
        return ""
    n = b.shape[0]
    return (
        f"the difference of outputs of shape {a.shape} and targets of shape {b.shape} has shape {(n, n)}, each with "
        "each; bring both to one shape, for example with targets[:, None], or F.squeeze(outputs, 1)"
        if a.requires_grad
        else f"the difference of outputs of shape {b.shape} and targets of shape {a.shape} has shape {(n, n)}, each "
        "with each; bring both to one shape, for example with targets[:, 0]"
    )


def _is_target(node: VariableNode) -> bool:
    return not node.requires_grad and node.living_creator() is None
