"""What holds for all kernels: a grid of few blocks covers all elements, and no address of another device gets in."""

from __future__ import annotations

import re
from pathlib import Path

import kernel_calls
import numpy as np
import pytest
from support import put

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels import table
from dbrdist.kernels.cpu.onednn import Unsupported
from dbrdist.kernels.gpu import cuda_normalization, cuda_ops, cuda_rows, cuda_source

NAMES = list(kernel_calls.calls(np.random.default_rng(0), 64))


@pytest.fixture(autouse=True)
def on_the_host(on):
    if on != "host-cuda":
        pytest.skip("runs with --on host-cuda")


def arrays_of(result):
    """All arrays of a result, in order."""
    if isinstance(result, (np.ndarray, np.generic)):
        return [np.asanyarray(result)]
    return [a for part in result for a in arrays_of(part)] if isinstance(result, (tuple, list)) else []


def sent(device, arguments):
    return [put(device, a) if isinstance(a, np.ndarray) else a for a in arguments]


@pytest.fixture
def few_blocks(monkeypatch):
    """Grids that are capped are capped at one or two blocks."""
    monkeypatch.setattr(cuda_source, "_BLOCKS", 2)
    for name in ("_SUM_BLOCKS", "_MAP_BLOCKS"):
        monkeypatch.setattr(cuda_normalization, name, 2)
    monkeypatch.setattr(cuda_ops, "_MOST_BLOCKS", 2)
    monkeypatch.setattr(cuda_rows, "_MOST_BLOCKS", 2)
    monkeypatch.setattr(cuda_ops, "_FEW_SCORES", 0)
    monkeypatch.setattr(cuda_ops, "_PIECE", 256)


@pytest.mark.parametrize("name", NAMES)
def test_few_blocks_cover_all_elements(name, few_blocks, device):
    import host_cuda

    call = kernel_calls.calls(np.random.default_rng(0))[name]
    with kernels.use():
        expected = arrays_of(_with_formulas(name, call))
    host_cuda.launched.clear()
    with kernels.use("cuda", "cudnn"):
        found = arrays_of(call.run(*sent(device, call.arguments)))
    names = {launched.partition("<")[0] for _, launched, _, _ in host_cuda.launched}
    assert set(call.launches) <= names
    assert len(found) >= len(expected) > 0
    for a, b in zip(found, expected):
        np.testing.assert_allclose(np.asarray(a), b.reshape(a.shape), 1e-4, 1e-4 * max(1.0, abs(b).max()))


def _with_formulas(name, call):
    """The result by NumPy; updates have their formulas in optimizers, and are compared with many blocks instead."""
    if not name.startswith("update"):
        return call.run(*[np.copy(a, order="K") if isinstance(a, np.ndarray) else a for a in call.arguments])
    p, g, *state = (a.astype(np.float64) for a in call.arguments)
    rule = name.removeprefix("update by ")
    if rule == "sgd":
        return [p - 0.1 * g]
    if rule == "momentum_sgd":
        v = 0.9 * state[0] - 0.1 * g
        return [p + v, g, v]
    if rule == "corrected_momentum_sgd":
        v = 0.9 * state[0] - g
        return [p + 0.1 * v, g, v]
    if rule == "nesterov_ag":
        v = 0.9 * state[0] - 0.1 * g
        return [p - 0.1 * g + 0.9 * v, g, v]
    if rule in ("ada_grad", "rmsprop"):
        h = state[0] + g * g if rule == "ada_grad" else 0.9 * state[0] + 0.1 * g * g
        return [p - 0.1 * g / (np.sqrt(h) + 1e-8), g, h]
    if rule == "adam":
        m, v = 0.9 * state[0] + 0.1 * g, 0.999 * state[1] + 0.001 * g * g
        return [p * 0.99 - 0.01 * m / (np.sqrt(np.maximum(v, state[2])) + 1e-8), g, m, v]
    half, v = len(p) // 2, state[0]
    whole = np.sqrt((g[:half] ** 2).sum()) + 1e-4 * np.sqrt((p[:half] ** 2).sum()) + 1e-9
    rate = 0.01 * np.sqrt((p[:half] ** 2).sum()) / whole
    first = 0.9 * v[:half] - 0.1 * rate * (g[:half] + 1e-4 * p[:half])
    moved = np.concatenate([first, 0.9 * v[half:] - 0.1 * g[half:]])
    return [p + moved]


