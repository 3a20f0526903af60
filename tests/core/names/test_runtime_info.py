"""What a bug report should say."""

import io
import platform
import subprocess
import sys

import numpy as np
import pytest

import dbrdist


def test_runtime_info_has_a_line_per_library(capsys):
    out = io.StringIO()
    dbrdist.print_runtime_info(out)
    lines = dict(line.split(": ", 1) for line in out.getvalue().splitlines())
    assert list(lines) == ["Platform", "Python", "dbrdist", "NumPy", "CuPy", "oneDNN", "mpi4py"]
    assert lines["Python"] == platform.python_version()
    assert lines["NumPy"] == np.__version__
    kind = "interpreted" if dbrdist.core.tape.call.__file__.endswith(".py") else "compiled"
    assert lines["dbrdist"] == f"{dbrdist.__version__}, {kind}"
    dbrdist.print_runtime_info()
    assert capsys.readouterr().out == out.getvalue()


@pytest.mark.programs
def test_runtime_info_loads_nothing():
    program = """if True:
        import sys, dbrdist
        dbrdist.print_runtime_info()
        loaded = {"mpi4py", "cupy", "dbrdist.kernels.cpu.onednn"} & set(sys.modules)
        assert not loaded, loaded
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
