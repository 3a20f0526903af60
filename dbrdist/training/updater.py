"""One step of training: a batch from the iterator, through the loss, into the parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array import random, spans
from dbrdist.core.array.backend import Device, DeviceSpec, get_device
from dbrdist.core.array.types import Array
from dbrdist.core.usage.foreign_names import refuse_unknown
from dbrdist.core.usage.mistakes import given_a_class, warn
from dbrdist.datasets.loading.convert import call_converter, concat_examples, refuse_losses
from dbrdist.errors import NoSamplesError
from dbrdist.training.captured_step import CapturedSteps
from dbrdist.training.out_of_memory import explain

if TYPE_CHECKING:
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.core.update.optimizer import Optimizer
    from dbrdist.datasets.loading.serial import Iterator
    from dbrdist.training.trainer import Trainer

_NO_NAMES: dict[str, Any] = {}
_ANYWHERE = nullcontext()


class Updater:
    """What a trainer calls for each step.

    Example:
        >>> class Nothing(training.Updater):
        ...     def update(self):
        ...         pass
    """

    iteration: int
    if TYPE_CHECKING:  # of the order that its iterator reads in

        @property
        def epoch(self) -> int: ...
        @property
        def epoch_detail(self) -> float: ...
        @property
        def previous_epoch_detail(self) -> float: ...
        @property
        def is_new_epoch(self) -> bool: ...

    def connect_trainer(self, trainer: Trainer) -> None:
        """Called by the ``trainer`` that takes this updater."""

    def finalize(self) -> None:
        """Called when the run ends."""

    def get_optimizer(self, name: str) -> Any:
        """The optimizer called ``name``, ``"main"`` for a single one."""
        raise NotImplementedError

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        """All optimizers by name."""
        raise NotImplementedError

    def update(self) -> None:
        """Do one step."""
        raise NotImplementedError

    def serialize(self, serializer: AbstractSerializer) -> None:
        """List the state for ``serializer``, which saves or loads it."""
        raise NotImplementedError


class StandardUpdater(Updater):
    """One step of training: batch, converter, loss function, optimizer.

    Each step sets the thread's random stream to (seed, epoch, iteration, row), `row` being the position of this
    process's first example in the batch of all ranks: what dropout draws depends on the example, not on the rank.
    An optimizer with `takes_num_samples` (the multi-node one) receives the number of examples in the batch.

    Args:
        iterator: the batches; or a dictionary of iterators with `"main"` in it.
        optimizer: an optimizer that is set up with a model; or a dictionary of optimizers with `"main"` in it.
        converter: `converter(batch, device)` makes arrays of a batch.
        device: the device of the model and the arrays, such as `"@cupy:0"`; None leaves both where they are.
        loss_func: a function of the arrays that returns the loss; None calls the optimizer's target.
        loss_scale: factor of the loss for the backward pass (gradients of 16 bits); None leaves it to the optimizer.
        auto_new_epoch: call the optimizers' `new_epoch` at the end of each epoch.
        capture: capture the step as a CUDA graph after three eager ones, and replay it from then on, which takes the
            host a small part of the time. A step that cannot be captured runs eagerly, and a warning says why.
        kwargs: `input_device`, where the arrays go if that is not `device`.

    Raises:
        TypeError: an argument is no iterator or optimizer, or at a step, the loss is no Variable.

    Example:
        >>> model = L.Classifier(L.Linear(64, 10))
        >>> iterator = iterators.SerialIterator(datasets.get_digits()[0], 32)
        >>> updater = training.StandardUpdater(iterator, optimizers.SGD(0.1).setup(model))
        >>> updater.update()
        >>> updater.iteration, updater.epoch
        (1, 0)
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        converter: Callable[..., Any] = concat_examples,
        device: DeviceSpec | None = None,
        loss_func: Callable[..., Any] | None = None,
        loss_scale: float | None = None,
        auto_new_epoch: bool = True,
        *,
        capture: bool = False,
        **kwargs: Any,
    ):
        input_device = kwargs.pop("input_device", None)
        refuse_unknown("StandardUpdater", StandardUpdater.__init__, kwargs)
        self._iterators = _Named(iterator if isinstance(iterator, Mapping) else {"main": iterator}, "iterator")
        self._optimizers = _Named(optimizer if isinstance(optimizer, Mapping) else {"main": optimizer}, "optimizer")
        refuse_losses("StandardUpdater", converter, "loss_func")
        self.converter = converter
        self.loss_func = loss_func
        self.iteration = 0
        self.auto_new_epoch = auto_new_epoch
        self.loss_scale = loss_scale
        self._captured = CapturedSteps() if capture else None
        self.step_seconds = 0.0  # in steps so far, of this process
        self.data_seconds = 0.0  # the part of them in which it waited for batches
        self._device = None if device is None else get_device(device)
        self._input_device = self._device if input_device is None else get_device(input_device)
        for iterator in self._iterators.values():
            _check_iterator(iterator)
        for optimizer in self._optimizers.values():
            if isinstance(optimizer, type):
                raise given_a_class("StandardUpdater", optimizer, "an optimizer")
            if not hasattr(optimizer, "update"):
                raise TypeError(f"StandardUpdater: expected an optimizer, got {type(optimizer).__name__}")
            if getattr(optimizer, "target", None) is None:
                raise RuntimeError(
                    "the optimizer has no target; call optimizer.setup(model) before the updater is made"
                )
            if self._device is not None:
                optimizer.target.to_device(self._device)
            if auto_new_epoch:  # of a multi-node optimizer, that of the one that it wraps
                getattr(optimizer, "actual_optimizer", optimizer).use_auto_new_epoch = True
            if loss_scale is not None:
                optimizer.set_loss_scale(loss_scale)
            if hasattr(optimizer, "reads"):  # a multi-node one, which compares them over the ranks
                optimizer.reads(self._iterators)

    @property
    def device(self) -> Any:
        """Where the model is, or None if it was left where it is."""
        return self._device

    @property
    def input_device(self) -> Device:
        """Where the converter puts the arrays."""
        return self._input_device

    @property
    def epoch(self) -> int:
        """Whole passes over the data so far."""
        return self._iterators["main"].epoch  # type: ignore[no-any-return]

    @property
    def epoch_detail(self) -> float:
        """Passes over the data so far, with the fraction."""
        return self._iterators["main"].epoch_detail  # type: ignore[no-any-return]

    @property
    def previous_epoch_detail(self) -> float:
        """`epoch_detail` before the last step."""
        return self._iterators["main"].previous_epoch_detail  # type: ignore[no-any-return]

    @property
    def is_new_epoch(self) -> bool:
        """True if the last step ended an epoch."""
        return self._iterators["main"].is_new_epoch  # type: ignore[no-any-return]

    def get_iterator(self, name: str) -> Any:
        """The iterator called ``name``: ``"main"``, or a key of the dictionary that was given."""
        return self._iterators[name]

    def get_optimizer(self, name: str) -> Any:
        """The optimizer called ``name``: ``"main"``, or a key of the dictionary that was given."""
        return self._optimizers[name]

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        """All optimizers by name."""
        return dict(self._optimizers)

    def update(self) -> None:
        """Do one step and count it."""
        began = time.perf_counter()
        try:
            with self._on_device():
                if not spans.recorders:
                    self.update_core()
                else:
                    with spans.step(self.iteration):
                        self.update_core()
        except Exception as error:
            explain(error, self._optimizers.values(), counted(self._iterators.get("main"), "batch_size", 0))
            raise
        self.step_seconds += time.perf_counter() - began
        self.iteration += 1
        if (
            self._captured is not None
            and getattr(self.update_core, "__func__", None) is not StandardUpdater.update_core
        ):
            self._captured.look(type(self))

    def _on_device(self) -> Any:
        """The context in which the updater's GPU is the current device."""
        return _ANYWHERE if self._device is None else self._device.create_context()

    def update_core(self) -> None:
        """One step; override it to train otherwise."""
        iterator, optimizer = self._iterators["main"], self._optimizers["main"]
        if not self.iteration:
            _warn_of_ranks(iterator, optimizer)
        epoch = counted(iterator, "epoch", 0)
        batch = self._next_of(iterator)
        random.set_stream(random.get_seed(), epoch, self.iteration, counted(iterator, "row", 0))
        loss_func = optimizer.target if self.loss_func is None else self.loss_func
        num, is_told = len(batch), getattr(optimizer, "takes_num_samples", False) is True
        try:
            if num:
                arrays = call_converter(self.converter, batch, self._input_device)
                args, named = (arrays, _NO_NAMES) if type(arrays) is tuple else as_arguments(arrays)
                if self._captured is not None:
                    self._captured.update(optimizer, loss_func, args, named, {"num_samples": num} if is_told else {})
                elif is_told:
                    optimizer.update(loss_func, *args, **named, num_samples=num)
                else:
                    optimizer.update(loss_func, *args, **named)
            elif is_told:  # no share of a short batch: nothing to compute, but the reduction needs all
                optimizer.update(loss_func, num_samples=0)
        except MemoryError as error:
            explain(error, self._optimizers.values(), num)
            raise
        except NoSamplesError:  # all examples of the batch were skipped: this step leaves the parameters alone
            pass
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)

    def _next_of(self, iterator: Iterator) -> Any:
        """The next batch; the time is counted."""
        began = time.perf_counter()
        try:
            batch = iterator.next()
        except StopIteration:
            words = "the iterator has ended after one epoch (repeat=False); make it with repeat=True"
            raise StopIteration(f"{type(self).__name__}: {words}") from None
        self.data_seconds += time.perf_counter() - began
        if spans.recorders:
            spans.note("data wait", began)
        return batch

    def finalize(self) -> None:
        """End the iterators' workers."""
        finalize(self._iterators.values())

    def serialize(self, serializer: AbstractSerializer) -> None:
        """List iterators, optimizers, their models, and the count of steps for ``serializer``."""
        for name, iterator in self._iterators.items():
            iterator.serialize(serializer["iterator:" + name])
        for name, optimizer in self._optimizers.items():
            optimizer.target.serialize(serializer["model:" + name])
            optimizer.serialize(serializer["optimizer:" + name])
        iteration = serializer("iteration", self.iteration)
        if iteration is not None:  # a program's own serializer may give nothing back where it saves
            self.iteration = int(iteration)


