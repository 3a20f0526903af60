"""What losses expect: scores, as they come from a network, and labels of their classes. Other inputs are warned of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy import ndarray

from dbrdist.core.tape.node import Value
from dbrdist.core.usage.mistakes import warn

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Operand

_ITSELF = "but the loss turns scores into probabilities itself, so that gradients nearly vanish"
_NO_NEGATIVE = "which has no scores below 0, so that their gradients are 0"
# By the class that a function's node has: what is wrong with its output as scores.
_FAULTS = {
    "Softmax": ("softmax", _ITSELF), "sigmoid": ("sigmoid", _ITSELF), "hard_sigmoid": ("hard_sigmoid", _ITSELF),
    "ReLU": ("relu", _NO_NEGATIVE), "relu6": ("relu6", _NO_NEGATIVE), "clipped_relu": ("clipped_relu", _NO_NEGATIVE),
    "Dropout": ("dropout", "which replaces some of the scores by 0"),
}  # fmt: skip
_BY_HAND = ("div", "exp", "clip", "reciprocal")  # the last steps of a softmax or sigmoid that a program writes itself
NOT_SCORES = frozenset((*_FAULTS, "Reshape", *_BY_HAND))
_LOOKED_AT = 16  # examples
_ROUNDING = 1e-2  # of targets, as of resized images, whose filters reach a little beyond


def see_scores(loss: str, x: Operand) -> None:
    """Warn where the scores of a loss are the output of an activation, or of dropout."""
    if not isinstance(x, Value) or type(x.node.creator_node).__name__ not in NOT_SCORES:
        return
    if type(x.node.creator_node).__name__ in _BY_HAND:
        _see_probabilities(loss, x)
        return
    creator: Any = x.node.creator_node
    while type(creator).__name__ == "Reshape" and creator.inputs:
        creator = creator.inputs[0].creator_node
    is_ours = type(creator).__module__.startswith("dbrdist.")  # a program's own function may be called Softmax, too
    name, fault = _FAULTS.get(type(creator).__name__, ("", "")) if is_ours else ("", "")
    if name and not (name == "softmax" and loss == "softmax_cross_entropy" and _is_along_another_axis(creator)):
        warn(f"{loss}: x: expected scores, got the output of {name}, {fault}; leave {name} out of the network")


def _see_probabilities(loss: str, x: Any) -> None:
    """Warn of a softmax that a program computes itself, whose rows sum up to 1, and likewise of a sigmoid."""
    if loss == "softmax_cross_entropy":
        some = x.array[:_LOOKED_AT]
        is_softmax = isinstance(some, ndarray) and some.ndim > 1 and some.shape[1] > 1 and bool((some >= 0).all())
        if is_softmax and some.size and bool((abs(some.sum(axis=1, dtype="d") - 1) < 1e-3).all()):
            warn(f"{loss}: x: expected scores, got probabilities that sum up to 1, {_ITSELF}; leave the softmax out")
    elif _is_sigmoid(x.node.creator_node) and _is_unscaled(x):
        warn(f"{loss}: x: expected scores, got 1 / (1 + exp(-x)), {_ITSELF}; pass x itself")


def _is_sigmoid(creator: Any) -> bool:
    """Whether a function is the last step of 1 / (1 + exp(-x)), or holds a sigmoid within limits.

    A scale that is trained, as in ``scale / (1 + exp(-x))``, makes scores of it.
    """
    kinds = ["clip", "sigmoid"] if type(creator).__name__ == "clip" else ["div", "add", "exp"]
    for kind in kinds:
        if type(creator).__name__ != kind:
            return False
        sources = [v for v in creator.inputs if v.requires_grad]
        creator = sources[0].creator_node if len(sources) == 1 else None
    return True


def _is_unscaled(x: Any) -> bool:
    """Whether such values are from 0 to 1 and, of a quotient, what was divided is 1: other numbers make scores."""
    y, kept = x.array, x.node.creator_node._kept_xs
    if not isinstance(y, ndarray):
        return False
    some = y[:_LOOKED_AT] if y.ndim else y
    if type(x.node.creator_node).__name__ == "div" and kept and kept[-1].shape == y.shape:
        divided = some * (kept[-1][:_LOOKED_AT] if y.ndim else kept[-1])
        if not bool((abs(divided[divided == divided] - 1) < _ROUNDING).all()):
            return False
    return bool(((some >= 0) & (some <= 1)).all())


def see_targets(loss: str, name: str, t: Operand) -> None:
    """Warn where targets that are probabilities lie outside [0, 1], such as pixels up to 255; some are looked at."""
    if not isinstance(t, ndarray) or not t.size or t.dtype.kind != "f":
        return
    some = t.reshape(-1)[:: -(-t.size // 1024)] if t.flags.c_contiguous else t[:1]
    low, high = float(some.min()), float(some.max())
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        words = f"expected probabilities from 0 to 1, got numbers from {low:.6g} to {high:.6g}"
        hint = "divide pixels by 255" if low >= 0 and high > 2 else "bring them to that range first"
        warn(f"{loss}: {name}: {words}, for which the loss is no likelihood and has no smallest value; {hint}")


def _is_along_another_axis(softmax: Any) -> bool:
    """Than classes, as attention over places is."""
    return softmax.axis not in (1, 1 - len(softmax.inputs[0].shape))


def warn_of_one_class(loss: str) -> None:
    """The softmax of one score is 1, whatever the score."""
    warn(
        f"{loss}: x: there is one class, so the loss is always 0 and has no gradient; for two classes use two outputs, "
        "or sigmoid_cross_entropy, and for numbers mean_squared_error"
    )


def warn_of_other_labels(metric: str, t: Operand, num_classes: int, ignore_label: int | None) -> None:
    """Labels that are no class count as wrong, which is probably not meant."""
    if not isinstance(t, ndarray) or not t.size or (int(t.min()) >= 0 and int(t.max()) < num_classes):
        return
    others = t[(t < 0) | (t >= num_classes)]
    if ignore_label is not None:
        others = others[others != ignore_label]
    if others.size:
        label = int(others.flat[0])
        hint = f"pass ignore_label={label} if they mean nothing" if label < 0 else "are labels counted from 0?"
        warn(f"{metric}: t: there are labels such as {label} among {num_classes} classes, which count as wrong; {hint}")
