"""One step on several devices of one process: each takes a part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dbrdist.core.array import random
from dbrdist.core.array.backend import Device, get_device, using_device
from dbrdist.core.model.link import Link
from dbrdist.datasets.loading.convert import call_converter, concat_examples
from dbrdist.training.updater import StandardUpdater, as_arguments, counted

if TYPE_CHECKING:
    from dbrdist.core.update.optimizer import GradientMethod
    from dbrdist.datasets.loading.serial import Iterator
    from dbrdist.training.trainer import Trainer


class _Losses:
    """The loss of a whole batch: the sum of the parts' losses, each by its share of the examples."""

    def __init__(self, main: Link) -> None:
        self._main = main
        self._parts: list[tuple[Link, Any, int]] = []

    def add(self, model: Link, loss: Any, num_examples: int) -> None:
        """Add a part: the model that computed it, its mean loss, and its size."""
        self._parts.append((model, loss, num_examples))

    def backward(self, loss_scale: float | None = None) -> None:
        """Add up the gradients of all parts in the main model, whose own are cleared already."""
        total = sum(num_examples for _, _, num_examples in self._parts)
        for model, loss, num_examples in reversed(self._parts):  # the main model last: what listens to it sees sums
            if model is not self._main:
                model.cleargrads()
            (loss if num_examples == total else loss * (num_examples / total)).backward(loss_scale=loss_scale)
            if model is not self._main:
                self._main.addgrads(model)


