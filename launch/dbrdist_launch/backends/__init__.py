"""How each starter of MPI programs is called: one file per starter, which is all that a new one needs.

A backend is an object as `job.Backend` describes, made by a function `choose(place)` that returns None where it does
not fit. A file of this folder that has one also has `NAMES`, the values of --backend that ask for it, and `ORDER`, its
place among those that are asked by --backend auto. Packages add their own by an entry point of the group
`dbrdist_launch.backends`, named by --backend NAME.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType

from ..errors import LaunchError
from .job import Backend, Place


def _found() -> list[ModuleType]:
    """The files of this folder that have a backend, in the order in which they are asked."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return sorted((one for one in modules if hasattr(one, "ORDER")), key=lambda one: one.ORDER)


_MODULES = _found()
_KNOWN: dict[str, Callable[[Place], Backend | None]] = {one.NAMES[0]: one.choose for one in _MODULES}
_ASKED = {name: one.NAMES[0] for one in _MODULES for name in one.NAMES}
NAMES = ("auto", *_KNOWN, *(name for name in _ASKED if name not in _KNOWN))


def choose(place: Place) -> Backend:
    """Take the backend that was named, or the one that fits the library and the place where we are."""
    if place.asked == "auto":
        for make in _KNOWN.values():
            found = make(place)
            if found is not None:
                return found
        raise LaunchError("no mpiexec, srun or flux fits this program; see `dbrdist-launch doctor`")
    found = _named(place.asked)(place)
    if found is None:
        raise LaunchError(
            f"--backend {place.asked} does not fit: the mpiexec that matches the program belongs to another MPI; "
            "omit --backend, or give another mpiexec with --mpiexec"
        )
    return found


def _named(name: str) -> Callable[[Place], Backend | None]:
    if name in _ASKED:
        return _KNOWN[_ASKED[name]]
    from importlib.metadata import entry_points

    for point in entry_points(group="dbrdist_launch.backends"):
        if point.name == name:
            try:
                made: Callable[[Place], Backend | None] = point.load()
            except Exception as error:
                raise LaunchError(f"--backend {name}: {point.value} cannot be loaded: {error}") from error
            return made
    raise LaunchError(f"--backend {name!r}: expected {', '.join(NAMES)}, or the name of an installed plugin")
