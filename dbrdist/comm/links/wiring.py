"""Which component of which rank sends to which, and in what order each rank works.

The wiring of all ranks is played through once, in steps: in each, every rank runs one component whose inputs are there,
for one micro-batch, and then all messages of the step are sent. Each rank keeps the actions that are its own. Since all
take them from the same play, a message never waits for another that waits for it, however large both are, and since
the play is what a pipeline does, ranks work at the same time on different micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

RanksOrAll = tuple[int, ...] | None  # of a component's inputs or outputs; None for those of the whole model


class Component(NamedTuple):
    """A link with its connections."""

    name: str
    rank_in: RanksOrAll
    rank_out: RanksOrAll


class ComponentSlot(NamedTuple):
    """One input or output of a component: its rank, its number there, and which one."""

    rank: int
    component: int
    which: int


class RunComponent(NamedTuple):
    """Run a component for a micro-batch."""

    component: int
    part: int


class Give(NamedTuple):
    """Hand its output on to ``rank``."""

    component: int
    part: int
    rank: int
    to: ComponentSlot


class Take(NamedTuple):
    """Receive an input from ``rank``."""

    to: ComponentSlot
    part: int
    rank: int


Instruction = RunComponent | Give | Take
Wiring = Sequence[Sequence[Component]]  # of each rank


def plan(wiring: Wiring, num_parts: int) -> list[list[Instruction]]:
    """What each rank does, in order.

    Raises:
        ValueError: if the components of different ranks do not match, or wait for each other in a ring.
    """
    play = _Play(wiring, connect(wiring), num_parts)
    while play.step():
        pass
    if play.num_left:
        raise ValueError(_ring(wiring, play))
    return play.actions


def connect(wiring: Wiring) -> dict[ComponentSlot, ComponentSlot]:
    """From each output that goes to a rank to the input that it feeds: the k-th of one rank to another is the k-th
    that this one takes from it.

    Raises:
        ValueError: if there are not as many of both, or a rank is not there.
    """
    outputs: dict[tuple[int, int], list[ComponentSlot]] = {}
    inputs: dict[tuple[int, int], list[ComponentSlot]] = {}
    for rank, components in enumerate(wiring):
        for number, component in enumerate(components):
            for index, other in enumerate(component.rank_out or ()):
                _check_rank(other, wiring, rank, component, "rank_out")
                outputs.setdefault((rank, other), []).append(ComponentSlot(rank, number, index))
            for index, other in enumerate(component.rank_in or ()):
                _check_rank(other, wiring, rank, component, "rank_in")
                inputs.setdefault((other, rank), []).append(ComponentSlot(rank, number, index))
    found: dict[ComponentSlot, ComponentSlot] = {}
    for source, target in sorted(outputs.keys() | inputs.keys()):
        given, taken = outputs.get((source, target), []), inputs.get((source, target), [])
        if len(given) != len(taken):
            raise ValueError(
                f"MultiNodeChainList: the ranks do not match: outputs of rank {source} for rank {target}: "
                f"{len(given)} ({_names(wiring, given)}), inputs of rank {target} from rank {source}: {len(taken)} "
                f"({_names(wiring, taken)}); each rank_out needs a rank_in on the other side"
            )
        found.update(zip(given, taken))
    return found


def _check_rank(other: int, wiring: Wiring, rank: int, component: Component, what: str) -> None:
    if not 0 <= other < len(wiring):
        raise ValueError(
            f"MultiNodeChainList: {what} of {component.name} on rank {rank}: expected ranks from 0 to "
            f"{len(wiring) - 1}, got {other}"
        )


def _names(wiring: Wiring, slots: Sequence[ComponentSlot]) -> str:
    return ", ".join(_name(wiring, slot.rank, slot.component) for slot in slots) or "no component"


def _name(wiring: Wiring, rank: int, number: int) -> str:
    return f"{wiring[rank][number].name}, component {number}"


class _Play:
    """How far each rank is."""

    def __init__(self, wiring: Wiring, feeds: dict[ComponentSlot, ComponentSlot], num_parts: int) -> None:
        self.feeds = feeds
        self.actions: list[list[Instruction]] = [[] for _ in wiring]
        self.outputs = [[len(c.rank_out or ()) for c in components] for components in wiring]
        self.missing = [[[len(c.rank_in or ())] * num_parts for c in components] for components in wiring]
        self.todo = [[deque(range(num_parts)) for _ in components] for components in wiring]  # parts in their order
        self.num_left = sum(len(parts) for rank in self.todo for parts in rank)

    def ready(self, rank: int) -> RunComponent | None:
        """The first component that has its inputs, for its next micro-batch: so those that feed others come first."""
        for number, parts in enumerate(self.todo[rank]):
            if parts and not self.missing[rank][number][parts[0]]:
                return RunComponent(number, parts[0])
        return None

    def step(self) -> bool:
        """Every rank that can runs one component; then their results are sent."""
        running = [(rank, run) for rank in range(len(self.todo)) if (run := self.ready(rank)) is not None]
        for rank, run in running:
            self.actions[rank].append(run)
            self.todo[rank][run.component].popleft()
            self.num_left -= 1
        for rank, (number, part) in running:
            for index in range(self.outputs[rank][number]):
                to = self.feeds[ComponentSlot(rank, number, index)]
                self.missing[to.rank][to.component][part] -= 1
                self.actions[rank].append(Give(number, part, to.rank, to))
                if to.rank != rank:
                    self.actions[to.rank].append(Take(to, part, rank))
        return bool(running)


def _ring(wiring: Wiring, play: _Play) -> str:
    """Which components wait for each other."""
    came_from = {to: slot for slot, to in play.feeds.items()}
    stuck = {(r, c) for r, rank in enumerate(play.todo) for c, parts in enumerate(rank) if parts}
    waits = {
        (to.rank, to.component): (slot.rank, slot.component)
        for to, slot in sorted(came_from.items())
        if (to.rank, to.component) in stuck and (slot.rank, slot.component) in stuck
    }
    at, seen = min(stuck), []
    while at not in seen:
        seen.append(at)
        at = waits[at]
    ring = [*seen[seen.index(at) :], at]
    words = " waits for ".join(f"rank {rank} ({_name(wiring, rank, number)})" for rank, number in ring)
    return f"MultiNodeChainList: the components form a cycle, and none can begin: {words}"