class ParallelUpdater(StandardUpdater):
    """As StandardUpdater, on several devices: each has a copy of the model and takes a block of the batch.

    The loss must be a mean over examples. Gradients are added up by the blocks' shares of the examples, so that a step
    is that of StandardUpdater with the whole batch, within rounding; layers that look at a whole batch, such as batch
    normalization, see their block. Copies take the values of the main model before each step.

    Args:
        iterator, optimizer, converter, loss_func, loss_scale, auto_new_epoch: as for StandardUpdater. `loss_func` is
            called for every block; None calls the block's model.
        capture: False; a step on several devices is not captured as a CUDA graph.
        models: models by name; "main" is the optimizer's target. None copies that to every device.
        devices: devices by the same names, in any spelling, one of them "main"; a device may come twice. None leaves
            the models where they are.

    What copies report has their names: `second/loss` beside `main/loss`.

    Example:
        >>> model = L.Classifier(L.Linear(64, 10))
        >>> optimizer = optimizers.SGD(0.1).setup(model)
        >>> iterator = iterators.SerialIterator(datasets.get_digits()[0], 32)
        >>> updater = training.ParallelUpdater(iterator, optimizer, devices={"main": "@numpy", "second": "@numpy"})
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: GradientMethod,
        converter: Callable[..., Any] = concat_examples,
        models: Mapping[str, Link] | None = None,
        devices: Mapping[str, Any] | None = None,
        loss_func: Callable[..., Any] | None = None,
        loss_scale: float | None = None,
        auto_new_epoch: bool = True,
        *,
        capture: bool = False,
    ):
        if capture:
            raise ValueError(
                f"{type(self).__name__}: capture: a CUDA graph is of one device, and a step here uses several; leave "
                "capture out, or run one process for each GPU"
            )
        super().__init__(iterator, optimizer, converter, None, loss_func, loss_scale, auto_new_epoch)
        main = self._optimizers["main"].target
        self._devices = _devices_of(type(self).__name__, models, devices)
        if models is None:
            models = {name: main if name == "main" else main.copy("copy") for name in self._devices}
        elif models["main"] is not main:
            raise ValueError(f"{type(self).__name__}: models: expected the optimizer's target as 'main', got another")
        self._models = {name: models[name].to_device(device) for name, device in self._devices.items()}

    def connect_trainer(self, trainer: Trainer) -> None:
        """Let the copies report to ``trainer`` under their names."""
        for name, model in self._models.items():
            if name != "main":
                trainer.reporter.add_observer(name, model)
                trainer.reporter.add_observers(name, model.namedlinks(skipself=True))

    def update_core(self) -> None:
        """One step; override it to train otherwise."""
        iterator, optimizer = self._iterators["main"], self._optimizers["main"]
        epoch, row = counted(iterator, "epoch", 0), counted(iterator, "row", 0)
        batches = self._next_batches()
        if any(map(len, batches)):
            optimizer.update(lambda: self._forward(epoch, row, batches))
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)

    def _next_batches(self) -> list[Any]:
        """The parts of the next batch, one for each model."""
        batch, size = self._next_of(self._iterators["main"]), len(self._models)
        bounds = [-(-len(batch) * i // size) for i in range(size + 1)]  # a short batch leaves the main model its part
        return [batch[start:end] for start, end in pairwise(bounds)]

    def _forward(self, epoch: int, row: int, batches: Sequence[Any]) -> _Losses:
        losses = _Losses(self._models["main"])
        for (name, model), batch in zip(self._models.items(), batches):
            if len(batch):
                args, named = as_arguments(call_converter(self.converter, batch, self._devices[name]))
                if name != "main":
                    _copy_values(self._models["main"], model)
                random.set_stream(random.get_seed(), epoch, self.iteration, row)
                with using_device(self._devices[name]):
                    loss = (model if self.loss_func is None else self.loss_func)(*args, **named)
                losses.add(model, loss, len(batch))
            row += len(batch)
        return losses


class MultiprocessParallelUpdater(ParallelUpdater):
    """As ParallelUpdater, with an iterator for each device, over its own part of the data.

    Chainer starts a process for each device; here one process serves them all, and a step is that of one batch made of
    the iterators' batches (so that the learning rate stays as it is). For processes of their own, on one machine or
    many, run the program under `mpiexec` with :func:`dbrdist.comm.create_multi_node_optimizer`.

    Args:
        iterators: iterators, one for each device; the first counts the epochs.
        optimizer, converter, auto_new_epoch: as for StandardUpdater.
        devices: as many devices, in any spelling: a list, or a dictionary in which "main" is the first.
    """

    def __init__(
        self,
        iterators: Sequence[Iterator],
        optimizer: GradientMethod,
        converter: Callable[..., Any] = concat_examples,
        devices: Mapping[str, Any] | Sequence[Any] | None = None,
        auto_new_epoch: bool = True,
    ):
        where, iterators = type(self).__name__, list(iterators)
        if isinstance(devices, Mapping):
            devices = list(_devices_of(where, None, devices).values())
        if not isinstance(devices, list | tuple) or len(devices) != len(iterators) or not iterators:
            given = len(devices) if isinstance(devices, list | tuple) else devices
            raise ValueError(f"{where}: devices: expected one for each of the {len(iterators)} iterators, got {given}")
        names = ["main", *(f"device{i}" for i in range(1, len(iterators)))]
        by_name = dict(zip(names, iterators))
        super().__init__(by_name, optimizer, converter, None, dict(zip(names, devices)), None, None, auto_new_epoch)

    @staticmethod
    def available() -> bool:
        """True: it needs no NCCL."""
        return True

    def _next_batches(self) -> list[Any]:
        return [self._next_of(iterator) for iterator in self._iterators.values()]


def _devices_of(
    where: str, models: Mapping[str, Link] | None, devices: Mapping[str, Any] | None
) -> dict[str, Device]:  # fmt: skip
    """The devices by name, "main" first, from what a user gave."""
    if models is None and devices is None:
        raise ValueError(f"{where}: expected models or devices, got neither")
    if devices is None:
        assert models is not None
        devices = {name: model.device for name, model in models.items()}
    if "main" not in devices:
        raise KeyError(
            f"{where}: devices: expected a device named 'main', got {', '.join(map(str, devices)) or 'none'}"
        )
    if models is not None and set(models) != set(devices):
        raise ValueError(f"{where}: expected a device for each model, got {list(devices)} for {list(models)}")
    return {name: get_device(devices[name]) for name in ("main", *(name for name in devices if name != "main"))}


def _copy_values(main: Link, copy: Link) -> None:
    state = random.get_state()
    copy.copyparams(main)
    random.set_state(state)  # a parameter that the copy lacked took a number of the initializers' chance
