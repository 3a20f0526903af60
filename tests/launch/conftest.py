"""What the launcher's tests need."""

import pathlib
import shutil
import sys

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