class _Named(dict[str, Any]):
    """Iterators or optimizers by name."""

    def __init__(self, found: Mapping[str, Any], what: str) -> None:
        super().__init__(found)
        self._what = what

    def __missing__(self, name: str) -> Any:
        hint = ": the main one must be called 'main'" if name == "main" else ""
        raise KeyError(f"StandardUpdater: no {self._what} is called {name!r}{hint}; there are {', '.join(self)}")


def finalize(iterators: Iterable[Any]) -> None:
    """Finalize those iterators that can be; a program's own may have nothing to end."""
    for iterator in iterators:
        if hasattr(iterator, "finalize"):
            iterator.finalize()


def parts_of_ranks(iterator: Iterator) -> tuple[bool, bool]:
    """Whether an iterator divides its dataset over ranks, and whether the dataset is one rank's part already."""
    return counted(iterator, "size", 1) > 1, getattr(getattr(iterator, "dataset", None), "is_one_ranks", False) is True


def counted(iterator: Any, name: str, default: int) -> int:
    """A count of an iterator; a program's own may not count, or may call something else by the name."""
    value = getattr(iterator, name, default)
    return int(value) if isinstance(value, (int, np.integer)) else default


def _check_iterator(iterator: Any) -> None:
    if isinstance(iterator, type):
        raise given_a_class("StandardUpdater", iterator, "an iterator")
    if not hasattr(iterator, "next"):
        raise TypeError(
            f"StandardUpdater: expected an iterator, got {type(iterator).__name__}; write "
            "iterators.SerialIterator(dataset, batch_size)"
        )


def _warn_of_ranks(iterator: Iterator, optimizer: Optimizer) -> None:
    """Warn where the data is divided over ranks and their gradients are not averaged, or is divided twice."""
    is_divided, is_scattered = parts_of_ranks(iterator)
    if is_divided and is_scattered:
        warn(
            "the dataset is this rank's part (scatter_dataset), and the iterator divides it again (rank=, size=), so "
            "most examples are never seen; leave one of them out"
        )
    if (is_divided or is_scattered) and not getattr(optimizer, "takes_num_samples", False):
        warn(
            f"the data is divided over ranks, and {type(optimizer).__name__} does not average their gradients, so the "
            "ranks drift apart; wrap it: dbrdist.comm.create_multi_node_optimizer(optimizer, comm).setup(model)"
        )


def as_arguments(converted: Array | tuple[Array, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a converter returned as positional and keyword arguments."""
    if isinstance(converted, tuple):
        return converted, {}
    if isinstance(converted, dict):
        return (), converted
    return (converted,), {}
