"""A moving average of the weights, which often generalises better than the last ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from dbrdist.core.array.backend import accumulation_dtype, copy, on
from dbrdist.core.array.types import Array
from dbrdist.core.model.link import Link
from dbrdist.core.names.limits import count, fraction
from dbrdist.training.extension import PRIORITY_WRITER, Extension, as_extension, subject_of

if TYPE_CHECKING:
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.training.trainer import Trainer

_FRACTION, _COUNT = (limit.but(is_of_chainer=True) for limit in (fraction, count))


class WeightAverage(Extension):
    """Moving averages of all parameters, which often generalise better than the last values.

    After each step `a <- a + (1 - d) (w - a)` with `d = min(decay, (1 + t) / (10 + t))` at the t-th update, so that the
    first steps are soon forgotten. Averages of 16-bit weights are kept in float32. Snapshots hold them. Ranks with
    equal
    weights have equal averages.

    Args:
        model: the link whose parameters are averaged.
        decay: the part of the old average that stays, from 0 to less than 1; for a half-life of h steps give
            `0.5 ** (every / h)`.
        warmup: False uses `decay` from the first update on.
        every: the number of steps for one update of the averages.

    Raises:
        ValueError: `decay` or `every` is out of range.

    Example:
        >>> model = L.Classifier(L.Linear(64, 10))
        >>> average = extensions.WeightAverage(model, 0.999)  # trainer.extend(average)
        >>> test = iterators.SerialIterator(datasets.get_digits()[1], 100, repeat=False, shuffle=False)
        >>> evaluator = average.around(extensions.Evaluator(test, model))  # of the averages
    """

    trigger = (1, "iteration")
    priority = PRIORITY_WRITER + 100  # before an evaluation of the averages

    def __init__(
        self,
        model: Link,
        decay: Annotated[
            float,
            _FRACTION,
            "The fraction of the average that an update of it keeps; or give `half_life`.",
        ],
        warmup: Annotated[
            bool,
            "Whether the first steps are soon forgotten: the fraction at update t is at most (1 + t) / (10 + t).",
        ] = True,
        every: Annotated[int, _COUNT, "Steps between two updates of the average."] = 1,
    ):
        self._model = model
        self._every = every
        self._decay = decay
        self._warmup = warmup
        self._num_steps = 0
        self._averages: dict[str, Any] = {}

    @property
    def averages(self) -> dict[str, Array]:
        """The averages by the parameters' paths."""
        return self._averages

    @property
    def model(self) -> Link:
        """The network."""
        return self._model

    @contextlib.contextmanager
    def replaced(self, averages: dict[str, Array]) -> Iterator[None]:
        """Within the block, ``averages`` (arrays by parameter path) are the averages."""
        own, self._averages = self._averages, averages
        try:
            yield
        finally:
            self._averages = own

    def initialize(self, trainer: Trainer) -> None:
        for path, param in self._params():
            if path not in self._averages:
                self._averages[path] = _wide(param.lend())

    def __call__(self, trainer: Trainer) -> None:
        self._num_steps += 1
        if self._num_steps % self._every:
            return
        t = self._num_steps // self._every
        rate = 1 - (min(self._decay, (1 + t) / (10 + t)) if self._warmup else self._decay)
        for path, param in self._params():
            average = self._averages.get(path)
            if average is None:  # initialised by this step
                self._averages[path] = _wide(param.lend())
                continue
            with on(average):
                difference = param.lend() - average
                difference *= rate
                average += difference

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, the network has the averages as its weights."""
        own = {path: copy(param.lend()) for path, param in self._params()}
        try:
            self._set(self._averages)
            yield
        finally:
            self._set(own)

    def around(self, extension: Extension) -> Extension:
        """An extension that calls ``extension`` (often an evaluator) while the averages are the weights."""
        return _Around(self, as_extension(extension))

    def _set(self, values: dict[str, Array]) -> None:
        for path, param in self._params():
            if path in values:
                param.write(values[path])

    def _params(self) -> Iterator[tuple[str, Any]]:
        return ((path.strip("/"), p) for path, p in self._model.namedparams(include_uninit=False))

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._num_steps = int(serializer("num_steps", self._num_steps))
        weights = serializer["weights"]
        for path, param in self._params():
            average = self._averages.get(path)
            self._averages[path] = weights(path, _wide(param.lend()) if average is None else average)


def _wide(array: Array) -> Array:
    with on(array):
        wide: Array = array.astype(accumulation_dtype(array.dtype), copy=True)
        return wide


class _Around(Extension):
    """Another extension, called on the averages."""

    def __init__(self, average: WeightAverage, inner: Extension):
        self._average = average
        self._inner = inner
        self.trigger, self.priority, self.name = inner.trigger, inner.priority, inner.name
        self.default_name = inner.default_name
        self.subject = subject_of(inner)

    def __call__(self, trainer: Trainer) -> Any:
        self._inner.name = self.name
        with self._average.applied():
            return self._inner(trainer)

    def initialize(self, trainer: Trainer) -> None:
        self._inner.initialize(trainer)

    def finalize(self) -> None:
        self._inner.finalize()

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._inner.serialize(serializer)
