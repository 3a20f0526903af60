"""What cannot be done while a stream is captured, and graphs that are replayed: of the stand-in, and of CUDA."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array import backend, declared, random
from dbrdist.errors import CaptureError
from dbrdist.kernels.gpu import cublaslt


@pytest.fixture(autouse=True)
def needs_capture(on):
    if on not in ("whole", "cupy"):
        pytest.skip("needs streams that can be captured: --on whole, or a GPU")


@pytest.fixture
def private(xp):
    """A stream that can be captured, and a pool of its own."""
    xp.cuda.Device().synchronize()
    stream, pool = xp.cuda.Stream(non_blocking=True), xp.cuda.MemoryPool()
    with stream, xp.cuda.using_allocator(pool.malloc):
        yield stream


def captured(stream, call):
    stream.begin_capture()
    try:
        result = call()
    finally:
        graph = stream.end_capture()
    return graph, result


def test_a_graph_computes_when_it_is_launched(xp, private):
    x = xp.arange(4, dtype=np.float32)
    total = xp.zeros(4, np.float32)

    def work():
        y = x * 2
        total[...] = total + y
        return y

    graph, y = captured(private, work)
    private.synchronize()
    np.testing.assert_array_equal(total.get(), 0)
    for k in range(1, 4):
        x[...] = k
        graph.launch(private)
        private.synchronize()
        np.testing.assert_array_equal(y.get(), 2 * k)
    np.testing.assert_array_equal(total.get(), 2 + 4 + 6)


def test_indices_are_those_of_the_replay(xp, private):
    table, at = xp.arange(10, dtype=np.float32), xp.zeros(3, np.int32)
    graph, rows = captured(private, lambda: table[at])
    at[...] = xp.asarray(np.array([7, 1, 9], np.int32))
    graph.launch(private)
    np.testing.assert_array_equal(rows.get(), [7, 1, 9])


REFUSED = {
    "a number": lambda xp, x: float(x.sum()),
    "an array": lambda xp, x: x.get(),
    "a condition": lambda xp, x: bool((x > 0).all()),
    "a stream": lambda xp, x: xp.cuda.get_current_stream().synchronize(),
    "the device": lambda xp, x: xp.cuda.Device().synchronize(),
    "an event": lambda xp, x: xp.cuda.get_current_stream().record().synchronize(),
    "a mask": lambda xp, x: x[x > 0],
    "a copy to the device": lambda xp, x: xp.asarray(np.ones(3)),
    "a copy into an array": lambda xp, x: x.set(np.ones(4, np.float32)),
    "a product": lambda xp, x: x.reshape(2, 2).dot(x.reshape(2, 2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_waits_or_copies_is_refused(name, xp, private, on):
    if on == "cupy" and name.startswith("a copy"):
        pytest.skip("CuPy copies through pinned memory of its own, which a graph would read again")
    x = xp.ones(4, np.float32)
    with pytest.raises(Exception, match=r"captur|Captur"):
        captured(private, lambda: REFUSED[name](xp, x))
    if on == "whole":
        np.testing.assert_array_equal(x.get(), 1)


def test_other_streams_and_pools_are_refused(xp, private, on):
    if on != "whole":
        pytest.skip("CUDA computes at once what another stream is given")
    x = xp.ones(4, np.float32)
    with pytest.raises(Exception, match="work on stream"), xp.cuda.Stream(non_blocking=True):
        private.begin_capture()
        np.add(x, 1, out=x)
    private.end_capture()
    with pytest.raises(Exception, match="memory of the default pool"), xp.cuda.using_allocator(None):
        captured(private, lambda: x + 1)


def test_memory_of_a_graph_belongs_to_its_pool(xp, private, on):
    """Eager work with the default pool does not get it, and a replay does not overwrite what that has."""
    x = xp.ones(1000, np.float32)
    graph, y = captured(private, lambda: (x + 1) * 3)
    private.synchronize()
    with xp.cuda.using_allocator(None):
        others = [xp.full(1000, 7, np.float32) for _ in range(5)]
    private.synchronize()
    graph.launch(private)
    private.synchronize()
    np.testing.assert_array_equal(y.get(), 6)
    for a in others:
        np.testing.assert_array_equal(a.get(), 7)


def test_a_replay_is_ordered_by_its_stream(xp, private, on):
    if on != "whole":
        pytest.skip("the stand-in has the clocks")
    import clocks

    x = xp.ones(4, np.float32)
    graph, y = captured(private, lambda: x + 1)
    graph.launch(private)
    other = xp.cuda.Stream(non_blocking=True)
    with other, pytest.raises(clocks.Race):
        y + 1
    other.wait_event(private.record())
    with other:
        y + 1


# ---- the declared block


def test_declared_numbers_are_those_of_each_replay(xp, private):
    values = {"rate": 0.5, "scale": 4.0}
    x, block = xp.ones(4, np.float32), declared.DeclaredBlock()
    with declared.declaring(block):

        def work():
            rates = block.declare(lambda: (values["rate"], 2.0), 2, np.float64)
            number = block.number(lambda: values["scale"])
            return x * rates[0], x * number.as_type(np.float32), x.astype(np.float16) * number.inverse(np.float16)

        graph, results = captured(private, work)
    for rate, scale in ((0.25, 2.0), (0.125, 8.0), (1.0, 1.0), (3.0, 16.0), (0.0, 4.0), (7.0, 2.0)):
        values.update(rate=rate, scale=scale)
        block.send(private)
        graph.launch(private)
        private.synchronize()
        for a, number in zip(results, (rate, scale, 1 / scale)):
            np.testing.assert_array_equal(a.get(), np.full(4, number, a.dtype))


def test_a_block_has_limits(xp, private):
    block = declared.DeclaredBlock(64)
    block.declare(lambda: 0, 8, np.float64)
    with pytest.raises(CaptureError, match="more than 64 bytes of numbers that change"):
        block.declare(lambda: 0, 1, np.float32)


def test_copies_from_the_host_are_refused_to_the_thread_that_captures(xp, private):
    block, found = declared.DeclaredBlock(), []
    with declared.declaring(block):
        for copy in (lambda: xp.asarray(np.ones(3)), lambda: xp.cuda.alloc_pinned_memory(8)):
            with pytest.raises(CaptureError, match="copies an array from the host"):
                captured(private, copy)
        other = threading.Thread(target=lambda: found.append(xp.cuda.alloc_pinned_memory(8)))
        other.start()
        other.join()
    assert found and xp.cuda.alloc_pinned_memory(8) is not None


@pytest.mark.parametrize("shape, axis", [((2, 3), 0), ((2, 3), 1), ((2, 1, 3, 3), 1)])
def test_many_arrays_are_joined_without_the_host(shape, axis, xp, private, monkeypatch):
    """CuPy copies a table of addresses to the device for more than eight arrays."""
    xs = [xp.full(shape, k, np.float32) for k in range(70)]
    join, block = xp.concatenate, declared.DeclaredBlock()

    def few(xs, axis=0):
        assert len(xs) <= 8
        return join(xs, axis=axis)

    monkeypatch.setattr(xp, "concatenate", few)
    with declared.declaring(block):
        graph, y = captured(private, lambda: F.concat(xs, axis=axis).array)
    graph.launch(private)
    private.synchronize()
    np.testing.assert_array_equal(y.get(), np.concatenate([np.full(shape, k) for k in range(70)], axis))


def test_dropout_draws_what_each_step_draws(device, xp, private):
    x = Variable(xp.ones((6, 40), np.float32))
    block = declared.DeclaredBlock()
    random.set_stream(5, 1, 2, row=3)
    with declared.declaring(block):
        graph, ys = captured(private, lambda: [F.dropout(x, r).array for r in (0.3, 0.5)])
    for at in ((5, 1, 3, 0), (5, 2, 9, 12), (6, 0, 0, 5)):
        random.set_stream(*at)
        block.send(private)
        graph.launch(private)
        private.synchronize()
        found = [y.get() for y in ys]
        exact = [F.dropout(np.ones((6, 40), np.float32), r).array for r in (0.3, 0.5)]
        np.testing.assert_array_equal(found, exact)


# ---- products of matrices


def layouts(xp, rng, m, n, dtype):
    """A matrix (m, n) as it may lie in memory."""
    values = rng.standard_normal((m, n)).astype(np.float32)

    def put(a):
        return xp.asarray(np.ascontiguousarray(a).astype(dtype))

    yield put(values)
    yield put(values.T).T
    yield put(rng.standard_normal((m, n + 3)).astype(np.float32))[:, 1 : n + 1]
    yield put(rng.standard_normal((n + 2, m)).astype(np.float32))[1 : n + 1].T
    yield put(rng.standard_normal((m, 2 * n)).astype(np.float32))[:, ::2]
    yield xp.broadcast_to(put(values[:, :1]), (m, n))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("m, k, n", [(3, 5, 4), (1, 5, 4), (3, 1, 4), (3, 5, 1), (1, 1, 1), (17, 33, 8)])
def test_products_of_any_layout(m, k, n, dtype, xp, rng):
    dtype = backend.as_dtype(dtype)
    eps = {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    for a in layouts(xp, rng, m, k, dtype):
        for b in layouts(xp, rng, k, n, dtype):
            y = cublaslt.product(a, b)
            exact = a.get().astype("d") @ b.get().astype("d")
            assert (y.shape, y.dtype) == ((m, n), dtype)
            np.testing.assert_allclose(y.get().astype("d"), exact, rtol=eps, atol=eps * max(1, abs(exact).max()))


@pytest.mark.parametrize("left, right", [
    ((2, 3, 4), (2, 4, 5)), ((2, 3, 4, 5), (2, 3, 5, 6)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (4, 5)),
    ((1, 3, 4, 5), (2, 1, 5, 6)), ((2, 1, 4, 5), (1, 3, 5, 6)), ((1, 1, 2, 3), (1, 3, 2)),
])  # fmt: skip
def test_products_of_stacks(left, right, xp, rng):
    a, b = (rng.standard_normal(s).astype("f") for s in (left, right))
    swapped = rng.standard_normal((*right[:-2], right[-1], right[-2])).astype("f")
    for there, here in ((xp.asarray(b), b), (xp.asarray(swapped).swapaxes(-1, -2), swapped.swapaxes(-1, -2))):
        y = cublaslt.product(xp.asarray(a), there)
        np.testing.assert_allclose(y.get(), a @ here, rtol=1e-5, atol=1e-5)


def test_heads_of_attention_as_they_lie(xp, rng):
    """(B, T, H, D) seen as (B, H, T, D): no stack with one stride, so it is copied."""
    x = rng.standard_normal((2, 5, 3, 4)).astype("f")
    a = xp.asarray(x).transpose(0, 2, 1, 3)
    y = cublaslt.product(a, a.swapaxes(-1, -2))
    host = x.transpose(0, 2, 1, 3)
    np.testing.assert_allclose(y.get(), host @ host.swapaxes(-1, -2), rtol=1e-5, atol=1e-5)


def test_a_product_writes_into_an_array(xp, rng):
    a, b = rng.standard_normal((2, 4, 4)).astype("f")
    for out in (xp.zeros((4, 4), "f"), xp.zeros((4, 4), "d"), xp.zeros((9, 4), "f")[2:6]):
        assert cublaslt.product(xp.asarray(a), xp.asarray(b), out) is out
        np.testing.assert_allclose(out.get(), a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("factor", [1.0, 0.125])
def test_products_of_16_bits_are_stored_in_float32_with_the_sums_of_rows(dtype, factor, xp, rng):
    """As for gradients of weights and biases: gy^T x and the sums of gy."""
    gy, x = (xp.asarray(rng.standard_normal(s).astype(backend.as_dtype(dtype))) for s in ((33, 5), (33, 7)))
    flat = xp.zeros(64, np.float32)
    out, sums = flat[3:38].reshape(5, 7), flat[41:46]
    assert cublaslt.product(gy.T, x, out, factor, sums) is out
    wide, right = gy.get().astype("d"), x.get().astype("d")
    np.testing.assert_allclose(out.get(), factor * wide.T @ right, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums.get(), wide.sum(0), rtol=1e-5, atol=1e-5)
    assert not flat.get()[[0, 1, 2, 38, 39, 40, *range(46, 64)]].any()


def test_what_cublaslt_refused_once_it_is_not_asked_again(xp):
    a, sums = xp.ones((3, 4), np.float16), xp.zeros(3, np.float16)  # sums of 16 bits
    before = cublaslt._library().num_heuristics()
    for _ in range(2):
        with pytest.raises(cublaslt.Unsupported, match=r"no algorithm|status"):
            cublaslt.product(a, a.T, None, 1.0, sums)
    assert cublaslt._library().num_heuristics() == before
    assert sum(type(p) is cublaslt.Unsupported for p in cublaslt._local.products.values()) == 1


def test_what_cublaslt_lacks_goes_to_cupy(xp):
    a = xp.ones((2, 3), np.int32)
    np.testing.assert_array_equal(cublaslt.serve(a, a.T).get(), [[3, 3], [3, 3]])
    with declared.declaring(declared.DeclaredBlock()), pytest.raises(CaptureError, match="int32"):
        cublaslt.serve(a, a.T)


def test_a_plan_that_cublaslt_refuses_is_left_to_cupy(xp, monkeypatch):
    library, real = cublaslt._library(), cublaslt._call

    def refuse(name, *arguments):
        if name == "cublasLtMatmulAlgoGetHeuristic":
            monkeypatch.setattr(library, name, lambda *a: 15)
        real(name, *arguments)

    monkeypatch.setattr(cublaslt, "_call", refuse)
    a = xp.ones((3, 29), np.float32)
    np.testing.assert_array_equal(cublaslt.serve(a, a.T).get(), np.full((3, 3), 29))
    with declared.declaring(declared.DeclaredBlock()), pytest.raises(CaptureError, match="status 15"):
        cublaslt.serve(a, a.T)


def test_the_library_of_cupys_cuda_comes_first(xp, monkeypatch):
    for version, name in ((12090, "libcublasLt.so.12"), (13000, "libcublasLt.so.13")):
        monkeypatch.setattr(xp.cuda.runtime, "runtimeGetVersion", lambda v=version: v, raising=False)
        assert cublaslt._names()[0] == name


def test_a_library_that_is_missing_is_named(monkeypatch):
    def missing():
        raise cublaslt.Unsupported("cuBLASLt was not found (libcublasLt.so.13)")

    monkeypatch.setattr(cublaslt, "_library", missing)
    assert "cuBLASLt was not found" in cublaslt.why_not()


def test_a_programs_own_pool_of_pinned_memory_serves_again(xp, private):
    """So do CuPy's own and none; with a function of the program nothing is captured."""
    default, own = xp.get_default_pinned_memory_pool(), xp.cuda.PinnedMemoryPool()
    try:
        for pool in (own, default):
            xp.cuda.set_pinned_memory_allocator(pool.malloc)
            with declared._without_host_copies():
                inside = xp.cuda.alloc_pinned_memory(700)
            after = xp.cuda.alloc_pinned_memory(700)
            assert inside.mem.pool() is pool and after.mem.pool() is pool
        xp.cuda.set_pinned_memory_allocator(None)
        with declared._without_host_copies():
            assert type(xp.cuda.alloc_pinned_memory(700).mem).__name__ == "PinnedMemory"
        assert type(xp.cuda.alloc_pinned_memory(700).mem).__name__ == "PinnedMemory"
        xp.cuda.set_pinned_memory_allocator(lambda num_bytes: types.SimpleNamespace(mem=None))
        with pytest.raises(CaptureError, match="by a function of the program"), declared._without_host_copies():
            pass
    finally:
        xp.cuda.set_pinned_memory_allocator(default.malloc)
