"""The threads of BLAS and OpenMP in a fresh process: limited, but never against the user's own setting."""

import os
import subprocess
import sys

import pytest

NUM_CORES = len(os.sched_getaffinity(0))
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT")
pytestmark = pytest.mark.skipif(NUM_CORES < 2, reason="with one core every pool has one thread")
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


def test_processes_that_are_started_later_inherit_the_limit():
    program = "thread_pools.limit(1); os.system('echo $OMP_NUM_THREADS')"
    assert output(program) == ["1"]


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_a_variable_of_the_user_wins(variable):
    program = "print(thread_pools.limit(1), *(v for k, v in sizes().items() if k == 'OpenBLAS'))"
    limited, *blas = output(program, **{variable: "2"})
    assert limited == str(variable != "OMP_NUM_THREADS")
    assert set(blas) <= {"2"}


def test_a_smaller_number_that_the_program_set_stays():
    program = """
ctypes.CDLL("libgomp.so.1")
for pool in thread_pools.pools():
    pool.resize(1)
thread_pools.limit(2)
print(*sizes().values())
"""
    assert set(output(program)) == {"1"}


def test_a_second_limit_is_not_taken_for_the_users():
    assert output("print(thread_pools.limit(2), thread_pools.limit(1), os.environ['OMP_NUM_THREADS'])") == [
        "True",
        "True",
        "1",
    ]


def test_idle_threads_spin_briefly_unless_the_user_says_otherwise():
    program = "thread_pools.wait_briefly(); print(os.environ.get('GOMP_SPINCOUNT'))"
    assert output(program) == ["10000"]
    assert output(program, GOMP_SPINCOUNT="5") == ["5"]
    assert output(program, OMP_WAIT_POLICY="active") == ["None"]
