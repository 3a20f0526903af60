"""Have the ranks' parameters drifted apart? A checksum of some elements is part of the next step's header.

All ranks have the same gradients and make the same update, so they keep the same parameters, unless something changes
them on some ranks only: a hook or an update rule of the user's own, random numbers with a seed for each rank, a file
that one rank has loaded. Where checksums differ, ranks compare more elements by their values: processors of two kinds
may round differently.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dbrdist.comm.protocol import samples
from dbrdist.comm.transport.call_log import place_of
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.core.array.backend import to_cpu
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import CommunicatorError

_FIRST = 4  # updates after which some elements of all parameters are looked at, then of some parameters
_EVERY = 8
_EVERY_ON_DEVICE = 64  # a look waits for the device
_NUM_PARAMS, _NUM_ELEMENTS = 4, 4


class Drift:
    """The look at the parameters of one optimizer."""

    def __init__(self) -> None:
        self.checksum = 0  # of the last look
        self.is_suspected = False  # some ranks have other checksums
        self._named: list[tuple[str, Parameter]] = []
        self._places: list[Any] = []
        self._turn = 0

    def plan(self, named: Iterable[tuple[str, Parameter]]) -> None:
        """Look at these parameters, as far as they are initialized."""
        self._named = [(name, p) for name, p in named if p.is_initialized and p.array.size]
        self._places = [samples.places(p.array.shape, _NUM_ELEMENTS) for _, p in self._named]
        self._turn = 0

    def look(self, t: int) -> None:
        """Take the checksum after update ``t`` if it is time to."""
        named, places = self._named, self._places
        if t > _FIRST:
            if t % _EVERY or not named:
                return
            if t % _EVERY_ON_DEVICE and not isinstance(named[0][1].array, np.ndarray):
                return
            if len(named) > _NUM_PARAMS:
                self._turn = begin = self._turn % len(named)
                self._turn += _NUM_PARAMS
                named, places = named[begin : begin + _NUM_PARAMS], places[begin : begin + _NUM_PARAMS]
        checksum = 1
        for (_, p), place in zip(named, places):
            checksum = zlib.crc32(to_cpu(p.array[place]).tobytes(), checksum)
        self.checksum = checksum

    def compare(self, comm: Any, t: int, own_hooks: Sequence[str]) -> None:
        """Raise CommunicatorError on every rank if parameters differ by more than rounding. Collective.

        ``own_hooks`` are this rank's hooks that dbrdist does not know.
        """
        self.is_suspected = False
        mine = {name: samples.some(p.array) for name, p in self._named}
        path, line = place_of(sys._getframe(1))
        everyone = comm.allgather_obj((mine, own_hooks, f"{path}:{line}"))
        expected, _, where = everyone[0]
        for name, values in expected.items():
            others = [
                rank for rank, (theirs, *_) in enumerate(everyone) if samples.differ(values, theirs.get(name, values))
            ]
            if others:
                hooks = sorted({hook for _, own, _ in everyone for hook in own})
                raise CommunicatorError(
                    f"expected the same parameters on every rank after update {t}, but {name} on {name_ranks(others)} "
                    f"differs from rank 0 (its first element is {_first(everyone[others[0]][0][name])} instead of "
                    f"{_first(values)}): a hook, an update rule, random numbers with a seed for each rank, or the "
                    "program between two steps changes something on some ranks only; hooks of the program's own: "
                    f"{', '.join(hooks) or 'none'} (called at {where})"
                )


def _first(values: Any) -> str:
    return f"{values.reshape(-1)[0]:.6g}"
