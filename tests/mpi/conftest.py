"""Run these tests under mpiexec: ``mpiexec -n 3 python -m pytest tests/mpi``.

The ranks run the same tests in the same order. The first failure on any rank is printed with the rank in front and ends
the job: the other ranks would wait for it in their next collective. The time limit of a test counts as a failure too:
60 s, or DBRDIST_TEST_SECONDS on a machine that others keep busy.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import shutil
import tempfile

import pytest
from _pytest._io import TerminalWriter

from dbrdist.comm import create_communicator
from dbrdist.comm.failure import abort
from dbrdist.comm.transport import environment, mpi
from tests.comm import contract_names

LIMIT_SECONDS = int(os.environ.get("DBRDIST_TEST_SECONDS", "60"))

# Folders for tests: one place for each rank. Ranks that clear the common one at the same time meet with files that
# another has just removed, and pytest 9 ends in an error then.
os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="pytest-rank-")
atexit.register(shutil.rmtree, os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)


@pytest.fixture(scope="session", params=contract_names.WORLDS)
def world(request):
    """All ranks; "shared" is flat, with sums through shared memory for every size of array and number of ranks."""
    if request.param == "shared":
        return create_communicator("flat", shared_memory=True)
    return create_communicator(request.param)


@pytest.fixture(params=["world", "self", "split"])
def comm(request, world):
    """All ranks, this rank alone, and the ranks of the same parity, in reverse order."""
    if request.param == "world":
        yield world
        return
    part = world.split(world.rank if request.param == "self" else world.rank % 2, -world.rank)
    yield part
    part.finalize()


def pytest_configure(config):
    """Start MPI, so that any failure can end the job. The time limit needs stderr as it is outside pytest's capture."""
    mpi.start()
    config.addinivalue_line("markers", "limit_seconds(n): the time limit of a test that needs another one")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.suspend_global_capture()
    config.stash[_stderr] = os.dup(2)
    capture.resume_global_capture()


def pytest_sessionstart(session):
    """Rank 0 alone reports progress."""
    if environment.launched()[1] > 0:
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - pytest closes it at its end
        session.config.add_cleanup(nowhere.close)
        terminal._tw = TerminalWriter(nowhere)


def pytest_internalerror(excrepr):
    """A slip in a plugin or in this file."""
    _end_job(str(excrepr))


_stderr = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    # A rank that is stuck in MPI cannot be interrupted by an exception: print where it is and end the process, whereby
    # the launcher ends the job.
    marker = item.get_closest_marker("limit_seconds")
    limit = LIMIT_SECONDS if marker is None else marker.args[0]
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """End the job at the first failure of a rank."""
    if report.failed:
        _end_job(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext}")


def pytest_collectreport(report):
    """A rank that cannot import a test file would fall out of step."""
    if report.failed:
        _end_job(f"FAILED to collect {report.nodeid}\n{report.longreprtext}")


def _end_job(text):
    abort.report(text)
    if mpi.world()[1] > 1:
        mpi.end_job(1)
