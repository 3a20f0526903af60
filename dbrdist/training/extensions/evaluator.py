"""Evaluation on held-out data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dbrdist.core.backend import get_device
from dbrdist.core.config import no_backprop_mode, using_config
from dbrdist.core.reporter import DictSummary, Reporter, report, report_scope
from dbrdist.datasets.convert import concat_examples
from dbrdist.training.extension import PRIORITY_WRITER, Extension
from dbrdist.training.updater import as_arguments


class Evaluator(Extension):
    """Goes once through `iterator`, calls `eval_func` (the target if not given) on each batch, and reports means.

    Each batch counts with its number of examples, so a short last batch weighs what it should: the means are those
    over examples. Keys are `validation/main/loss` and the like: the extension's name, the target's, the reported one.
    """

    trigger = (1, "epoch")
    priority = PRIORITY_WRITER

    def __init__(
        self,
        iterator: Any,
        target: Any,
        converter: Callable[..., Any] = concat_examples,
        device: Any = None,
        eval_hook: Callable[[Any], None] | None = None,
        eval_func: Callable[..., Any] | None = None,
        **kwargs: Any,
    ):
        if kwargs:
            raise TypeError(f"Evaluator() got unknown arguments: {', '.join(kwargs)}")
        self._iterators = dict(iterator) if isinstance(iterator, Mapping) else {"main": iterator}
        self._targets = dict(target) if isinstance(target, Mapping) else {"main": target}
        self.converter = converter
        self.device = None if device is None else get_device(device)
        self.eval_hook = eval_hook
        self.eval_func = eval_func

    @property
    def default_name(self) -> str:
        return "validation"

    def get_iterator(self, name: str) -> Any:
        """The iterator of that name."""
        return self._iterators[name]

    def get_all_iterators(self) -> dict[str, Any]:
        """All iterators by name."""
        return dict(self._iterators)

    def get_target(self, name: str) -> Any:
        """The target of that name."""
        return self._targets[name]

    def get_all_targets(self) -> dict[str, Any]:
        """All targets by name."""
        return dict(self._targets)

    def __call__(self, trainer: Any = None) -> dict[str, float]:
        """Evaluate, report the means to the current reporter, and return them."""
        reporter = Reporter()
        prefix = self.name + "/" if self.name else ""
        for name, target in self._targets.items():
            reporter.add_observer(prefix + name, target)
            reporter.add_observers(prefix + name, target.namedlinks(skipself=True))
        with reporter, using_config("train", False):
            result = self.evaluate()
        report(result)
        return result

    def evaluate(self) -> dict[str, float]:
        """The means over all examples; override it to evaluate otherwise."""
        return self.summarize().compute_mean()

    def summarize(self) -> DictSummary:
        """The weighted sums over all examples that this process evaluates; several of them add up exactly."""
        if self.eval_hook is not None:
            self.eval_hook(self)
        summary = DictSummary()
        for batch in self._one_pass():
            summary.add({key: (value, len(batch)) for key, value in self.observe(batch).items()})
        return summary

    def observe(self, batch: Any) -> dict[str, Any]:
        """What is reported for one batch."""
        function = self._targets["main"] if self.eval_func is None else self.eval_func
        observation: dict[str, Any] = {}
        with report_scope(observation), no_backprop_mode():
            args, named = as_arguments(self.converter(batch, self.device))
            function(*args, **named)
        return observation

    def _one_pass(self) -> Iterator[Any]:
        iterator = self._iterators["main"]
        if hasattr(iterator, "reset"):
            iterator.reset()
        else:
            iterator = copy.copy(iterator)
        return (batch for batch in iterator if len(batch))

    def finalize(self) -> None:
        """End the iterators' workers."""
        for iterator in self._iterators.values():
            iterator.finalize()
