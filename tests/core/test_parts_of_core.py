"""Single parts of the core, called by themselves: what they return, what they leave behind, and what they refuse."""

from __future__ import annotations

import contextlib
import os
import types
from pathlib import Path

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import Parameter, Variable
from dbrdist.core import backend, changes, flat, missing_names, optimizer, serializer, sums, thread_pools
from dbrdist.core.update_rule import UpdateRule
from dbrdist.optimizers import SGD
from dbrdist.optimizers.gradient_descent import MomentumSGDRule
from tests.each import each

# ---- threads of libraries -------------------------------------------------------------------------------------------


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


# ---- Chainer's names ------------------------------------------------------------------------------------------------


def test_chainers_names_are_read_by_module():
    names = missing_names.chainer_names.__wrapped__()
    assert {"chainer", "chainer.functions", "chainer.links", "chainer.training.extensions"} <= names.keys()
    assert {"relu", "softmax_cross_entropy"} <= names["chainer.functions"] and "Linear" in names["chainer.links"]
    assert "Linear" not in names["chainer.functions"] and "relu" not in names["chainer.links"]
    everything = {name for each in names.values() for name in each}
    assert all(name.isidentifier() for name in everything), [n for n in everything if not n.isidentifier()]


# ---- flat memory ----------------------------------------------------------------------------------------------------


def two_parameters():
    a, b = Parameter(np.array([[1.0, 2.0, 3.0]])), Parameter(np.array([4.0, 5.0]))
    a.grad, b.grad = np.array([[6.0, 7.0, 8.0]]), np.array([9.0, 10.0])
    flat.gather([a, b])
    return a, b


@each(what=["data", "gradients"])
def test_an_arena_moves_with_all_that_lies_in_it(what):
    a, b = two_parameters()
    arena = a.slot.arena
    run = flat.Run([a, b])
    before = (run.data if what == "data" else run.grad).copy()
    memory = np.full(len(arena.data), -1.0)
    watches = [changes.Watch([a]), changes.Watch([b])]
    getattr(arena, f"move_{what}")(memory)
    assert not any(watch.is_current() for watch in watches)  # plans that hold the old places are made anew
    np.testing.assert_array_equal(memory[: run.size], before)
    assert (arena.data if what == "data" else arena.grad) is memory
    for p, values, gradients in ((a, [[1, 2, 3]], [[6, 7, 8]]), (b, [4, 5], [9, 10])):
        assert p.array.tolist() == values and p.grad.tolist() == gradients
        assert np.shares_memory(p.array if what == "data" else p.grad, memory)
        assert not np.shares_memory(p.grad if what == "data" else p.array, memory)
    memory[:] = 0.5
    assert (a.array if what == "data" else a.grad).tolist() == [[0.5] * 3]


def test_a_gradient_that_is_not_in_flat_memory_stays_where_it_is():
    a, b = two_parameters()
    a.cleargrad()
    a.slot.arena.move_gradients(np.zeros(len(a.slot.arena.grad)))
    assert a.grad is None and b.grad.tolist() == [9, 10]


# ---- optimizers -----------------------------------------------------------------------------------------------------


def test_the_base_of_optimizers_calls_its_hooks_with_itself():
    made = dbrdist.Optimizer().setup(L.Linear(2, 3))
    seen = []
    made.add_hook(seen.append, "before")
    made.add_hook(lambda one: seen.append((one, "after")), "after", timing="post")
    made.call_hooks("pre")
    assert seen == [made]
    made.call_hooks("post")
    assert seen == [made, (made, "after")]


def test_the_base_of_optimizers_looks_at_each_gradient():
    link = L.Linear(2, 3)
    made = dbrdist.Optimizer().setup(link)
    made.loss_scaling()
    link.W.grad, link.b.grad = np.zeros((3, 2), np.float32), None
    made.check_nan_in_grads()
    assert made.is_safe_to_update()
    link.W.grad[2, 1] = np.inf
    with pytest.warns(RuntimeWarning, match="gradient of /W at loss scale 1.0: update 1 is left out"):
        made.check_nan_in_grads()
    assert not made.is_safe_to_update()


def test_a_proxy_reads_and_writes_the_value_of_its_name():
    class Mine(optimizer.GradientMethod):
        rule_class = UpdateRule
        rate = optimizer.HyperparameterProxy("lr")

    made = Mine(lr=0.25, other=3)
    assert made.rate == 0.25 and isinstance(Mine.rate, optimizer.HyperparameterProxy)
    made.rate = 0.5
    assert made.hyperparam.get_dict() == {"lr": 0.5, "other": 3}


def test_a_rule_with_one_formula_has_it_on_every_device():
    class Half(UpdateRule):
        def step(self, hp, t, p, g, *state):
            p -= 0.5 * g

    for name in ("update_core", "update_core_cpu", "update_core_gpu"):
        a, _ = two_parameters()
        rule = Half()
        rule._state = {}
        getattr(rule, name)(a)
        assert a.array.tolist() == [[-2, -1.5, -1]]


