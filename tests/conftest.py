"""What all tests share."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

from dbrdist.core.tape import call
from tests import parts, quick
from tests.comm import jobs
from tests.each import fresh_chance as start_afresh

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background hands that on to all it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTING = {"started", "ranks", "several"}  # fixtures that start jobs
RUNS = re.compile(r"^tests/cli/.*\.py::")  # where the fixture `run` is a command from its beginning to its end


def pytest_addoption(parser):
    words = "of the test files only the K-th of N parts; see tests/parts.py"
    parser.addoption("--part", type=parts.part, metavar="K/N", help=words)
    parser.addoption("--quick", action="store_true", help="the inner loop; see tests/quick.py")


def pytest_configure(config):
    quick.is_on[0] = config.option.quick
    if config.option.quick:
        config.option.markexpr = config.option.markexpr or "not slow"
        config.pluginmanager.register(quick.Limit())


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Garbage collection waits until all is collected and passes over it later: a third less time in each worker.

    There are a million objects by then, none of them garbage, and tests that call ``gc.collect`` look at their own. It
    goes on a tenth as often as Python would.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(7_000, 20, 20)
        gc.enable()


def pytest_ignore_collect(collection_path, config):
    """Files all of whose tests would be left out are not even imported, which each worker would do; None: read it."""
    if not collection_path.name.startswith("test_") or not collection_path.is_file():
        return None
    if any(collection_path.as_posix().endswith(argument.partition("::")[0]) for argument in config.args):
        return None
    part, markexpr = config.option.part, config.option.markexpr
    if part and str(collection_path) not in parts.files_of(part, markexpr):
        return True
    return True if parts.is_left_out(collection_path, markexpr) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """What starts jobs starts programs, and what starts programs is slow: `make test-fast` and `make test-quick`.

    Slow are whole runs of `dbrdist-train` in this process, too. The inner loop has few combinations of what `-m` and
    `-k` select, so that these have every value that is selected.
    """
    for item in items:
        if not STARTING.isdisjoint(item.fixturenames):
            item.add_marker(pytest.mark.mpiexec)
        if item.get_closest_marker("mpiexec"):
            item.add_marker(pytest.mark.programs)
        if item.get_closest_marker("programs") or ("run" in item.fixturenames and RUNS.match(item.nodeid)):
            item.add_marker(pytest.mark.slow)
    yield
    if config.option.quick:
        items[:], left_out = quick.divided(items)
        config.hook.pytest_deselected(items=left_out)


def array_modules() -> list:
    """NumPy, and CuPy where there is a GPU."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception:  # not installed, no driver, no device: each with an error class of its own
        return [np]
    return [np, cupy]


@pytest.fixture(autouse=True)
def fresh(request):
    """Each test starts from seed 0 with nothing drawn yet, and unhooked, whichever tests ran before it."""
    start_afresh()
    call.hooked[0] = False
    jobs.is_expected[0] = request.node.get_closest_marker("mpiexec") is not None


@pytest.fixture(autouse=True, scope="session")
def no_flush():
    """No test cuts the power: a flush to disk, of which there are 4,000, takes a millisecond and much more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def tmp_path(request, tmp_path_factory):
    """pytest's own reads the folder of all tests each time, for a number that is free, and writes a link.

    The name is no longer than there: sockets lie below some of these, whose paths may have 107 bytes.
    """
    name = re.sub(r"\W", "_", request.node.name)[:20]
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=tmp_path_factory.getbasetemp()))


@pytest.fixture(params=array_modules(), ids=lambda m: m.__name__)
def xp(request):
    """The array module: the same test runs on NumPy and, where there is a GPU, on CuPy."""
    return request.param
