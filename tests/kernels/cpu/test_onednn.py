"""What can go wrong around a shared native library: threads, forks, caches, lifetimes, and its absence."""

from __future__ import annotations

import collections
import ctypes
import gc
import math
import os
import subprocess
import sys
import textwrap
import threading
import types

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.kernels import ConvGeometry, table
from dbrdist.kernels.cpu import onednn, onednn_convolution
from dbrdist.kernels.reference import numpy_, numpy_normalization
from tests.each import each
from tests.kernels.provider_helpers import needs_onednn

try:
    onednn.library()
except onednn.Unavailable as e:
    pytest.skip(f"oneDNN is not available: {e}", allow_module_level=True)


GEOMETRY = ConvGeometry(1, 1, 1, 1)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.slow
def test_threads_do_not_share_memory_objects():
    """Four threads run one cached convolution at once; each must see its own arrays."""
    W, failures = draw(0, 32, 32, 3, 3), []
    start = threading.Barrier(4)

    def work(seed):
        x = draw(seed, 2, 32, 24, 24)
        expected = numpy_.conv_forward(x, W, None, GEOMETRY)
        expected_gW = numpy_.conv_backward_weight(x, expected, W.shape, GEOMETRY, x.dtype)
        start.wait()
        for _ in range(60):
            y = kernels.conv_forward(x, W, None, GEOMETRY)
            gW = kernels.conv_backward_weight(x, expected, W.shape, GEOMETRY)
            if np.abs(y - expected).max() > 1e-3 or np.abs(gW - expected_gW).max() > 1e-4 * np.abs(expected_gW).max():
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


@pytest.mark.slow
def test_primitives_of_a_thread_die_with_it():
    x, W = draw(0, 1, 8, 8, 8), draw(1, 8, 8, 3, 3)

    def count():
        gc.collect()
        return sum(isinstance(o, onednn.Primitive) for o in gc.get_objects())

    kernels.conv_forward(x, W, None, GEOMETRY)
    before = count()
    thread = threading.Thread(target=kernels.conv_forward, args=(x, W, None, GEOMETRY))
    thread.start()
    thread.join()
    assert count() == before


def test_plans_are_bounded_and_those_in_use_stay(monkeypatch):
    monkeypatch.setattr(table, "_GENERATION", 4)
    monkeypatch.setattr(table, "_local", table.ThreadPlans())
    W = draw(0, 8, 32, 3, 3)
    built = []
    build = onednn_convolution._build
    monkeypatch.setattr(onednn_convolution, "_build", lambda *a: built.append(a[1][2]) or build(*a))
    for height in range(4, 40):
        for h in (4, height):
            x = draw(1, 1, 32, h, 8)
            y = kernels.conv_forward(x, W, None, GEOMETRY)
            np.testing.assert_allclose(y, numpy_.conv_forward(x, W, None, GEOMETRY), atol=1e-4)
        plans = table._local
        assert len(plans.plans) + len(plans.older) <= 8
        assert len(plans.names) <= 9
    assert built == list(range(4, 40))
    kernels.conv_forward(draw(1, 1, 32, 5, 8), W, None, GEOMETRY)
    assert built[-1] == 5


def test_temporaries_live_until_the_call_returns():
    """Copies made for layout or type (NCHW input, float64 gamma, strided bias) are freed only afterwards."""
    x, W, b = draw(0, 2, 16, 40, 40), draw(1, 16, 16, 3, 3), draw(2, 32)[::2]
    for _ in range(20):
        y = kernels.conv_forward(x, W[::-1], b, GEOMETRY)
    np.testing.assert_allclose(y, numpy_.conv_forward(x, W[::-1], b, GEOMETRY), atol=1e-3)
    gamma = draw(3, 16).astype(np.float64)
    y = kernels.bn_forward(x, gamma, gamma, 1e-5)[0]
    np.testing.assert_allclose(y, numpy_normalization.bn_forward(x, gamma, gamma, 1e-5, (0, 2, 3), False)[0], atol=1e-4)


