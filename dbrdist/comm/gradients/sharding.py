"""Optimizer state, gradients and updates divided over ranks (ZeRO-1 and ZeRO-2: Rajbhandari et al. 2020).

Each rank owns one part of every run of flat memory, cut at cache lines and not at parameters, so that parts are equal
whatever the layers are. It gets the mean of its part of the gradients (reduce-scatter), has the state of that part
alone, updates it, and the ranks give each other the new values (allgather): as many bytes are sent as in an allreduce.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.gradients import shared_gradients
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.transport import message
from dbrdist.core.array.backend import to_cpu, to_device
from dbrdist.core.array.types import Array
from dbrdist.core.model.flat import Arena, Run, Shard
from dbrdist.core.model.parameter import Parameter

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.update.optimizer import GradientMethod

_LINE = 64  # elements in a cache line at most: no two ranks own parts of one


class ZeroSharding:
    """Which rank owns what of an optimizer's target.

    Args:
        comm: the ranks.
        optimizer: whose updates are divided, not the multi-node one.
        stage: 1 divides the state; 2 the gradients too: memory of those that other ranks own is given back as soon as
            they are reduced.
    """

    def __init__(self, comm: CommunicatorBase, optimizer: GradientMethod, stage: int) -> None:
        self._comm = comm
        self._optimizer = optimizer
        self.releases = stage == 2
        self.place = 0  # that of the plan on which the ranks have agreed
        self._values: Any = None  # gives each rank what the others updated, where it reaches their memory
        self._borders: list[list[int]] = []  # of each run of the plan
        self._stretches: list[tuple[Arena, int, list[int]]] = []  # arena, first element, borders counted from there

    # ---- who owns what ----

    def settle(self, plan: ReductionPlan) -> None:
        """Divide the runs of a plan. Collective; states that are elsewhere by now move."""
        with agree.together(self._comm):
            _check_unshared(plan.params)
        self._borders = [_borders(run.size, self._comm.size) for run in plan.runs]
        self.place, plan.division = plan.place, self
        if self.releases:
            with contextlib.suppress(OSError):  # where a system has no such memory, it stays
                plan.move(_into_segments)
        with self._comm.gate.call("update") as call:
            self._values = self._comm.reducer.share_values(call, plan)
            if self.releases:
                plan.overlap = plan.overlap or self._comm.reducer.overlap(call, plan)
        self._stretches = [(run.arena, run.start, borders) for run, borders in zip(plan.runs, self._borders)]
        if self._comm.allreduce(np.array([self._has_moved(plan.runs)])).any():
            for p, state in self._collect(None):
                _take(p, state)
        self._optimizer.divide(self)

    def _has_moved(self, runs: Sequence[Run]) -> bool:
        """Whether the state of a parameter here is not that of the elements which this rank owns now."""
        pieces = {p: s.piece(p, where) for run in runs for s in [self.shard(run)] for p, where in s.layers()}
        owned = [(p, getattr(p.update_rule, "piece", None)) for p in self._optimizer.target.params()]
        return any(piece is not None and piece != pieces.get(p, piece) for p, piece in owned)

    def borders(self, number: int, begin: int, end: int) -> list[int]:
        """The parts of the ranks between two elements of a run, counted from the first of these."""
        return [min(max(border, begin), end) - begin for border in self._borders[number]]

    def shard(self, run: Run) -> Run:
        """The part of a run that this rank owns; the run lies within one of the plan."""
        rank = self._comm.rank
        for arena, start, borders in self._stretches:
            if arena is run.arena and start <= run.start and run.stop <= start + borders[-1]:
                offset = run.start - start
                begin, end = (min(max(border - offset, 0), run.size) for border in borders[rank : rank + 2])
                return Shard(run, begin, end, self.total)
        raise RuntimeError(
            "an optimizer whose state is divided over ranks met a parameter that is not among those whose gradients "
            "the ranks have averaged; call update() of the multi-node optimizer"
        )

    def release(self, run: Run, begin: int, end: int, borders: Sequence[int]) -> None:
        """Give back the memory of the gradients between two elements of a run but for this rank's part of them."""
        start, rank = run.start + begin, self._comm.rank
        shared_gradients.release(run.arena, start, start + borders[rank])
        shared_gradients.release(run.arena, start + borders[rank + 1], run.start + end)

    def total(self, values: Sequence[float | np.generic]) -> list[float]:
        """The sums of these numbers over the ranks."""
        mine = np.array([float(value) for value in values])
        return [float(value) for value in self._comm.allreduce(mine)] if mine.size else []

    def share_values(self, call: Passage, plan: ReductionPlan) -> None:
        """Give every rank the parameters that the others have updated."""
        runs = plan.runs
        call.meet_without_row()
        with call.moving():
            if self._values is not None:
                self._values.spread(self._comm.reducer, call, runs, self._borders)
            else:
                for run, borders in zip(runs, self._borders):
                    self._comm.reducer.share_parts(call, run.data, borders)
        if self.releases:  # pages on the border of two buckets are still there
            for run, borders in zip(runs, self._borders):
                self.release(run, 0, run.size, borders)

    # ---- whole states ----

    @contextlib.contextmanager
    def whole_state(self, root: int) -> Iterator[None]:
        """Within the block ``root`` has the state of all elements. Collective."""
        rules = [p.update_rule for p in self._optimizer.target.params() if p.update_rule is not None]
        own = [(rule, rule.state, rule.piece) for rule in rules]
        for p, state in self._collect(root):
            _take(p, state)
        try:
            yield
        finally:
            for rule, state, piece in own:
                rule.put_state(state, piece)

    def _collect(self, root: int | None) -> list[tuple[Parameter, dict[str, Array]]]:
        """The divided states, put together on ``root``, or on all ranks."""
        divided = [p for p in dict.fromkeys(self._optimizer.target.params()) if _is_divided(p)]
        mine = [(i, name, p.update_rule.piece, a) for i, p in enumerate(divided) for name, a in _entries(p)]
        lines = [(i, name, piece, a.dtype.str) for i, name, piece, a in mine]
        raw = [message.as_bytes(np.ascontiguousarray(to_cpu(a))) for *_, a in mine]
        together = np.concatenate(raw) if raw else np.empty(0, np.uint8)
        everyones_lines = self._comm.allgather_obj(lines)
        bytes_of_all = self._comm.allgather(together) if root is None else self._comm.gather(together, root)
        states: list[dict[str, Array]] = [{} for _ in divided] if bytes_of_all is not None else []
        for theirs, found in zip(everyones_lines, bytes_of_all or ()):
            position = 0
            for i, name, (begin, end), kind in theirs:
                dtype = np.dtype(kind)
                whole = states[i].setdefault(name, np.zeros(divided[i].size, dtype))
                stop = position + (end - begin) * dtype.itemsize
                whole[begin:end] = found[position:stop].view(dtype)
                position = stop
        return list(zip(divided, states))


