"""How each starter of MPI programs is called: one file per starter, and the choice among them.

A backend is an object as `job.Backend` describes, made by a function `choose(place)` that returns None where it does
not fit. Packages add their own by an entry point of the group `dbrdist_launch.backends`, named by --backend NAME.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import LaunchError
from . import flux, hydra, openmpi, slurm
from .job import Backend, Place

# In the order in which they are asked.
_KNOWN: dict[str, Callable[[Place], Backend | None]] = {
    "srun": slurm.choose,
    "flux": flux.choose,
    "openmpi": openmpi.choose,
    "hydra": hydra.choose,
}
NAMES = ("auto", *_KNOWN, "srun-pmi2", "srun-pmix")


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
    if name in NAMES:
        return _KNOWN[name.partition("-")[0]]
    from importlib.metadata import entry_points

    for point in entry_points(group="dbrdist_launch.backends"):
        if point.name == name:
            try:
                made: Callable[[Place], Backend | None] = point.load()
            except Exception as error:
                raise LaunchError(f"--backend {name}: {point.value} cannot be loaded: {error}") from error
            return made
    raise LaunchError(f"--backend {name!r}: expected {', '.join(NAMES)}, or the name of an installed plugin")
