"""Have the ranks' parameters drifted apart? A checksum of some elements is part of the next step's header.

After the first updates some elements of all parameters are looked at, then of a sixteenth of the parameters in turn,
and each time other elements: after 16 looks all parameters have been seen, and one of n elements whole after n / 16
turns. Whatever changes all parameters is seen by the next look, whichever it is at.

All ranks have the same gradients and make the same update, so they keep the same parameters, unless something changes
them on some ranks only: a hook or an update rule of the user's own, random numbers with a seed for each rank, a file
that one rank has loaded. Where checksums differ, ranks compare more elements by their values: processors of two kinds
may round differently.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.comm.protocol import samples
from dbrdist.comm.transport.call_log import place_of
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.core.array.backend import to_cpu
from dbrdist.core.array.types import Array, HostArray
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase

FIRST = 4  # updates after which some elements of all parameters are looked at, then of some parameters in turn
EVERY = 8
_EVERY_ON_DEVICE = 64  # a look waits for the device
_PAUSE = 8  # looks that are left out where the ranks' processors round differently: their checksums always differ
_NUM_TURNS = 16  # looks until all parameters have been seen: one parameter in each of a small network
_NUM_ELEMENTS = 16


class Drift:
    """The look at the parameters of one optimizer."""

    def __init__(self) -> None:
        self.checksum = 0  # of the last look
        self.is_suspected = False  # some ranks have other checksums
        self._named: list[tuple[str, Parameter]] = []
        self._scales: dict[str, float] = {}  # the largest magnitudes that were compared so far
        self._pause = 0  # looks to leave out
        self._looked: Sequence[tuple[str, Parameter]] = ()  # at the last look
        self._turn = 0  # which elements of them

    def plan(self, named: Iterable[tuple[str, Parameter]]) -> None:
        """Look at these parameters, as far as they are initialized."""
        self._named = [(name, p) for name, p in named if p.is_initialized and p.lend().size]

    def look(self, t: int) -> None:
        """Take the checksum after update ``t`` if it is time to; never but after the first updates and each 8th."""
        named, turn = self._named, t
        if t > FIRST and (t % EVERY or not named):
            return
        if self._pause:
            self._pause -= 1
            return
        if t > FIRST:
            every = EVERY if isinstance(named[0][1].lend(), np.ndarray) else _EVERY_ON_DEVICE
            if t % every:
                return
            # which ones follows from t: ranks may have planned at other times
            turn, k = divmod(t // every - 1, min(len(named), _NUM_TURNS))
            named = named[k::_NUM_TURNS]
        self._looked, self._turn = named, turn
        checksum = 1
        for _, p in named:
            a = p.lend()
            if a is not None and a.size:  # a hook may have taken elements away
                checksum = zlib.crc32(_some(a, turn).tobytes(), checksum)
        self.checksum = checksum

    def _values(self) -> tuple[dict[str, HostArray], tuple[int, list[str]], dict[str, HostArray]]:
        """Elements of all parameters; in which turn the last look was, and the elements that it was at."""
        found = {name: samples.some(p.lend()) for name, p in self._named if p.is_initialized}
        looked = {name: _some(p.lend(), self._turn) for name, p in self._looked if name in found and p.lend().size}
        return found, (self._turn, list(looked)), looked

    def compare(self, comm: CommunicatorBase, t: int, own_hooks: Sequence[str]) -> None:
        """Raise CommunicatorError on every rank if parameters differ by more than rounding. Collective.

        ``own_hooks`` are this rank's hooks that dbrdist does not know.
        """
        self.is_suspected = False
        path, line = place_of(sys._getframe(1))
        everyone = comm.allgather_obj((self._values(), own_hooks, f"{path}:{line}"))
        looks = [look for (_, look, _), *_ in everyone]
        # A rank on a device looks less often than one on a host: what they looked at last may be other elements.
        is_same_look = looks.count(looks[0]) == len(looks)
        everyone = [(_joined(found, looked if is_same_look else {}), *rest) for (found, _, looked), *rest in everyone]
        expected, _, where = everyone[0]
        is_equal = True
        for name, values in expected.items():
            rows = [theirs.get(name, values) for theirs, *_ in everyone]
            scale = self._scales[name] = max(self._scales.get(name, 0.0), *map(samples.magnitude, rows))
            others = [rank for rank, theirs in enumerate(rows) if samples.differ(values, theirs, scale)]
            if others:
                k = samples.first_difference(values, rows[others[0]], scale)
                hooks = sorted({hook for _, own, _ in everyone for hook in own})
                raise CommunicatorError(
                    f"expected the same parameters on every rank after update {t}, but {name} on {name_ranks(others)} "
                    f"differs from rank 0 (one of its elements is {_element(rows[others[0]], k)} instead of "
                    f"{_element(values, k)}): a hook, an update rule, random numbers with a seed for each rank, or the "
                    "program between two steps changes something on some ranks only; hooks of the program's own: "
                    f"{', '.join(hooks) or 'none'} (called at {where})"
                )
            is_equal = is_equal and all(theirs.tobytes() == values.tobytes() for theirs in rows)
        self.checksum = 0  # the next comparison is after the next look, not in every step until then
        self._pause = 0 if is_equal else _PAUSE


def _joined(found: dict[str, HostArray], looked: dict[str, HostArray]) -> dict[str, HostArray]:
    return found | {name: np.concatenate([found[name], some]) for name, some in looked.items()}


def _some(a: Array, turn: int) -> HostArray:
    """A few elements at even distances, in each turn others, whatever the order of memory."""
    step = a.size // _NUM_ELEMENTS or 1
    if type(a) is np.ndarray:
        return a.flat[turn % step :: step]
    where = np.unravel_index(np.arange(turn % step, a.size, step), a.shape) if a.ndim else (np.newaxis,)
    return to_cpu(a[where])


def _element(values: HostArray, k: int) -> str:
    return f"{values[k]:.6g}" if k < values.size else "missing"
