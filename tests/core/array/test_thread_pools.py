"""The threads of BLAS and OpenMP in a fresh process: limited, but never against the user's own setting."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dbrdist.core.array import thread_pools
from tests.each import each

NUM_CORES = len(os.sched_getaffinity(0))
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT")
START = """
import os
import ctypes
import numpy as np
from dbrdist.core import thread_pools
def sizes():
    return {pool.name: pool.size() for pool in thread_pools.pools()}
"""


def output(program, **environ):
    """What a program prints that starts without variables about threads."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES} | environ
    command = [sys.executable, "-c", START + program]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout.split()


@pytest.mark.programs
@pytest.mark.skipif(NUM_CORES < 2, reason="with one core every pool has one thread")
def test_a_limit_reaches_what_is_loaded_and_what_will_be():
    program = """
blas = sizes()
ctypes.CDLL("libgomp.so.1")
print(sizes()["OpenMP"], blas.get("OpenBLAS"), "OpenMP" in blas)
thread_pools.limit(1)
print(*sizes().values(), thread_pools.num_cores())
"""
    first, second, loaded, *after = output(program)
    assert int(first) == NUM_CORES and second in ("None", str(NUM_CORES)) and loaded == "False"
    assert set(after) == {"1"}
    later = "thread_pools.limit(1); ctypes.CDLL('libgomp.so.1'); print(sizes()['OpenMP'])"
    assert output(later) == ["1"]


@pytest.mark.programs
@pytest.mark.skipif(NUM_CORES < 2, reason="with one core every pool has one thread")
def test_processes_that_are_started_later_inherit_the_limit():
    program = "thread_pools.limit(1); os.system('echo $OMP_NUM_THREADS')"
    assert output(program) == ["1"]


@pytest.mark.programs
@pytest.mark.skipif(NUM_CORES < 2, reason="with one core every pool has one thread")
@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_a_variable_of_the_user_wins(variable):
    program = "print(thread_pools.limit(1), *(v for k, v in sizes().items() if k == 'OpenBLAS'))"
    limited, *blas = output(program, **{variable: "2"})
    assert limited == str(variable != "OMP_NUM_THREADS")
    assert set(blas) <= {"2"}


@pytest.mark.programs
@pytest.mark.skipif(NUM_CORES < 2, reason="with one core every pool has one thread")
def test_a_smaller_number_that_the_program_set_stays():
    program = """
ctypes.CDLL("libgomp.so.1")
for pool in thread_pools.pools():
    pool.resize(1)
thread_pools.limit(2)
print(*sizes().values())
"""
    assert set(output(program)) == {"1"}


@pytest.mark.programs
@pytest.mark.skipif(NUM_CORES < 2, reason="with one core every pool has one thread")
def test_a_second_limit_is_not_taken_for_the_users():
    assert output("print(thread_pools.limit(2), thread_pools.limit(1), os.environ['OMP_NUM_THREADS'])") == [
        "True",
        "True",
        "1",
    ]


@pytest.mark.programs
@pytest.mark.skipif(NUM_CORES < 2, reason="with one core every pool has one thread")
def test_idle_threads_spin_briefly_unless_the_user_says_otherwise():
    program = "thread_pools.wait_briefly(); print(os.environ.get('GOMP_SPINCOUNT'))"
    assert output(program) == ["10000"]
    assert output(program, GOMP_SPINCOUNT="5") == ["5"]
    assert output(program, OMP_WAIT_POLICY="active") == ["None"]


def test_pools_that_are_loaded_have_a_name_a_size_and_their_own_variables():
    found = list(thread_pools.pools())
    for pool in found:
        assert pool.name in ("OpenBLAS", "MKL", "BLIS", "OpenMP")
        assert pool.size() >= 1 and all(v.endswith("_NUM_THREADS") for v in pool.variables)
        pool.resize(pool.size())
    assert any(pool.name == "OpenBLAS" for pool in found) or "openblas" not in Path("/proc/self/maps").read_text()


class FakePool:
    """A library with a pool of threads."""

    def __init__(self, count, *variables):
        self.count, self.variables = count, variables

    def size(self):
        return self.count

    def resize(self, count):
        assert count != self.count  # a call that changes nothing may still start threads
        self.count = count


@pytest.fixture
def pools(monkeypatch):
    """Three libraries, of which the user has set the second one's own variable."""
    made = [FakePool(8, "A_THREADS"), FakePool(8, "B_THREADS"), FakePool(2, "C_THREADS"), FakePool(3, "D_THREADS")]
    monkeypatch.setattr(thread_pools, "pools", lambda: iter(made))
    monkeypatch.setattr(thread_pools, "_ours", {})
    monkeypatch.setattr(thread_pools, "_share", None)
    monkeypatch.setattr(os, "environ", {"B_THREADS": "8"})
    return made


