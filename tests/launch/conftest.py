"""What the launcher's tests need."""

import contextlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))


def pytest_collection_modifyitems(config, items):
    """System tests, which take minutes, are for those who ask; without an mpiexec nothing can be launched."""
    if "launch_system" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("launch_system"):
                item.add_marker(pytest.mark.skip(reason="system test of the launcher: .ci/launch runs it"))
    beside = pathlib.Path(sys.executable).parent / "mpiexec"
    if beside.exists() or shutil.which("mpiexec"):
        return
    for item in items:
        if item.get_closest_marker("mpiexec"):
            item.add_marker(pytest.mark.skip(reason="no mpiexec here: pip install mpich"))


@pytest.fixture
def tmp_path(tmp_path):
    """Pytest's, or where TMPDIR is long one with room for the name of a socket, which has 107 bytes in all."""
    if len(os.fsencode(tmp_path)) <= 60:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        yield pathlib.Path(folder)


@pytest.fixture
def fork():
    """Makes children that end when the test does; a child waits after `act` unless that ends it."""
    from dbrdist_launch import linux

    made = []

    def start(act=lambda: None):
        pid = os.fork()
        if not pid:
            try:
                act()
                signal.pause()
            finally:
                os._exit(0)
        made.append(pid)
        return pid

    yield start
    for pid in made:
        linux.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
