"""What ranks do with whole models: equal parameters at the start, mean gradients at each step.

Gradients are stored in flat memory (``core/model/flat.py``): a reduction passes over few long arrays, without packing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.gradients.reduction_plan import EQUAL_WEIGHT, ReductionPlan, key_of, plan_anew, weights
from dbrdist.comm.protocol import agree, arguments
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.transport import message
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.core.array.backend import device_of, fill, get_array_module, is_array, on, to_device
from dbrdist.core.array.types import Array, HostArray
from dbrdist.core.model.apart import join_params
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.node import note_assignment
from dbrdist.core.tape.variable import Variable
from dbrdist.core.usage.mistakes import warn

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.model.link import Link

# Of a parameter at first: MPI sends as little without waiting for the receiver, and mostly it shows that values differ.
_HEAD_BYTES = 1 << 14
_PIECE_BYTES = 1 << 22  # after it: each piece is a wait for the other ranks, and what is compared stays in the cache
_FEW = 1024  # elements that are compared first
_MAX_PLANS = 8  # of models that take turns


def bcast_data(comm: CommunicatorBase, model: Link, root: int = 0) -> None:
    """Give every rank the parameters and persistent values of ``root``."""
    bcast_params(comm, model, root)
    _bcast_persistents(comm, model, root)


def warn_of_other_networks(comm: CommunicatorBase, model: Link) -> None:
    """Warn where ranks average gradients of networks that differ. Collective."""
    arrays = [p.lend() for _, p in model.namedparams() if isinstance(p.lend(), np.ndarray)]
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array.reshape(-1)[:_FEW]).tobytes(), found)
    lines = agree.as_lines(agree.describe_params(list(model.namedparams())))  # what differs here is an error later
    mine = np.array([zlib.crc32(lines.encode()), found], np.int64)
    rows = comm.gate.allgather_rows(mine)
    others = [rank for rank, row in enumerate(rows.tolist()) if row[0] == rows[0, 0] and row[1] != rows[0, 1]]
    if others and comm.rank == 0:
        warn(
            f"multi_node_mean_grad: {name_ranks(others)} has other parameters than rank 0, so that equal steps do not "
            "make equal networks; call comm.bcast_data(model) before the first step, or use a multi-node optimizer"
        )


def bcast_params(comm: CommunicatorBase, model: Link, root: int = 0) -> None:
    """Give every rank the parameters of ``root``.

    A parameter that has no shape yet on another rank gets the root's; one without a shape on the root is broadcast when
    it is initialised, which must then happen on every rank, in the same order.
    """
    bcast_named(comm, list(model.namedparams()), root)


def bcast_named(comm: CommunicatorBase, named: Sequence[tuple[str, Parameter]], root: int = 0) -> None:
    """The same for some parameters, which every rank has in the same order."""
    _initialize_like_root(comm, named, root)
    agree.check_params(comm, named)
    there = [p for _, p in named if p.is_initialized]
    if not _bcast_in_place(comm, there, root):
        for p in there:
            _take_values(p, comm.bcast(p.lend(), root=root))
    join_params(there)
    for name, p in named:
        if not p.is_initialized:
            p.on_initialize = Broadcast(comm, name, root)


def _bcast_in_place(comm: CommunicatorBase, params: Sequence[Parameter], root: int) -> bool:
    """Give every rank the root's values, with one agreement for all of them.

    False where ranks have them in different layouts, or in memory that MPI cannot reach.
    """
    arrays = [p.lend() for p in params]
    is_plain = all(isinstance(x, np.ndarray) and message.is_dense(x) and x.flags.writeable for x in arrays)
    found = [message.dense(x) for x in arrays] if is_plain else []
    headers = b"".join(message.encode(x, axes).tobytes() for x, (_, axes) in zip(arrays, found))
    with comm.gate.call("bcast") as call:
        call.root = root
        rows = call.agree([is_plain, zlib.crc32(headers), zlib.adler32(headers)])
        if not is_plain or (rows[:, :3] != rows[0, :3]).any():
            return False
        call.num_bytes = sum(x.nbytes for x in arrays)
        with call.moving():
            scratch = np.empty(_PIECE_BYTES, np.uint8)
            for p, (flat, _) in zip(params, found):
                if comm.rank == root:
                    for own in _pieces(flat):
                        comm.ranks.bcast_bytes(message.as_bytes(own), root)
                elif _receive(comm, call, flat, scratch):
                    note_assignment(p)
    return True


def _receive(comm: Any, call: Passage, flat: HostArray, scratch: HostArray) -> bool:
    """Receive the root's values piece by piece; whether any of them is another than before."""
    is_changed = False
    for own in _pieces(flat):
        if is_changed:
            comm.ranks.bcast_bytes(message.as_bytes(own), call.root)
            continue
        raw = scratch[: own.nbytes]
        comm.ranks.bcast_bytes(raw, call.root)
        if not np.array_equal(_in_words(raw), _in_words(message.as_bytes(own))):  # while both are in the cache
            values = raw.view(flat.dtype)
            is_changed = _differ(own[:_FEW], values[:_FEW]) or _differ(own, values)
            own[...] = values
    return is_changed


def _pieces(flat: HostArray) -> Iterator[HostArray]:
    """A parameter's elements in pieces that are the same on all ranks."""
    end, step = _HEAD_BYTES // flat.itemsize, _PIECE_BYTES // flat.itemsize
    yield flat[:end]
    for begin in range(end, flat.size, step):
        yield flat[begin : begin + step]