def variables():
    """The environment, but for what the test runner puts there."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}


def test_a_limit_is_for_pools_that_are_larger_and_not_set_by_the_user(pools):
    assert thread_pools.limit(3) is True
    assert [pool.count for pool in pools] == [3, 8, 2, 3]
    assert variables() == {"B_THREADS": "8", "OMP_NUM_THREADS": "3"}
    assert thread_pools.num_cores() == 3
    assert thread_pools.limit(1) is True  # the variable is there now, but it is not the user's
    assert [pool.count for pool in pools] == [1, 8, 1, 1] and os.environ["OMP_NUM_THREADS"] == "1"
    os.environ["OMP_NUM_THREADS"] = "2"
    assert thread_pools.is_set_by_user("OMP_NUM_THREADS") and thread_pools.limit(1) is False
    assert os.environ["OMP_NUM_THREADS"] == "2" and thread_pools.num_cores() == 1


def test_one_thread_each_whatever_the_user_says(pools):
    os.environ["OPENBLAS_NUM_THREADS"] = "5"
    pools.append(FakePool(1))
    thread_pools.use_one()
    assert [pool.count for pool in pools] == [1] * 5
    assert variables() == {"B_THREADS": "8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@each(given=[{}, {"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}])
def test_idle_threads_sleep_soon_unless_the_user_says_otherwise(pools, given):
    os.environ.update(given)
    before = variables()
    thread_pools.wait_briefly()
    assert variables() == (before if given else {**before, "GOMP_SPINCOUNT": "10000"})


def test_the_cores_of_a_process_are_those_it_may_run_on(monkeypatch):
    monkeypatch.setattr(thread_pools, "_share", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7} if pid == 0 else {1})
    assert thread_pools.affinity() == {3, 5, 7} and thread_pools.num_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, numbers in ((4, {0, 1, 2, 3}), (None, {0})):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert thread_pools.affinity() == numbers
    monkeypatch.setattr(thread_pools, "_share", 2)
    assert thread_pools.num_cores() == 2


def kind(getters, setters):
    return thread_pools._Kind("Mine", "mine", ("MINE",), getters, setters)


@each(
    **{
        "file, name, variables, getter, setter": [
            ("libopenblas64_p-r0-0cf96a72.3.23.so", "OpenBLAS", ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"),
             "openblas_get_num_threads", "openblas_set_num_threads"),
            ("libscipy_openblas64_-99b71e71.so", "OpenBLAS", ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"),
             "scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
            ("libmkl_rt.so.2", "MKL", ("MKL_NUM_THREADS",), "MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
            ("libblis.so.4", "BLIS", ("BLIS_NUM_THREADS",), "bli_thread_get_num_threads", "bli_thread_set_num_threads"),
            *((f, "OpenMP", (), "omp_get_max_threads", "omp_set_num_threads")
              for f in ("libgomp.so.1", "libgomp-a34b3233.so.1.0.0", "libomp.so", "libiomp5.so")),
            *((f, None, None, None, None) for f in ("libc.so.6", "libgompx.so", "libmkl_core.so", "libcompress.so")),
        ]
    }
)  # fmt: skip
def test_libraries_with_threads_are_known_by_their_files(file, name, variables, getter, setter):
    found = [k for k in thread_pools._KINDS if re.search(k.file, file)]
    assert [k.name for k in found] == ([] if name is None else [name])
    for k in found:
        assert k.variables == variables and getter in k.getters and setter in k.setters
        assert not set(k.getters) & set(k.setters)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the maps of Linux")
def test_a_pool_is_a_loaded_library_with_a_getter_and_a_setter(tmp_path):
    with open("/proc/self/maps") as maps:
        libc = next(line.split()[-1] for line in maps if Path(line.split()[-1]).name.startswith(("libc.so", "libc-")))
    found = thread_pools._opened(kind(("no_such", "getpid"), ("srand",)), libc)
    assert (found.name, found.variables) == ("Mine", ("MINE",))
    assert found.size() == os.getpid() and found.resize.__name__ == "srand"
    assert thread_pools._opened(kind(("getpid",), ("no_such",)), libc) is None
    assert thread_pools._opened(kind(("no_such",), ("srand",)), libc) is None
    assert thread_pools._opened(kind(("getpid",), ("srand",)), str(tmp_path / "libgone.so")) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the maps of Linux")
def test_a_library_that_is_not_loaded_stays_so(tmp_path):
    folder = Path(importlib.import_module("_ctypes").__file__).parent
    name = next(iter(sorted(folder.glob("_testcapi*.so")) or sorted(folder.glob("_queue*.so"))), None)
    if name is None:
        pytest.skip("Python has no extension modules in files")
    path = tmp_path / "libopenblas.so"
    shutil.copy(name, path)
    names = (f"PyInit_{name.name.partition('.')[0]}",)
    assert thread_pools._opened(kind(names, names), str(path)) is None
    assert str(path) not in Path("/proc/self/maps").read_text()
