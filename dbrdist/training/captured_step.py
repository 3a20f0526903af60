"""Steps as CUDA graphs: forward, backward and update are captured once, and replayed with new inputs and numbers.

A graph repeats its kernels with the addresses and numbers that they had. So inputs are copied to where they were,
memory comes from a pool that nobody else uses, and numbers that change are declared (dbrdist/core/array/declared.py).
What is reported is copied out after each replay. A step that cannot be captured runs eagerly, and a warning says why.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.config import config
from dbrdist.core.array.types import Array, CudaStream
from dbrdist.core.update.replayed_update import plain_values, switches_of, why_not_captured
from dbrdist.core.usage.mistakes import warn
from dbrdist.kernels.gpu import cublaslt
from dbrdist.training.graph_of_joint_step import GraphOfJointStep
from dbrdist.training.graph_of_step import Args, GraphOfStep, Named, NotCaptured
from dbrdist.training.step_attributes import Loss

_MOST_GRAPHS = 8  # of one updater, each with memory of its own


class CapturedSteps:
    """The steps of one updater: ``update(optimizer, loss function, arguments)`` instead of the optimizer's.

    A step is captured for the shapes and types of its inputs and the switches of the configuration, after three eager
    steps of the same kind.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[object, ...], GraphOfStep] = {}
        self._said: set[str] = set()
        self._is_first = True
        self._stream: CudaStream | None = None

    def update(self, optimizer: Any, loss_func: Loss, args: Args, named: Named, told: Mapping[str, int]) -> None:
        """One step: replayed if it was captured, captured if it is time to, otherwise eager.

        ``told``: what the optimizer is told besides, where it takes that.
        """
        is_first, self._is_first = self._is_first, False
        if is_first:  # a multi-node optimizer brings ranks together
            optimizer.update(loss_func, *args, **named, **told)
            return
        alone = getattr(optimizer, "optimizer_of_one_rank", None)
        if alone is not None:
            optimizer.num_samples = told.get("num_samples")
            optimizer, told = alone, {}
        is_joint = hasattr(optimizer, "update_in_passes")
        one = optimizer.actual_optimizer if is_joint else optimizer
        of_all = optimizer.why_not_captured() if is_joint else None  # the same on all ranks
        reason = of_all or why_not_captured(one) or _why_not_inputs((*args, *named.values())) or cublaslt.why_not()
        if reason is None:
            step = self._step_of(one, GraphOfJointStep if is_joint else GraphOfStep, loss_func, args, named)
            if step is None:
                reason = f"there are {_MOST_GRAPHS} graphs already, for other shapes of inputs or values of hooks"
            elif step.reason is None:
                try:
                    step.run(optimizer, loss_func, args, named, told)
                    return
                except NotCaptured as e:
                    step.reason = str(e)
                finally:
                    if step.reason is not None:
                        step.give_back_memory()
                        self._say(step.reason)
        if reason is not None and (of_all is None or not optimizer.communicator.rank):
            self._say(reason)
        optimizer.update(loss_func, *args, **named, **told)

    def look(self, updater: type) -> None:
        """Called after each step: say in one line that an updater's own ``update_core`` never asks for a capture."""
        if self._is_first and not self._said:
            self._said.add("own")
            warn(
                "the step is not captured as a CUDA graph and runs eagerly: update_core of "
                f"{updater.__name__} is the program's own; give StandardUpdater a loss function instead"
            )

    def _step_of(
        self, optimizer: Any, kind: type[GraphOfStep], loss_func: Loss, args: Args, named: Named
    ) -> GraphOfStep | None:
        which = loss_func if isinstance(loss_func, Hashable) else id(loss_func)
        inputs = _kinds(args), tuple(named), _kinds(named.values())
        key = id(optimizer), kind, which, inputs, switches_of(optimizer), plain_values(config.__dict__.values())
        step = self._steps.get(key)
        if step is not None and step.is_stale:
            step = None
        if step is None:
            self._steps = {k: s for k, s in self._steps.items() if not s.is_stale}
        if step is None and len(self._steps) < _MOST_GRAPHS:
            if self._stream is None:
                self._stream = backend.import_cupy().cuda.Stream(non_blocking=True)
            step = self._steps[key] = kind(self._stream, loss_func)
        return step

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            warn(f"the step is not captured as a CUDA graph and runs eagerly: {reason}")

    @property
    def num_graphs(self) -> int:
        """How many steps have been captured."""
        return sum(bool(step.graphs) for step in self._steps.values())


def _kinds(values: Iterable[Array]) -> tuple[object, ...]:
    """Shapes, strides and types of arrays; numbers as they are."""
    return tuple([(v.shape, v.strides, v.dtype) if backend.is_array(v) else v for v in values])


def _why_not_inputs(values: Args) -> str | None:
    for v in values:
        if isinstance(v, np.ndarray):
            return "an input of the step is in host memory; name a device for the updater"
        if not backend.is_array(v) and not isinstance(v, bool | int | float | str | None):
            return f"an input of the step is a {type(v).__name__}, expected arrays on the GPU"
    return None