def _differ(old: Array, new: Array) -> bool:
    """Whether values differ: zeros may by their signs, NaN by its bits. It takes longer than to receive them."""
    return not np.array_equal(old, new, equal_nan=True)


def _in_words(raw: Array) -> Array:
    """Bytes as fewer and longer integers, where they are a number of these: they are compared faster."""
    return raw.view(np.int64) if raw.size % 8 == 0 else raw


def _take_values(p: Parameter, values: Array) -> None:
    """Copy values into the parameter, in place as others may share the array; equal ones are no assignment."""
    old = p.lend()
    if values is old:
        return
    values = to_device(values, device_of(old))
    with on(old):
        if get_array_module(old).array_equal(old, values, equal_nan=True):
            p.write(values)  # zeros may differ by their signs
        else:
            p.copydata(Variable(values))


def _initialize_like_root(comm: CommunicatorBase, named: Sequence[tuple[str, Parameter]], root: int) -> None:
    shapes = comm.bcast_obj([(name, p.shape) for name, p in named], root=root)
    mine = dict(named)
    with agree.together(comm):
        for name, shape in shapes:
            p = mine.get(name)
            if p is not None and shape is not None and not p.is_initialized:
                p.on_initialize = None
                p.initialize(shape)


def _bcast_persistents(comm: CommunicatorBase, model: Link, root: int) -> None:
    """The root's persistent values; one that is not an array yet takes the root's array."""
    places = {
        f"{path.rstrip('/')}/{name}": (link, name)
        for path, link in model.namedlinks()
        for name in link.persistent_names
    }
    agree.same_everywhere(comm, agree.as_lines(list(places)), "the same persistent values")
    kinds = comm.bcast_obj({path: _kind(getattr(*place)) for path, place in places.items()}, root=root)
    with agree.together(comm):
        for path, place in places.items():
            value = getattr(*place)
            if is_array(value) and _kind(value) != kinds[path]:
                raise ValueError(
                    f"expected the persistent value {path} as {kinds[path]}, as on rank {root}, got {_kind(value)}"
                )
    for path, (link, name) in places.items():
        value = getattr(link, name)
        if not kinds[path].startswith("an array"):
            setattr(link, name, comm.bcast_obj(value, root=root))
            continue
        new = comm.bcast(value, root=root)
        if not is_array(value):
            setattr(link, name, new)
        elif new is not value:
            fill(value, to_device(new, device_of(value)))


def _kind(value: Array) -> str:
    return f"an array of shape {tuple(value.shape)} and {value.dtype.name}" if is_array(value) else "no array"


class Broadcast:
    """What a late parameter does at its initialisation: take the root's values."""

    def __init__(self, comm: CommunicatorBase, name: str, root: int) -> None:
        self._comm = comm
        self._name = name
        self._root = root

    def __call__(self, p: Parameter) -> None:
        p.on_initialize = None
        text = f"{self._name} {p.shape} {p.dtype.name}"
        agree.same_everywhere(self._comm, text, "to initialise the same parameter")
        p.array = self._comm.bcast(p.lend(), root=self._root)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the parameter is not broadcast: other ranks may not have one."""


def mean_grad(
    comm: Any, call: Passage, params: Sequence[tuple[str, Parameter]], zero_fill: bool, num_samples: int | None
) -> None:
    """Replace gradients by their mean over ranks, weighted by ``num_samples``; None on every rank is equal weights.

    A parameter without a gradient on some ranks counts as gradient zero there; without one on any rank it stays so, or
    with ``zero_fill`` becomes zero. Uninitialised parameters are passed over.

    Raises:
        CommunicatorError: on every rank, if the parameters differ between ranks, or no rank has a sample.
    """
    named = [(name, p) for name, p in params if p.is_initialized]
    plan = plan_for(comm, named)
    count, error = attempt(arguments.num_samples, num_samples, "weighted_mean_grad")
    has_grad = np.array([zero_fill or p.grad is not None for p in plan.params], bool)
    weight = EQUAL_WEIGHT if count is None else count
    row = [plan.digest, plan.runs_digest, weight, zlib.crc32(has_grad.tobytes()), plan.place]
    rows = call.agree(row, error=error, num_same=1, what="the same parameters", detail=lambda: plan.text)
    if (rows[:, 1] != rows[0, 1]).any():
        plan = keep_plan(comm, plan_anew(named))
        rows[:, 4] = 0
    factors, divisor = weights(rows[:, 2].tolist())
    plan.settle(comm, call, rows[:, 4].tolist())
    if (rows[:, 3] != rows[0, 3]).any():
        has_grad = comm.allreduce(has_grad)
    wanted = [p for p, is_there in zip(plan.params, has_grad) if is_there]
    plan.reduce(comm, call, wanted, factors, divisor)


def plan_for(comm: CommunicatorBase, named: list[tuple[str, Parameter]]) -> ReductionPlan:
    """The plan of these parameters on a communicator, where nothing has changed since it was made."""
    plan: ReductionPlan | None = comm.reducer.plans.get(key_of(named))
    if plan is None or not plan.is_for([p for _, p in named]):
        plan = ReductionPlan(named)
    return keep_plan(comm, plan)


def keep_plan(comm: CommunicatorBase, plan: ReductionPlan) -> ReductionPlan:
    """Remember a plan as the last that was used."""
    plans: dict[Hashable, ReductionPlan] = comm.reducer.plans
    key = plan.key
    plans.pop(key, None)
    plans[key] = plan
    if len(plans) > _MAX_PLANS:
        del plans[next(iter(plans))]
    return plan
