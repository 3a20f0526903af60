"""What ranks carry from one step into the next besides parameters and the optimizer's state, also through a snapshot.

That is what a compression has kept back, gradients of calls that only add up, a rank's own parameters and state between
two averages of local SGD, and gradients on their way under double buffering. Some of it all ranks have in common, the
rest is each rank's own: a snapshot for all ranks has everyone's.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.protocol import agree
from dbrdist.comm.steps.buffering import Buffers
from dbrdist.comm.steps.step_options import StepOptions
from dbrdist.comm.transport import message
from dbrdist.core.array.backend import is_array, to_cpu, to_device
from dbrdist.core.array.types import Array, HostArray
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import CheckpointError

if TYPE_CHECKING:
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.core.model.link import Link

Entries: TypeAlias = dict[str, HostArray]  # by kind and path of the parameter: kept/l1/W
_NO_COUNT = -1  # instead of a number of samples


class Loaded(NamedTuple):
    """What a snapshot had, until the first step takes it up."""

    common: Entries
    own: Entries


class StepState:
    """What one multi-node optimizer carries.

    Args:
        comm: the ranks.
        way: its settings.
    """

    def __init__(self, comm: CommunicatorBase, way: StepOptions) -> None:
        self._comm = comm
        self._way = way
        self.gathered: list[int | None] = []  # numbers of examples of the calls that only added up gradients
        self.num_local = 0  # steps since the ranks averaged their parameters
        self.buffers = Buffers(comm) if way.double_buffering and comm.size > 1 else None
        self._everyones: dict[int, Entries] | None = None  # by rank, within ``everyones_on``
        self.loaded: Loaded | None = None

    def forget(self) -> None:
        """Start over with the next step, with nothing but what a compression has kept."""
        self.gathered, self.num_local = [], 0
        if self.buffers is not None:
            self.buffers.forget()

    def samples(self, num_samples: int | None) -> int | None:
        """How many examples all calls of this step had, with those of the last."""
        if num_samples is None or not self.gathered:
            return num_samples
        return num_samples + sum(n or 0 for n in self.gathered)

    def divide(self, plan: ReductionPlan, total: int | None) -> None:
        """Make means of the gradients that all calls of this step, with so many examples, added up."""
        for grad in plan.collect():
            message.divide(grad, float(len(self.gathered) + 1 if total is None else max(total, 1)))

    def copied(self, way: StepOptions, memo: dict[int, Any]) -> StepState:
        """The same for a copy of the optimizer, with copied parameters."""
        new = StepState(self._comm, way)
        new.gathered, new.num_local = list(self.gathered), self.num_local
        new.loaded = copy.deepcopy(self.loaded, memo)
        if self.buffers is not None and new.buffers is not None:
            new.buffers.resume({copy.deepcopy(p, memo): mean.copy() for p, mean in self.buffers.arriving()})
        return new

    # ---- what there is ----

    def _own(self, target: Link) -> Entries:
        """What this rank alone has."""
        if self.loaded is not None:
            return self.loaded.own
        found: Entries = {}
        for p, name in _names(target).items():
            if self._way.compression is not None and p in self._way.compression.kept:
                found[f"kept{name}"] = self._way.compression.kept[p]
            if self.gathered and p.grad is not None:
                found[f"gradient{name}"] = to_cpu(p.grad)
            if self._is_local and p.is_initialized:  # after a round too: a layer frozen within it was left out
                found[f"value{name}"] = to_cpu(p.lend())
            if self._is_local:
                state = getattr(p.update_rule, "state", None) or {}
                found.update((f"state{name}/{key}", np.asarray(_on_host(a))) for key, a in state.items())
        if self.gathered:
            found["counts"] = np.array([_NO_COUNT if n is None else n for n in self.gathered], np.int64)
        return found

    def _common(self, target: Link) -> Entries:
        """What all ranks have in common."""
        if self.loaded is not None:
            return self.loaded.common
        names = _names(target)
        found: Entries = {"num_local": np.array(self.num_local)}
        if self._way.compression is not None:
            found.update((f"right{names[p]}", a) for p, a in self._way.compression.right.items() if p in names)
        if self.buffers is not None:
            found.update((f"arriving{names[p]}", to_cpu(a)) for p, a in self.buffers.arriving() if p in names)
        return found

    @property
    def _is_local(self) -> bool:
        return self._way.local_steps > 1 and self._comm.size > 1

    # ---- snapshots ----

    @contextlib.contextmanager
    def everyones_on(self, root: int, target: Link) -> Iterator[None]:
        """Within the block :meth:`serialize` on ``root`` saves what every rank has. Collective."""
        if self._way.carries and self._comm.size > 1:
            parts = self._comm.gather_obj(self._own(target), root)
            self._everyones = None if parts is None else dict(enumerate(parts))
        try:
            yield
        finally:
            self._everyones = None

    def serialize(self, serializer: AbstractSerializer, target: Link) -> None:
        """Save or load; what is loaded waits for the first step. A state without any of this starts over."""
        if not self._way.carries:
            return
        if serializer.is_loading:
            self._load(serializer["carried"])
            return
        parts = {self._comm.rank: self._own(target)} if self._everyones is None else self._everyones
        common = self._common(target)
        about = {"size": self._comm.size, "common": list(common), "ranks": {k: list(own) for k, own in parts.items()}}
        inner = serializer["carried"]
        inner("about", json.dumps(about))
        for place, entries in [("all", common), *((f"rank{k}", own) for k, own in parts.items())]:
            for key, value in entries.items():
                inner[place](key, value)

    def _load(self, serializer: AbstractSerializer) -> None:
        self.forget()
        self.loaded = None
        if self._way.compression is not None:
            self._way.compression.forget()
        try:
            text = serializer("about", None)
        except CheckpointError:  # saved without such settings
            return
        if text is None:
            return
        try:
            about = json.loads(str(text))
        except ValueError as e:
            raise CheckpointError(f"carried/about: cannot be read: {e}") from None
        common = _read(serializer["all"], about["common"])
        parts = {int(k): _read(serializer[f"rank{k}"], keys) for k, keys in about["ranks"].items()}
        if about["size"] == self._comm.size:
            own = parts.get(self._comm.rank, {})
        else:
            own = _merged(parts, about["size"], self._comm.rank, self._comm.size)
            common["num_local"] = np.array(0)  # all have the same again
        self.loaded = Loaded(common, own)

    def take_up(self, target: Link) -> None:
        """Go on from what was loaded. Collective."""
        loaded, self.loaded = self.loaded, None
        assert loaded is not None
        counts = loaded.own.get("counts", np.empty(0, np.int64)) if self._way.accumulate > 1 else np.empty(0, np.int64)
        words = [f"local steps {loaded.common['num_local']}", f"calls gathered {counts.size}", *sorted(loaded.common)]
        agree.same_everywhere(self._comm, agree.as_lines(words), "the same moment of a run")
        self.num_local = int(loaded.common["num_local"])
        self.gathered = [None if n == _NO_COUNT else n for n in counts.tolist()]
        if self.gathered:
            target.cleargrads()
        with agree.together(self._comm):
            self._take_all(loaded, {name: p for p, name in _names(target).items()})

    def _take_all(self, loaded: Loaded, params: dict[str, Parameter]) -> None:
        arriving: dict[Parameter, HostArray] = {}
        for key, value in [*loaded.common.items(), *loaded.own.items()]:
            kind, _, path = key.partition("/")
            p = params.get(f"/{path}")
            if kind == "state":
                path, _, name = path.rpartition("/")
                _set_state(params.get(f"/{path}"), name, value)
            elif p is not None:
                if kind != "right" and value.size != p.size:
                    words = f"carried/{key}: expected {p.size} elements as in the model, found {value.size}"
                    raise CheckpointError(f"{words} in the saved state")
                self._take(kind, p, value, arriving)
        if self.buffers is not None and arriving:
            self.buffers.resume(arriving)

    def _take(self, kind: str, p: Parameter, value: Any, arriving: dict[Parameter, HostArray]) -> None:
        compression = self._way.compression
        if kind == "kept" and compression is not None:
            compression.kept[p] = value
        elif kind == "right" and compression is not None:
            compression.right[p] = value
        elif kind == "arriving":
            arriving[p] = value
        elif kind == "gradient" and self.gathered:
            p.grad = to_device(value.astype(p.dtype, copy=False), p.device)
        elif kind == "value":
            p.write(to_device(value, p.device))


def _names(target: Link) -> dict[Parameter, str]:
    """The first path of each parameter."""
    found: dict[Parameter, str] = {}
    for name, p in target.namedparams():
        found.setdefault(p, name)
    return found


def _on_host(value: Any) -> Array | int:
    return to_cpu(value) if is_array(value) else value


def _read(serializer: AbstractSerializer, keys: list[str]) -> Entries:
    return {key: np.asarray(serializer(key, None)) for key in keys}


def _set_state(p: Parameter | None, name: str, value: HostArray) -> None:
    state = None if p is None else getattr(p.update_rule, "state", None)
    if state is None or name not in state:
        return
    if is_array(state[name]):
        assert p is not None
        state[name][...] = to_device(value, p.device)
    else:
        state[name] = type(state[name])(value.item())


def _merged(parts: dict[int, Entries], size: int, rank: int, num_ranks: int) -> Entries:
    """What ``rank`` of another number of ranks continues with, from what ``size`` ranks had.

    The mean of what a compression has kept stays what it was; gradients that were added up, and their numbers of
    examples, all go to rank 0; parameters and states become the means of the ranks'.
    """
    result: Entries = {}
    counts: Any = _total(parts, "counts")
    has_counts = counts is not None and not (counts < 0).any()
    for key in dict.fromkeys(key for own in parts.values() for key in own):
        kind = key.partition("/")[0]
        total: Any = _total(parts, key)
        assert total is not None
        if kind == "gradient":
            scale = 1.0 if has_counts else num_ranks / size
            if rank == 0:
                result[key] = total * total.dtype.type(scale)
        elif kind == "counts":
            result[key] = (total if rank == 0 else 0 * total) if has_counts else np.full_like(total, _NO_COUNT)
        else:
            num = size if kind == "kept" else sum(key in own for own in parts.values())
            result[key] = (total / num).astype(total.dtype)
    return result


def _total(parts: dict[int, Entries], key: str) -> HostArray | None:
    found = [own[key] for own in parts.values() if key in own]
    return np.add.reduce(found) if found else None
