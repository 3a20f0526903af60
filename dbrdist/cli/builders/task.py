"""A network together with what it is trained for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dbrdist import functions as F
from dbrdist.core.array.backend import as_dtype, is_array
from dbrdist.core.array.config import config
from dbrdist.core.array.types import Array
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.link import Link
from dbrdist.core.model.reporter import report
from dbrdist.core.tape.variable import Variable, as_array
from dbrdist.functions.evaluation import hit_fraction
from dbrdist.training.mirrored import mean_over_mirrored

_FLOAT32 = as_dtype("float32")
_NARROW = (as_dtype("float16"), as_dtype("bfloat16"))


class Task(Chain):
    """Calls `predictor` with a batch's inputs, and gives and reports the loss of its outputs against the labels.

    `loss(outputs, labels)` is a function; None means that the predictor takes the whole batch and gives the loss
    itself. Where labels are integers, or for the softmax cross entropy weights of the classes, and outputs one number
    per class, the accuracy is reported too, and so are `metrics`, functions of (outputs, labels), by name. With
    `flips_tests` outputs are, outside of training, means over those of images (N, C, H, W) and of their mirror images.
    `on_outputs(inputs, outputs, labels)` is called, outside of training, with each batch.
    """

    def __init__(
        self,
        predictor: Link,
        loss: Callable[[Any, Any], Any] | None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        flips_tests: bool = False,
    ):
        super().__init__()
        self.flips_tests = flips_tests
        self.on_outputs: Callable[[Any, Any, Any], None] | None = None
        self.loss = loss
        self.metrics = dict(metrics or {})
        with self.init_scope():
            self.predictor = predictor

    def forward(self, *batch: Any, **named: Any) -> Any:
        loss_function = self.loss
        if loss_function is None:
            loss = self.predictor(*batch, **named)
            report({"loss": loss}, self)
            return loss
        if named or len(batch) != 2:
            got = f"dictionaries of {', '.join(named)}" if named else f"{len(batch)} entries"
            raise ValueError(
                f"expected examples of (input, label), got {got}; with `loss: model` the network takes any batch"
            )
        inputs, labels = batch
        flips = self.flips_tests and not config.train
        outputs = mean_over_mirrored(self.predictor, inputs) if flips else self.predictor(inputs)
        dtype = getattr(outputs, "dtype", None)
        if dtype is not _FLOAT32 and dtype in _NARROW:  # or else losses and accuracies have three digits
            outputs = F.cast(outputs, "float32")
        loss = loss_function(outputs, labels)
        if self.on_outputs is not None and not config.train:
            self.on_outputs(inputs, outputs, labels)
        observed = {"loss": loss}
        are_classes = labels.dtype.kind in "iu"
        if (outputs.ndim == labels.ndim + 1) if are_classes else self._has_weights(outputs, labels):
            observed["accuracy"] = hit_fraction(as_array(outputs), as_array(labels))
        for name, metric in self.metrics.items():
            observed[name] = _reported(name, metric(_copied(outputs), _copied(labels)))
        report(observed, self)
        return loss

    def cleargrads(self) -> None:
        """Those of the network, which are all."""
        self.predictor.cleargrads()

    def _has_weights(self, outputs: Any, labels: Array) -> bool:
        """Whether labels are weights of the classes for the cross entropy."""
        is_entropy = getattr(self.loss, "func", self.loss) in (F.softmax_cross_entropy, F.binary_cross_entropy)
        return is_entropy and outputs.shape == labels.shape


def _copied(part: Any) -> Any:
    """What a metric gets: it may change that in place, and the gradient is still to be computed."""
    if isinstance(part, Variable):
        return Variable(part.array.copy(), requires_grad=False)
    if is_array(part):
        return part.copy()
    return type(part)(map(_copied, part)) if type(part) in (tuple, list) else part


def _reported(name: str, value: Any) -> Any:
    """What a metric gives, a Decimal or a Fraction as a float; TypeError where that is no number."""
    if not hasattr(value, "dtype"):
        try:
            value = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"metric {name}: expected a number, got {type(value).__name__} ({error})") from error
    return value