# ---- devices --------------------------------------------------------------------------------------------------------


class FakeArray:
    """What lies on a GPU, as far as it is asked."""

    def __init__(self):
        self.device = contextlib.nullcontext()


@pytest.fixture
def cupy(monkeypatch):
    """A module in the place of CuPy, with the third of several devices in use."""
    done = []
    device = lambda: types.SimpleNamespace(id=np.int32(2))  # noqa: E731
    stream = types.SimpleNamespace(ptr=np.int64(77), synchronize=lambda: done.append("waited"))
    runtime = types.SimpleNamespace(getDevice=lambda: 2, deviceGetPCIBusId=lambda n: f"bus {n}")
    module = types.ModuleType("cupy")
    module.ndarray, module.done = FakeArray, done
    module.cuda = types.SimpleNamespace(
        Device=device, get_current_stream=lambda: stream, runtime=runtime, is_available=lambda: True,
        alloc_pinned_memory=bytearray, nccl=types.SimpleNamespace(available=True),
    )  # fmt: skip
    monkeypatch.setitem(__import__("sys").modules, "cupy", module)
    monkeypatch.setitem(__import__("sys").modules, "cupy.cuda", module.cuda)
    return module


def test_arrays_of_two_modules_do_not_go_together(cupy):
    one, other = np.zeros(1), FakeArray()
    assert backend.is_arrays_compatible([one, None, one]) and backend.is_arrays_compatible([other, other])
    assert not backend.is_arrays_compatible([one, other]) and not backend.is_arrays_compatible([other, None, one])
    assert backend.get_array_module(one, other) is cupy and backend.get_array_module(one) is np
    assert backend.is_array(other) and not backend.is_array([1])
    assert backend.get_array_types() == (np.ndarray, FakeArray) and backend.get_cpu_array_types() == (np.ndarray,)
    assert backend.is_of_own_class(other) and not backend.is_of_own_class(np.ma.zeros(1))


def test_what_a_thread_uses_on_a_gpu(cupy):
    device = backend.current_device()
    assert (device.module, device.index, type(device.index)) == ("cupy", 2, int)
    assert backend.current_stream() == 77 and backend.bus_id_of_device() == "bus 2"
    memory = backend.pinned_bytes(5)
    assert memory.dtype == np.uint8 and memory.shape == (5,)
    backend.wait_for(np.zeros(1))
    assert cupy.done == []
    backend.wait_for(FakeArray())
    assert cupy.done == ["waited"]


def test_without_a_library_of_nccl_arrays_cannot_travel_by_it(cupy):
    assert backend.import_nccl() is cupy.cuda.nccl and backend.why_no_nccl() == ""
    cupy.cuda.nccl.available = False
    with pytest.raises(ImportError, match="no NCCL library"):
        backend.import_nccl()
    assert "no NCCL library" in backend.why_no_nccl()
    cupy.cuda.is_available = lambda: False
    assert "no GPU" in backend.why_no_nccl()


@each(kind=["link", "variable"])
def test_a_gpu_is_the_first_one_unless_a_number_is_given(kind):
    asked = []

    class Watched(dbrdist.Link if kind == "link" else Variable):
        def to_device(self, device):
            asked.append(device)
            return self

    x = Watched() if kind == "link" else Watched(np.zeros(1))
    for device in (None, 0, 3):
        x.to_gpu(device)
    x.to_gpu()
    x.to_cpu()
    assert asked == [("@cupy", 0), ("@cupy", 0), ("@cupy", 3), ("@cupy", 0), "@numpy"]


def test_the_memory_of_images_has_channels_last():
    x = np.arange(120.0).reshape(2, 3, 4, 5)
    memory = backend._memory_of(backend.channels_last(x))
    assert memory.shape == (2, 4, 5, 3) and memory.flags.c_contiguous
    np.testing.assert_array_equal(memory, x.transpose(0, 2, 3, 1))
    for other in (x[0], x[None]):
        assert backend._memory_of(other) is other


# ---- states and copies ----------------------------------------------------------------------------------------------


def test_a_state_is_cut_once():
    rule, p = MomentumSGDRule(), Parameter(np.arange(6.0).reshape(2, 3))
    rule.ensure_state(p)
    rule.state["v"][...] = [[10, 11, 12], [13, 14, 15]]
    rule.ensure_state(p, (1, 4))
    assert rule.state["v"].tolist() == [11, 12, 13]
    rule.ensure_state(p, (1, 4))
    for other in ((0, 4), (1, 3), None):
        with pytest.raises(RuntimeError, match=r"has the state of the elements \(1, 4\) of its parameter"):
            rule.ensure_state(p, other)
    fresh = MomentumSGDRule()
    fresh.ensure_state(p, (4, 6))
    assert fresh.state["v"].tolist() == [0, 0]


