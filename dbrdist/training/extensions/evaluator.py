"""Evaluation on held-out data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.backend import DeviceSpec, get_device, using_device
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.config import no_backprop_mode, using_config
from dbrdist.core.files import standard_streams
from dbrdist.core.model.apart import owner
from dbrdist.core.model.reporter import DictSummary, Reporter, report, report_scope, warn_of_no_numbers
from dbrdist.core.update.targets import explain_call
from dbrdist.core.usage.foreign_names import refuse_unknown
from dbrdist.core.usage.mistakes import given_a_class, warn
from dbrdist.datasets.loading.convert import call_converter, concat_examples, refuse_losses
from dbrdist.training.extension import PRIORITY_WRITER, Extension
from dbrdist.training.out_of_memory import explain
from dbrdist.training.updater import as_arguments, finalize, parts_of_ranks

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link


class Evaluator(Extension):
    """Goes once through a dataset and reports the means of what the network reports, such as loss and accuracy.

    Each batch counts with its number of examples: the means are those over examples, whatever the size of the last
    batch.
    Keys are `validation/main/loss` and the like: the extension's name, the target's, the reported one.

    Args:
        iterator: the batches of one pass (`repeat=False`); or a dictionary of iterators with `"main"` in it.
        target: the link to evaluate; or a dictionary of links with `"main"` in it.
        converter: `converter(batch, device)` makes arrays of a batch.
        device: where the arrays go, such as `"@cupy:0"`; None leaves them where they are.
        eval_hook: called with the evaluator before each pass.
        eval_func: called with the arrays of each batch; None calls the target.
        kwargs: `progress_bar=True` shows how far the pass is.

    Raises:
        TypeError: the iterator or the target is a class, or the target is no link.

    Example:
        >>> test = iterators.SerialIterator(datasets.get_digits()[1], 100, repeat=False, shuffle=False)
        >>> evaluator = extensions.Evaluator(test, L.Classifier(L.Linear(64, 10)))
        >>> sorted(evaluator())
        ['main/accuracy', 'main/loss']
    """

    trigger = (1, "epoch")
    priority = PRIORITY_WRITER
    default_name = "validation"
    is_of_all_ranks = False  # whether ranks evaluate together
    knows_its_part = False  # whether it looked for other ranks; a multi-node evaluator goes another way

    def __init__(
        self,
        iterator: Any,
        target: Any,
        converter: Callable[..., Any] = concat_examples,
        device: DeviceSpec | None = None,
        eval_hook: Callable[[Any], None] | None = None,
        eval_func: Callable[..., Any] | None = None,
        **kwargs: Any,
    ):
        self._has_bar = bool(kwargs.pop("progress_bar", False))
        refuse_unknown("Evaluator", Evaluator.__init__, kwargs)
        for what, given in (("an iterator", iterator), ("a link", target)):
            if isinstance(given, type):
                raise given_a_class("Evaluator", given, what)
        if not isinstance(target, Mapping) and not hasattr(target, "namedlinks"):
            raise TypeError(f"Evaluator: target: expected a link, got {type(target).__name__}")
        self._iterators = dict(iterator) if isinstance(iterator, Mapping) else {"main": iterator}
        self._targets = dict(target) if isinstance(target, Mapping) else {"main": target}
        if type(self).evaluate is Evaluator.evaluate and type(self).one_pass is Evaluator.one_pass:
            self._check_iterator(iterator, converter)
            self._refuse_repeating(as_chainer[0])
        refuse_losses("Evaluator", converter, "eval_func")
        self.converter = converter
        self.device = None if device is None else get_device(device)
        self.eval_hook = eval_hook
        self.eval_func = eval_func

    def get_iterator(self, name: str) -> Any:
        """The iterator called ``name``: ``"main"``, or a key of the dictionary that was given."""
        return self._iterators[name]

    def get_all_iterators(self) -> dict[str, Any]:
        """All iterators by name."""
        return dict(self._iterators)

    def get_target(self, name: str) -> Link:
        """The target called ``name``: ``"main"``, or a key of the dictionary that was given."""
        return self._targets[name]

    def get_all_targets(self) -> dict[str, Link]:
        """All targets by name."""
        return dict(self._targets)

    def __call__(self, trainer: Any = None) -> dict[str, float]:
        """Evaluate, report the means to the current reporter, and return them."""
        reporter = Reporter()
        if not self.is_of_all_ranks and owner(self._targets.values()) is not None:
            warn(
                f"{type(self).__name__}: it evaluates this rank's own network, which differs from the others' between "
                "two averages of local_steps; wrap it on all ranks in dbrdist.comm.create_multi_node_evaluator("
                "evaluator, comm), which evaluates their mean, or evaluate where optimizer.num_local_steps is 0"
            )
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
        """The weighted sums over all examples that this process evaluates; several of them add up exactly.

        In a program of Chainer each batch weighs the same, also a short last one.
        """
        if self.eval_hook is not None:
            self.eval_hook(self)
        summary = DictSummary()
        observation: dict[str, Any] = {}
        with using_device(self.device):
            for batch in self.one_pass():
                weight = len(batch) if hasattr(batch, "__len__") and not as_chainer[0] else 1
                try:
                    observation = self.observe(batch)
                except MemoryError as error:
                    explain(error, (), weight, "an evaluation")
                    raise
                summary.add({key: (value, weight) for key, value in observation.items()})
                if self._has_bar:
                    self._show_progress()
        if self._has_bar:
            standard_streams.stdout.write("\n")
        warn_of_no_numbers(observation)
        return summary

    def _show_progress(self) -> None:
        """One line that is written anew for each batch: how much of the data is evaluated."""
        iterator = self._iterators["main"]
        position, dataset = getattr(iterator, "current_position", 0), getattr(iterator, "dataset", None)
        total = len(dataset) if hasattr(dataset, "__len__") else 0
        done = total if getattr(iterator, "is_new_epoch", False) else position
        standard_streams.stdout.write(
            f"\r{self.default_name}: {done} of {total} examples" if total else f"\r{self.default_name}"
        )

    def observe(self, batch: Any) -> dict[str, Any]:
        """What is reported for one ``batch``, as the iterator gives it."""
        function = self._targets["main"] if self.eval_func is None else self.eval_func
        observation: dict[str, Any] = {}
        with report_scope(observation), no_backprop_mode():
            args, named = as_arguments(call_converter(self.converter, batch, self.device))
            try:
                function(*args, **named)
            except (AttributeError, TypeError, ValueError) as error:
                explain_call(type(self).__name__, error, self._targets["main"], function, args, named)
                raise
        return observation

    def _check_iterator(self, iterator: Any, converter: Any) -> None:
        # A list of batches is right; in one of examples, the entries of each would be taken for examples.
        first = iterator[0] if type(iterator) is list and iterator and converter is concat_examples else None
        kinds = {type(entry) for entry in first} if type(first) is tuple else set()
        is_example = np.ndarray in kinds and any(issubclass(kind, (int, np.number)) for kind in kinds)
        if not hasattr(iterator, "__iter__") or hasattr(iterator, "namedlinks") or is_example:
            hint = "write iterators.SerialIterator(dataset, batch_size, repeat=False, shuffle=False)"
            given = "a list of examples" if is_example else type(iterator).__name__
            raise TypeError(f"Evaluator: iterator: expected an iterator, got {given}; {hint}")

    def _refuse_repeating(self, only_warn: bool = False) -> None:
        """An evaluation over an iterator that repeats would never end."""
        if getattr(self._iterators.get("main"), "repeat", False) is True:
            words = f"{type(self).__name__}: the iterator repeats, so no evaluation ends; make it with repeat=False"
            if not only_warn:
                raise ValueError(words)
            warn(words)

    def _warn_of_a_part(self) -> None:
        """Warn where the iterator has only this rank's part of the data, and nothing adds up the ranks' results."""
        iterator = self._iterators.get("main")
        if any(parts_of_ranks(iterator)):
            warn(
                f"{type(self).__name__}: it evaluates this rank's part alone, and each rank reports another result; "
                "wrap it in dbrdist.comm.create_multi_node_evaluator(evaluator, comm)"
            )

    def one_pass(self) -> Iterator[Any]:
        """The batches of one pass over the data."""
        iterator = self._iterators["main"]
        self._refuse_repeating()
        if not self.knows_its_part:
            self.knows_its_part = True
            self._warn_of_a_part()
            dataset = getattr(iterator, "dataset", None)
            if hasattr(dataset, "__len__") and not len(dataset):
                warn(f"{type(self).__name__}: the dataset is empty, so nothing is evaluated and reported")
        if hasattr(iterator, "reset"):
            iterator.reset()
        else:
            iterator = copy.copy(iterator)
        return (batch for batch in iterator if not hasattr(batch, "__len__") or len(batch))

    def finalize(self) -> None:
        """End the iterators' workers."""
        finalize(self._iterators.values())
