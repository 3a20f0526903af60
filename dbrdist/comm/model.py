"""What ranks do with whole models: equal parameters at the start, mean gradients at each step.

Gradients lie in flat memory (``core/flat.py``), so a reduction is a pass over a few long arrays, without packing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.comm import agree, message
from dbrdist.core import flat
from dbrdist.core.backend import Array, is_array, to_cpu
from dbrdist.core.changes import Watch
from dbrdist.core.flat import Run
from dbrdist.core.parameter import Parameter
from dbrdist.errors import CommunicatorError

_EQUAL_WEIGHT = -1  # in place of a number of samples


def bcast_data(comm: Any, model: Any, root: int = 0) -> None:
    """Give every rank the parameters and persistent values of ``root``."""
    bcast_params(comm, model, root)
    _bcast_persistents(comm, model, root)


def bcast_params(comm: Any, model: Any, root: int = 0) -> None:
    """Give every rank the parameters of ``root``.

    A parameter that has no shape yet on another rank gets the root's; one without a shape on the root is broadcast when
    it is initialised, which must then happen on every rank, in the same order.
    """
    _initialize_like_root(comm, model, root)
    agree.check_model(comm, model)
    for name, p in model.namedparams():
        if p.is_initialized:
            p.array = comm.bcast(p.array, root=root)
        else:
            p.on_initialize = Broadcast(comm, name, root)


def _initialize_like_root(comm: Any, model: Any, root: int) -> None:
    shapes = comm.bcast_obj([(name, p.shape) for name, p in model.namedparams()], root=root)
    mine = dict(model.namedparams())
    for name, shape in shapes:
        p = mine.get(name)
        if p is not None and shape is not None and not p.is_initialized:
            p.on_initialize = None
            p.initialize(shape)


def _bcast_persistents(comm: Any, model: Any, root: int) -> None:
    for link in model.links():
        for name in link._persistent:
            value = getattr(link, name)
            if is_array(value):
                new = comm.bcast(value, root=root)
                if new is not value:
                    value[...] = new
            else:
                setattr(link, name, comm.bcast_obj(value, root=root))


class Broadcast:
    """What a late parameter does at its initialisation: take the root's values."""

    def __init__(self, comm: Any, name: str, root: int) -> None:
        self._comm = comm
        self._name = name
        self._root = root

    def __call__(self, p: Parameter) -> None:
        p.on_initialize = None
        text = f"{self._name} {p.shape} {p.dtype.name}"
        agree.same_everywhere(self._comm, text, "expected the same parameter to be initialised on every rank")
        p.array = self._comm.bcast(p.array, root=self._root)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the parameter is not broadcast: other ranks may not have one."""


def mean_grad(
    comm: Any,
    params: Sequence[tuple[str, Parameter]],
    zero_fill: bool = False,
    num_samples: int | None = None,
    *,
    one_by_one: bool = False,
) -> None:
    """Replace gradients by their mean over ranks, weighted by ``num_samples``; None on every rank is equal weights.

    A parameter without a gradient on some ranks counts as gradient zero there; without one on any rank it stays so, or
    with ``zero_fill`` becomes zero.

    Args:
        comm: a communicator.
        params: names and parameters; uninitialised ones are passed over.
        one_by_one: reduce parameter by parameter instead of run by run.

    Raises:
        CommunicatorError: on every rank, if the parameters differ between ranks, or no rank has a sample.
    """
    named = [(name, p) for name, p in params if p.is_initialized]
    everyone = flat.gather(p for _, p in named)
    plan = _plan_for(comm, everyone)
    has_grad = np.array([zero_fill or p.grad is not None for p in everyone], bool)
    header = [_EQUAL_WEIGHT if num_samples is None else num_samples, plan.params_digest, plan.runs_digest]
    rows = comm._allgather_rows(np.array([*header, zlib.crc32(has_grad.tobytes())], np.int64))
    counts, params_digests, runs_digests, grad_digests = rows.T
    if (params_digests != params_digests[0]).any():
        agree.check_params(comm, [f"{name} {p.shape} {p.dtype.name}" for name, p in named])
    if (runs_digests != runs_digests[0]).any():
        plan = _plan_anew(everyone)
    if (grad_digests != grad_digests[0]).any():
        has_grad = comm.allreduce(has_grad)
    factors, divisor = _weights([int(n) for n in counts])
    reduced = [p for p, is_there in zip(everyone, has_grad) if is_there]
    flat.collect_gradients(reduced)
    if comm.size == 1:
        return
    if one_by_one:
        grads = [p.grad.reshape(-1) for p in reduced]
    else:
        grads = [run.grad for run in (plan.runs if len(reduced) == len(everyone) else _runs(reduced))]
    dtype = comm.get_config("allreduce_grad_dtype")
    for grad in grads:
        _reduce_as(comm, grad, dtype, factors, divisor)


class _Plan:
    """The runs of some parameters, and numbers that are equal on ranks whose parameters, and whose runs, are."""

    def __init__(self, params: list[Parameter]) -> None:
        self.params = params
        self.runs = _runs(params)
        self._watch = Watch(params)
        index = {id(p): i for i, p in enumerate(params)}
        shapes = [f"{p.shape} {p.dtype.name}" for p in params]
        stretches = [(run.size, [index[id(p)] for p in run.params]) for run in self.runs]
        self.params_digest = zlib.crc32(repr(shapes).encode())
        self.runs_digest = zlib.crc32(repr(stretches).encode())

    def is_for(self, params: list[Parameter]) -> bool:
        """Whether it holds for these parameters, and none has moved since."""
        return self._watch.is_current() and params == self.params


def _plan_for(comm: Any, params: list[Parameter]) -> _Plan:
    """The plan of the last step where nothing has changed since."""
    plan: _Plan | None = comm._plan
    if plan is None or not plan.is_for(params):
        plan = comm._plan = _Plan(params)
    return plan


def _runs(params: Sequence[Parameter]) -> list[Run]:
    """The runs of ``params`` in an order that is the same on every rank (``flat`` goes by addresses)."""
    index = {id(p): i for i, p in enumerate(params)}
    return sorted(flat.runs(params), key=lambda run: index[id(run.params[0])])


def _plan_anew(params: list[Parameter]) -> _Plan:
    """Bring parameters whose places differ between ranks into arenas that do not."""
    for p in params:
        p.leave_arena()
    flat.gather(params)
    return _Plan(params)


def _weights(counts: Sequence[int]) -> tuple[list[float] | None, float | None]:
    """(factor of each rank, divisor of the sum) for these numbers of samples."""
    if any(n < 0 for n in counts):
        if any(n != _EQUAL_WEIGHT for n in counts):
            raise CommunicatorError(
                f"expected a number of samples from every rank or from none, got {_as_text(counts)} on ranks 0 to "
                f"{len(counts) - 1}"
            )
        return None, float(len(counts))
    total = sum(counts)
    if total == 0:
        raise CommunicatorError("expected a sample on at least one rank, got none on any")
    if all(n == counts[0] for n in counts):
        return None, float(len(counts))
    return [n / total for n in counts], None


def _as_text(counts: Sequence[int]) -> str:
    return ", ".join("none" if n == _EQUAL_WEIGHT else str(n) for n in counts)


def _reduce_as(comm: Any, grad: Array, dtype: Any, factors: list[float] | None, divisor: float | None) -> None:
    """Reduce 1-d ``grad`` in place, travelling as ``dtype`` if one is configured."""
    if dtype is None or dtype == grad.dtype:
        comm._reduce(grad, factors, divisor)
        return
    travelling = to_cpu(grad).astype(dtype)
    comm._reduce(travelling, factors, divisor)
    grad[...] = message.to_place(travelling.astype(grad.dtype), grad)