def _borders(size: int, num_ranks: int) -> list[int]:
    return [min(line * _LINE, size) for line in message.blocks(-(-size // _LINE), num_ranks)]


def _into_segments(found: Sequence[Arena]) -> None:
    for arena in found:
        if isinstance(arena.grad, np.ndarray):
            shared_gradients.segment_for(arena, shared_gradients.GRADIENTS)
    shared_gradients.move_gradients_in([arena for arena in found if isinstance(arena.grad, np.ndarray)])


def _is_divided(p: Parameter) -> bool:
    rule = p.update_rule
    return rule is not None and rule.piece is not None and rule.state is not None


def _entries(p: Parameter) -> list[tuple[str, Array]]:
    return list(p.update_rule.state.items())


def _take(p: Parameter, state: dict[str, Array]) -> None:
    rule = p.update_rule
    rule.put_state({name: to_device(a.reshape(p.shape), p.device) for name, a in state.items()}, None)


def _check_unshared(params: Sequence[Parameter]) -> None:
    """An array of two parameters would have two owners."""
    if any(p.is_shared for p in params):
        raise ValueError(
            "optimizer state divided over ranks (zero=1 or 2): two parameters share one array, which would have two "
            "owners; use the same Parameter in both links, or use zero=0"
        )


def check_stage(zero: int) -> int:
    """The stage, checked."""
    if isinstance(zero, bool) or zero not in (0, 1, 2):
        raise ValueError(f"zero: expected 0, 1 (divide the optimizer's state) or 2 (and the gradients), got {zero!r}")
    return int(zero)