@each(lay=[
    lambda a: a, lambda a: a.T, lambda a: a.transpose(1, 0, 2), lambda a: a.transpose(2, 0, 1), lambda a: a[:, ::2],
    lambda a: a[::-1].T, lambda a: a[..., :0], lambda a: a[0, 0, 0, ...],
])  # fmt: skip
def test_copies_lie_as_what_is_copied(lay):
    a = lay(np.arange(24.0).reshape(2, 3, 4))
    b = backend.copy_as_it_lies(a)
    np.testing.assert_array_equal(b, a)
    order, again = (np.argsort([-abs(s) for s in x.strides], kind="stable").tolist() for x in (a, b))
    assert order == again and not np.shares_memory(a, b)
    assert b.transpose(order).flags.c_contiguous


@each(shape=[(3, 4), (2, 3, 4)], at=[np.s_[:1], np.s_[:, :1]])
def test_copies_of_what_is_repeated_have_whole_memory(shape, at):
    a = np.broadcast_to(np.arange(float(np.prod(shape))).reshape(shape)[at], shape)
    b = backend.copy_as_it_lies(a)
    np.testing.assert_array_equal(b, a)
    assert b.flags.c_contiguous and b.flags.writeable


@each(count=[1 << 14, (1 << 14) + 1, 1 << 16], dtype=["f4", "f8", "u1"])
def test_large_memory_begins_on_a_cache_line(count, dtype):
    made = [backend.aligned(count + i, np.dtype(dtype)) for i in range(8)]
    assert [a.size for a in made] == [count + i for i in range(8)]
    assert all(a.ctypes.data % 64 == 0 for a in made if a.nbytes >= 1 << 16)


def test_hooks_that_were_taken_away_are_not_called():
    called = []
    for timing in ("pre", "post"):
        link = dbrdist.Link(w=(2,))
        one = SGD(lr=0.0).setup(link)
        link.w.array, link.w.grad = np.zeros(2, "f"), np.zeros(2, "f")
        for owner in (one, link.w.update_rule):
            owner.add_hook(lambda *given, timing=timing: called.append(timing), "hook", timing)
            owner.remove_hook("hook")
            owner.add_hook(lambda *given: None, "hook", timing)  # the name is free again
            owner.remove_hook("hook")
            with pytest.raises(KeyError, match="no hook named 'hook'"):
                owner.remove_hook("hook")
        one.update()
    assert called == []


def test_numbers_are_loaded_as_the_type_that_they_replace():
    for value, saved, loaded in (
        (True, 1, True), (False, True, True), (1, 2.5, 2.5), (1, 2, 2), (1.0, 2, 2.0),
        (np.float32(1), 2.5, np.float32(2.5)),
    ):  # fmt: skip
        found = serializer._as_loaded("k", value, np.array(saved))
        assert found == loaded and type(found) is type(loaded)


@each(dtype=["?", "i1", "u1", "i4", "e", "f", "d", "bfloat16"], axis=[None, (0,)], keepdims=[False, True])
def test_sums_are_as_wide_as_they_have_to_be(dtype, axis, keepdims):
    """Of integers as NumPy's, which do not overflow; of floating types in their own, rounded once."""
    x = np.ones((300, 2)).astype(backend.as_dtype(dtype))
    y = sums.sum_over(x, axis, keepdims)
    expected = x.astype("d" if x.dtype.kind in "fV" else x.dtype).sum(axis, keepdims=keepdims)
    assert y.shape == expected.shape and y.dtype == (x.dtype if x.dtype.kind in "fV" else expected.dtype)
    np.testing.assert_array_equal(np.asarray(y, "d"), np.asarray(expected.astype(y.dtype), "d"))


def test_shards_have_the_gaps_and_layers_that_lie_in_them():
    link = dbrdist.Link(a=(5,), b=(2, 9), c=(16,), d=())
    for p in link.params():
        p.array, p.grad = np.ones(p.shape, "f"), np.ones(p.shape, "f")
    one = SGD(lr=0.0).setup(link)
    one.update()
    (run,) = one.runs()
    free = np.ones(run.size, bool)
    for _, where in run.layers():
        free[where] = False
    assert free.any() and run.gaps.tolist() == np.flatnonzero(free).tolist()
    for begin, end in ((0, run.size), (3, 20), (5, 16), (6, 6), (16, 40), (17, run.size)):
        shard = flat.Shard(run, begin, end, list)
        assert shard.size == end - begin and np.shares_memory(shard.data, run.data) == (end > begin)
        assert shard.gaps.tolist() == np.flatnonzero(free[begin:end]).tolist()
        taken = np.zeros(end - begin, bool)
        for (p, where), (q, whole) in zip(shard.layers(), run.layers(), strict=True):
            assert p is q and where.stop - where.start == max(min(whole.stop, end) - max(whole.start, begin), 0)
            taken[where] = True
        assert (taken == ~free[begin:end]).all()