def run_python(code, **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


PRELUDE = """
import os, signal, warnings
import numpy as np
from dbrdist import kernels
from dbrdist.kernels import onednn
x = np.ones((2, 8, 16, 16), np.float32)
W = np.ones((8, 8, 3, 3), np.float32)
conv_arguments = x, W, None, kernels.ConvGeometry(1, 1, 1, 1)
conv = lambda: kernels.conv_forward(*conv_arguments)
"""


def test_what_is_no_array_is_refused_where_arrays_are_read_in_c():
    executors = pytest.importorskip("dbrdist.kernels.cpu.onednn_executor", reason="dbrdist is not compiled")
    executor = executors.Executor(0, 0, 0, 0, 2, 0)
    with pytest.raises(TypeError, match="arrays of NumPy, got list"):
        executor([1.0], np.ones(1))
    with pytest.raises(TypeError, match="at most 2 arrays, got 3"):
        executor(np.ones(1), np.ones(1), np.ones(1))


@pytest.mark.programs
def test_forked_child_uses_numpy():
    """With two threads in the parent a child that entered the library would hang."""
    result = run_python(
        PRELUDE
        + """
y = conv()
assert kernels.provider_of("conv_forward", *conv_arguments) == "onednn"
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same = np.array_equal(conv(), y)
    good = same and kernels.provider_of("conv_forward", *conv_arguments) == "numpy" and onednn.cache_length() == 0
    os._exit(0 if good and "before the fork" in str(caught[0].message) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert np.array_equal(conv(), y)
assert kernels.provider_of("conv_forward", *conv_arguments) == "onednn"
""",
        OMP_NUM_THREADS="2",
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.programs
def test_forked_child_goes_backward_through_what_its_parent_computed():
    """Of a normalization with the ReLU behind it, and of both poolings."""
    result = run_python(
        PRELUDE
        + """
import dbrdist.functions as F
from dbrdist import Parameter, Variable
rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal(shape, np.float32)
given, gamma, beta, gy = draw(2, 8, 16, 16), draw(8), draw(8), draw(2, 8, 8, 8)

def forward():
    leaves = Variable(given), Parameter(gamma.copy()), Parameter(beta.copy())
    h = F.relu(F.batch_normalization(leaves[0] * 1.0, *leaves[1:]))
    y = F.average_pooling_2d(F.max_pooling_2d(h, 2, cover_all=False), 3, 1, 1)
    y.grad = gy
    return y, leaves

with kernels.use("numpy"):
    y, expected = forward()
    y.backward()
y, leaves = forward()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    good = False
    try:
        y.backward()
        good = all(np.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-4) for a, b in zip(leaves, expected))
    finally:
        os._exit(0 if good else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.programs
def test_importing_loads_no_library():
    result = run_python("import dbrdist.kernels\nprint('libdnnl' in open('/proc/self/maps').read())")
    assert result.stdout == "False\n", result.stderr


@pytest.mark.programs
def test_absence_costs_one_line_of_warning_and_changes_no_number():
    result = run_python(
        PRELUDE
        + """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kernels.relu_forward(np.ones((1 << 16), np.float32))
    assert not caught
    assert np.array_equal(conv()[0, 0, 0, :2], [32, 48])
    kernels.bn_forward(x, W[0, :, 0, 0], W[0, :, 0, 0], 1e-5)
print(len(caught), caught[0].message)
""",
        DBRDIST_ONEDNN="/nowhere/libdnnl.so.3",
    )
    assert result.stdout.startswith("1 oneDNN is not available (/nowhere/libdnnl.so.3: cannot open"), result.stderr
    assert "install the package onednn-cpu-gomp, or name a libdnnl.so.3 in DBRDIST_ONEDNN" in result.stdout
    assert result.stdout.count("\n") == 1


@pytest.mark.programs
def test_environment_variable_names_the_library():
    path = os.path.realpath(onednn._wheel_libraries()[0] if onednn._wheel_libraries() else onednn.library().path)
    result = run_python(PRELUDE + "conv()\nprint(onednn.library().path)", DBRDIST_ONEDNN=path)
    assert result.stdout == path + "\n", result.stderr


def test_another_major_version_is_refused(monkeypatch):
    """libc stands for a library that is not oneDNN."""
    monkeypatch.setenv(onednn.ENVIRONMENT_VARIABLE, "libc.so.6")
    with pytest.raises(onednn.Unavailable, match="dnnl_version"):
        onednn._open()


def test_of_kept_operations_the_least_recently_used_goes(monkeypatch):
    monkeypatch.setattr(onednn, "CACHE_SIZE", 2)
    monkeypatch.setattr(onednn._state, "cache", collections.OrderedDict())
    made = []
    for key in ("a", "b", "a", "c", "a", "b"):
        assert onednn.cached(key, lambda key=key: made.append(key) or key.upper()) == key.upper()
        assert len(onednn._state.cache) <= 2
    assert made == ["a", "b", "c", "b"] and list(onednn._state.cache) == ["a", "b"]


def test_an_operation_that_nobody_has_gives_back_what_the_library_made(monkeypatch):
    given_back = []
    library = types.SimpleNamespace(
        c=types.SimpleNamespace(
            dnnl_memory_destroy=lambda memory: given_back.append(("memory", memory.value)),
            dnnl_primitive_destroy=lambda handle: given_back.append(("primitive", handle.value)),
        )
    )
    for is_its_own in (False, True):  # after a fork it is the parent's
        operation = onednn.Primitive.__new__(onednn.Primitive)
        operation._library, operation._handle = library, ctypes.c_void_p(7)
        operation._memories = [ctypes.c_void_p(3), ctypes.c_void_p(4)]
        with monkeypatch.context() as patch:
            patch.setattr(onednn, "_library", library if is_its_own else object())
            del operation
        assert sorted(given_back) == [("memory", 3), ("memory", 4), ("primitive", 7)] * is_its_own


def test_an_operation_whose_making_is_interrupted_goes_without_a_word(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    given_back, said = [], []
    functions = {"dnnl_primitive_create": interrupted, "dnnl_primitive_destroy": lambda h: given_back.append(h.value)}
    library = types.SimpleNamespace(c=types.SimpleNamespace(**functions))
    monkeypatch.setattr(onednn, "_library", library)
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with pytest.raises(KeyboardInterrupt) as caught:
        onednn.Primitive(library, None, {}, None, "name")
    del caught
    gc.collect()
    assert given_back == [None] and not said


def test_a_builder_gives_back_each_description_that_it_made():
    class Counting:
        """The library, and how often each of its functions was called."""

        def __init__(self, c):
            self.c, self.calls = c, collections.Counter()

        def __getattr__(self, name):
            def call(*arguments):
                self.calls[name] += 1
                return getattr(self.c, name)(*arguments)

            return call

    with onednn.Builder() as b:
        counting = Counting(b.library.c)
        b.library = types.SimpleNamespace(c=counting, engine=b.library.engine)
        row, column = b.memory((4,), onednn.F32), b.memory((4,), onednn.F32, (2,))
        b.any((4, 4), onednn.F32)
        b.describe("binary", 0x1FFF0, row, row, row, b.attributes([(0x1FFF1, column)]))
    made = {name: n for name, n in counting.calls.items() if "_create" in name}
    assert sum(made.values()) == 6  # three of memory, attributes, what comes after, the operation
    for kind in ("memory_desc", "primitive_attr", "post_ops", "primitive_desc"):
        num_made = sum(n for name, n in made.items() if f"{kind}_create" in name)
        assert counting.calls[f"dnnl_{kind}_destroy"] == num_made > 0


@each(num_bytes=[1, 64, 1000])
def test_scratch_lies_on_a_cache_line_within_its_memory(num_bytes):
    for _ in range(20):
        a = onednn._on_a_cache_line(num_bytes)
        assert a.nbytes == num_bytes and a.ctypes.data % 64 == 0
        low, high = np.lib.array_utils.byte_bounds(a.base)
        assert low <= a.ctypes.data and a.ctypes.data + num_bytes <= high


@needs_onednn
def test_descriptors_without_strides_lie_in_c_order():
    with onednn.Builder() as b:
        for shape in ((5,), (2, 3), (4, 2, 3), (2, 3, 4, 5), (3, 1, 2, 2, 4)):
            dense = [s // 4 for s in np.empty(shape, "f").strides]
            assert b.equal(b.memory(shape, onednn.F32), b.memory(shape, onednn.F32, dense))
            assert b.size(b.memory(shape, onednn.F32)) == 4 * math.prod(shape)


def test_libraries_that_do_not_serve_are_named_with_the_reason(monkeypatch):
    old = types.SimpleNamespace(dnnl_version=lambda: [2, 7, 1])
    found = {"a": OSError("no such file"), "b": old, "c": types.SimpleNamespace()}

    def load(path):
        if isinstance(found[path], Exception):
            raise found[path]
        return found[path]

    old.dnnl_version = type("Function", (), {"restype": None, "__call__": lambda self: [2, 7, 1]})()
    monkeypatch.setattr(onednn, "_candidates", lambda: list(found))
    monkeypatch.setattr(onednn.ctypes, "CDLL", load)
    words = r"^no such file; b is oneDNN 2\.7, expected version 3; .*dnnl_version"
    with pytest.raises(onednn.Unavailable, match=words):
        onednn._open()