def test_the_table_has_every_kernel():
    """A new kernel needs a row in kernel_calls.py."""
    in_files = set()
    for file in (Path(cuda_source.__file__).parent / "cuda").glob("*.cu"):
        in_files |= set(re.findall(r"__global__ void (\w+)\(", file.read_text()))
    called = {k for call in kernel_calls.calls(np.random.default_rng(0), 64).values() for k in call.launches}
    assert in_files - called == {"mean_of_losses"}  # which follows on cross_entropy


def test_running_statistics_of_more_channels_than_a_grid_has_threads(device):
    """2-d batch normalization over very wide features."""
    size = cuda_source._BLOCKS * cuda_source._THREADS + 257
    running, mean = np.zeros(size, np.float32), np.ones(size, np.float32)
    there = put(device, running, running, mean, mean)
    with kernels.use("cuda"):
        kernels.bn_move(*there, 0.5, (0.5, 0.25))
    assert (np.asarray(there[0]) == 0.5).all() and (np.asarray(there[1]) == 0.25).all()


# ---- devices


def operands(name):
    """The kernels that a call asks for, with all of their arguments."""
    asked = []
    real = table.ThreadPlans.find

    def find(self, key, arguments, provider=None):
        asked.append((key[0], arguments, provider))
        return real(self, key, arguments, provider)

    return asked, find


def moved(a):
    """The same array, on another device than the current one."""
    other = a.view()
    other.device_id = 1
    return other


def _variants(arguments):
    """The arguments with one array after the other moved; arrays may be in tuples."""
    for i, a in enumerate(arguments):
        if isinstance(a, np.ndarray):
            yield i, (*arguments[:i], moved(a), *arguments[i + 1 :])
        elif isinstance(a, tuple):
            for j, inner in enumerate(a):
                if isinstance(inner, np.ndarray):
                    changed = (*a[:j], moved(inner), *a[j + 1 :])
                    yield (i, j), (*arguments[:i], changed, *arguments[i + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_no_plan_takes_an_operand_of_another_device(name, device, monkeypatch):
    """Whichever operand it is, the call has another key, and no planner of own kernels takes it."""
    asked, find = operands(name)
    monkeypatch.setattr(table.ThreadPlans, "find", find)
    call = kernel_calls.calls(np.random.default_rng(0), 64)[name]
    with kernels.use("cuda", "cudnn"):
        call.run(*sent(device, call.arguments))
        assert asked or name == "weights laid out together"  # about which no planner decides
        for kernel, arguments, provider in asked:
            who = provider or table.provider_of(kernel, *arguments)
            if who not in ("cuda", "cudnn"):
                continue
            make_key = table.KEYS.get(kernel) or getattr(kernels.dispatch, f"_{kernel}_key")
            named = (provider,) if kernel == "pool_backward" else ()
            for where, changed in _variants(arguments):
                keys = [
                    make_key(provider, a) if kernel == "bn_backward" else make_key(*named, *a)
                    for a in (arguments, changed)
                ]
                assert keys[0] != keys[1], f"{kernel}: the key ignores the device of argument {where}"
                with pytest.raises(Unsupported):
                    table.providers.PROVIDERS[who][kernel](*changed)


def test_backward_names_the_trouble_where_forward_chose_the_provider(device):
    x, gamma = put(device, np.ones((2, 4, 3, 3), np.float32), np.ones(4, np.float32))
    with kernels.use("cuda"):
        _, mean, var, saved = kernels.bn_forward(x, gamma, gamma, 1e-5)
        with pytest.raises(ValueError, match=r"bn_backward: forward ran on the provider 'cuda'.*another device"):
            kernels.bn_backward(x, gamma, moved(mean), var, x, 1e-5, saved)


def test_room_of_another_type_is_not_written_as_bits(device):
    """A bfloat16 ``out`` has the strides of a float16 input."""
    x = put(device, np.full((2, 8, 3, 3), 3, np.float16))
    ones = put(device, np.ones(8, np.float32))
    out = backend.empty(x.shape, backend.as_dtype("bfloat16"), x)
    with kernels.use("cuda"):
        y = kernels.bn_inference(x, ones, ones, ones * 0, ones, 0.0, out=out)
    assert y is out and (np.asarray(out, np.float32) == 4).all()


def test_threads_have_counters_of_their_own(device):
    """Two threads may have one number for their streams: ``CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1``."""
    import threading

    x, seen = put(device, np.ones((2, 8, 3, 3), np.float32)), []

    def work():
        with kernels.use("cuda"):
            kernels.bn_statistics(x)
        seen.append(list(cuda_normalization._counters.made.values()))

    work()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    places = [a.ctypes.data for found in seen for a in found]
    assert all(seen) and len(set(places)) == len(places)
