"""The usual head of a supervised network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbrdist.core.array.types import Array
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.link import Link
from dbrdist.core.model.reporter import report
from dbrdist.core.tape.variable import Operand
from dbrdist.core.usage.mistakes import given_a_class
from dbrdist.functions.class_loss import softmax_cross_entropy
from dbrdist.functions.evaluation import accuracy


def _described(x: Array) -> str:
    return f"an array of shape {x.shape}" if hasattr(x, "shape") else type(x).__name__


class _NoInput(TypeError, ValueError):
    """A label came without an input that the predictor needs."""


class Classifier(Chain):
    """The loss, and the accuracy, of a predictor's output for labelled examples.

    Args:
        predictor: the network.
        lossfun: called with the prediction and the label; gives the loss.
        accfun: likewise; gives the accuracy.
        label_key: which argument is the label: a position among the positional ones, or the name of a keyword.

    ``y``, ``loss`` and ``accuracy`` hold the results of the last call; ``'loss'`` and ``'accuracy'`` are reported.
    ``compute_accuracy = False`` skips the accuracy.

    Example:
        >>> model = L.Classifier(L.Linear(4, 3))
        >>> loss = model(np.zeros((2, 4), np.float32), np.array([0, 1]))
        >>> float(model.accuracy.array)
        0.5
    """

    compute_accuracy = True

    def __init__(
        self,
        predictor: Link,
        lossfun: Callable[..., Any] = softmax_cross_entropy,
        accfun: Callable[..., Any] | None = accuracy,
        label_key: int | str = -1,
    ) -> None:
        if not isinstance(label_key, (int, str)):
            raise TypeError(f"Classifier: label_key must be int or str, got {type(label_key).__name__}")
        if isinstance(predictor, type):
            raise given_a_class("Classifier: predictor", predictor, "a link")
        if not callable(predictor):
            raise TypeError(f"Classifier: predictor: expected a link, got {type(predictor).__name__}")
        for name, function in (("lossfun", lossfun), ("accfun", accfun)):
            if not callable(function) and (name, function) != ("accfun", None):
                raise TypeError(f"Classifier: {name}: expected a function, got {type(function).__name__}")
        super().__init__()
        self.lossfun = lossfun
        self.accfun = accfun
        self.label_key = label_key
        self.y: Any = None
        self.loss: Any = None
        self.accuracy: Any = None
        with self.init_scope():
            self.predictor = predictor

    def forward(self, *args: Operand, **kwargs: Operand) -> Any:
        """The loss of a batch, which is reported with the accuracy.

        Args:
            args: the inputs, and the labels at the place ``label_key``.
            kwargs: further inputs by name; the labels among them if ``label_key`` is a name.

        Returns:
            The loss, a Variable.
        """
        key = self.label_key
        if isinstance(key, int):
            if not -len(args) <= key < len(args):
                hint = f"; examples are dictionaries: pass label_key, one of {sorted(kwargs)}" if kwargs else ""
                raise ValueError(
                    f"Classifier: Label key {key} is out of bounds: expected a label at that position, got "
                    f"{len(args)} positional arguments{hint}"
                )
            t = args[key]
            args = args[: key % len(args)] + args[key % len(args) + 1 :]
        else:
            if key not in kwargs:
                raise ValueError(
                    f"Classifier: Label key {key!r} is not found: expected a label as that keyword, got keywords "
                    f"{sorted(kwargs)}"
                )
            t = kwargs.pop(key)
        self.y = self.loss = self.accuracy = None  # free the last graph before the next one is built
        try:
            y = self.y = self.predictor(*args, **kwargs)
        except TypeError as error:
            if args or kwargs:
                raise
            raise _NoInput(
                f"Classifier: expected examples (input, label), got {_described(t)} alone: does the dataset have "
                "labels, and does its transform return both?"
            ) from error
        loss = self.loss = self.lossfun(y, t)
        report({"loss": loss}, self)
        if self.compute_accuracy and self.accfun is not None:
            accuracy = self.accuracy = self.accfun(y, t)
            report({"accuracy": accuracy}, self)
        return loss  # its own: another thread may have called since
