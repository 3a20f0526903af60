"""What losses expect: scores, as they come from a network, and labels of their classes. Other inputs are warned of."""

from __future__ import annotations

from typing import Any

from numpy import ndarray

from dbrdist.core.tape.node import Value
from dbrdist.core.usage.mistakes import warn


def made_by(x: Any) -> str:
    """The name of the function that made a Variable; nothing for others and where no graph was recorded."""
    creator = x.node.creator_node if isinstance(x, Value) else None
    return "" if creator is None else type(creator).__name__


def warn_of_probabilities(loss: str, made_by: str) -> None:
    """A loss that applies softmax or sigmoid itself was given what comes behind it."""
    warn(
        f"{loss}: x: expected scores, got the output of {made_by.lower()}, which the loss applies itself, so that "
        f"gradients nearly vanish; leave {made_by.lower()} out of the network"
    )


def warn_of_one_class(loss: str) -> None:
    """The softmax of one score is 1, whatever the score."""
    warn(
        f"{loss}: x: there is one class, so the loss is always 0 and has no gradient; for two classes use two outputs, "
        "or sigmoid_cross_entropy, and for numbers mean_squared_error"
    )


def warn_of_other_labels(metric: str, t: Any, num_classes: int, ignore_label: int | None) -> None:
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
