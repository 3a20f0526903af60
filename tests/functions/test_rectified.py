"""Normalizations that expect a ReLU: whatever happens meanwhile, every value is that of the call.

The oracle is the definition in plain NumPy, of values that were copied before the call.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, using_config
from dbrdist.core.array import backend
from dbrdist.core.array.ownership import is_private
from dbrdist.core.tape import function_node, fusion, ops
from dbrdist.functions import rectified
from dbrdist.functions.rectifier import ReLU
from dbrdist.optimizers import SGD
from tests.each import each

SHAPE = (4, 16, 8, 8)  # large enough to wait
AXIS, COUNT, EPS = (0, 2, 3), 256, 2e-5


def draw(seed, shape=SHAPE):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def per_channel(v):
    return np.asarray(v, np.float64).reshape(-1, 1, 1)


def normalized(x, gamma, beta, mean=None, var=None):
    """The definition, in float64, with the batch's own statistics where none are given."""
    x = x.astype(np.float64)
    mean = x.mean(AXIS) if mean is None else mean
    var = x.var(AXIS) if var is None else var
    return (x - per_channel(mean)) / np.sqrt(per_channel(var) + EPS) * per_channel(gamma) + per_channel(beta)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


def make_link(seed=0, expects=True):
    """A normalization of 16 channels; where asked, one whose last output went straight into a ReLU."""
    link = L.BatchNormalization(16)
    link.gamma.array[...] = draw(seed, 16)
    link.beta.array[...] = draw(seed + 1, 16)
    h = link(made(9))
    F.relu(h if expects else h * 1.0)
    link.avg_mean[...], link.avg_var[...] = 0, 1
    assert rectified.expects_relu(link.gamma, not expects) == expects
    return link


def made(seed):
    """A result of a function that nobody else can reach."""
    return Variable(draw(seed)) * 1.0


def is_waiting():
    """True if an output is not written yet."""
    return any(p.write is not None for p in fusion.waiting.values())


@pytest.fixture
def nothing_left():
    fusion.settle()
    yield
    fusion.settle()


# ---- ways to disturb, between the call and the reading
class Keeps(dbrdist.FunctionNode):
    """y = 2 x; keeps its raw input and output"""

    def forward(self, xs):
        self.seen = xs[0]
        self.made = 2 * xs[0]
        return (self.made,)


class InPlace(dbrdist.FunctionNode):
    """A function that breaks the rules and changes its input"""

    def forward(self, xs):
        xs[0][...] = 7
        return (np.zeros(1, np.float32),)


class Recorder(dbrdist.FunctionHook):
    name = "Recorder"

    def __init__(self):
        self.seen = []

    def forward_preprocess(self, function, in_data):
        self.seen.append((function.label, *[a.copy() for a in in_data]))


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def overwrite(a):
    a[...] = 7


def in_training(link):
    with using_config("train", True):
        link(made(5) + 3.0).array.sum()


def in_evaluation(link):
    with using_config("train", False):
        link(made(5) + 3.0).array.sum()


def update(link):
    optimizer = SGD(lr=1.0).setup(link)
    for p in link.params():
        p.grad = np.ones_like(p.array)
    optimizer.update()


def assign(link):
    link.gamma.array = np.full(16, 7, np.float32)


def fork(link, x):
    child = os.fork()
    if not child:
        os._exit(is_waiting())  # what a library computes that did not survive the fork
    assert os.waitpid(child, 0)[1] == 0


WAYS = {
    "nothing": lambda link, x: None,
    "overwrite the input": lambda link, x: overwrite(x.array),
    "overwrite the input in a thread": lambda link, x: in_a_thread(lambda: overwrite(x.array)),
    "overwrite a view of the input": lambda link, x: overwrite(x[:, ::2].array),
    "overwrite what backward keeps": lambda link, x: overwrite(x.creator.get_retained_inputs()[0].array),
    "a function that overwrites": lambda link, x: InPlace().apply((x,)),
    "a function that overwrites in a thread": lambda link, x: in_a_thread(lambda: InPlace().apply((x,))),
    "another array": lambda link, x: setattr(x, "array", draw(7)),
    "gamma in place": lambda link, x: overwrite(link.gamma.array),
    "beta in place": lambda link, x: overwrite(link.beta.array),
    "assign gamma": lambda link, x: assign(link),
    "update": lambda link, x: update(link),
    "another batch": lambda link, x: in_training(link),
    "evaluation": lambda link, x: in_evaluation(link),
    "statistics in place": lambda link, x: (overwrite(link.avg_mean), overwrite(link.avg_var)),
    "backward of something else": lambda link, x: ops.sum(Variable(draw(6)) * 2.0).backward(),
    "backward through the input": lambda link, x: ops.sum(x).backward(),
    "relu of the input": lambda link, x: F.relu(x),
    "drop the link": lambda link, x: link.__dict__.clear(),
    "unchain": lambda link, x: x.unchain_backward(),
    "fork": fork,
    "collect": lambda link, x: gc.collect(1),
}
READS = {
    "h": lambda h: (h.array, None),
    "relu": lambda h: (None, F.relu(h).array),
    "h, relu": lambda h: (h.array, F.relu(h).array),
    "relu, h": lambda h: (y := F.relu(h)) is not None and (h.array, y.array),
    "two relus": lambda h: two_relus(h),
    "another function": lambda h: ((h * 1.0).array, None),
    "in a thread": lambda h: in_a_thread(lambda: (h.array, F.relu(h).array)),
    "function in a thread": lambda h: in_a_thread(lambda: ((h * 1.0).array, None)),
    "with a hook": lambda h: with_a_hook(h),
    "in debug mode": lambda h: in_debug_mode(h),
    "copy": lambda h: (copy.deepcopy(h).array, pickle.loads(pickle.dumps(F.relu(h))).array),
    "slice": lambda h: (np.concatenate([h[:2].array, h[2:].array]), None),
}


def two_relus(h):
    y, z = F.relu(h), F.relu(h)
    y.array[...] = 5  # each has memory of its own
    return h.array, z.array


def with_a_hook(h):
    with Recorder() as hook:
        y = F.relu(h)
    assert [s[0] for s in hook.seen] == ["ReLU"]
    return hook.seen[0][1], y.array


def in_debug_mode(h):
    with using_config("debug", True):
        return None, F.relu(h).array


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_of_the_call(way, mode):
    for read in READS:
        check_values(way, read, mode)


def check_values(way, read, mode):
    link, x = make_link(), made(3)
    kept = {name: getattr(link, name).copy() for name in ("avg_mean", "avg_var")}
    before = [x.array.copy(), link.gamma.array.copy(), link.beta.array.copy()]
    h_expected = normalized(*before, *(() if mode == "training" else kept.values()))
    with using_config("train", mode == "training"):
        h = link(x)
    assert is_waiting(), "the case would show nothing"
    if mode == "training":
        mean, var = before[0].astype("d").mean(AXIS), before[0].astype("d").var(AXIS)
        kept = {"avg_mean": 0.1 * mean, "avg_var": 0.9 + 0.1 * var * COUNT / (COUNT - 1)}
    for name, value in kept.items():  # moved at the call
        np.testing.assert_allclose(getattr(link, name), value, atol=1e-6)
    WAYS[way](link, x)
    seen_h, seen_y = READS[read](h)
    for seen, expected in ((seen_h, h_expected), (seen_y, np.maximum(h_expected, 0))):
        if seen is not None:
            np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-4, err_msg=f"read by {read}")


def gradients(x, gamma, beta, gy):
    """Of the sum of gy * max(h, 0) by the formula, in float64."""
    x, m = x.astype("d"), COUNT
    s = per_channel(1 / np.sqrt(x.var(AXIS) + EPS))
    x_hat = (x - per_channel(x.mean(AXIS))) * s
    g = gy * (x_hat * per_channel(gamma) + per_channel(beta) > 0)
    gbeta, ggamma = g.sum(AXIS), (g * x_hat).sum(AXIS)
    return per_channel(gamma) * s * (g - (per_channel(gbeta) + x_hat * per_channel(ggamma)) / m), ggamma, gbeta


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("expects", [True, False])
@pytest.mark.parametrize("read", ["never", "before", "after"])
def test_gradients_do_not_depend_on_who_reads(read, expects):
    link, leaf = make_link(expects=expects), Variable(draw(3))
    h = link(leaf * 1.0)
    seen = [h.array.copy()] if read == "before" else []
    y = F.relu(h)
    seen += [h.array.copy()] if read == "after" else []
    assert y.creator.masks_later == (expects and read != "before")
    assert rectified.expects_relu(link.gamma, False) == (read != "before")
    y.grad = gy = draw(4)
    y.backward()
    expected = gradients(leaf.array, link.gamma.array, link.beta.array, gy)
    for actual, wanted in zip((leaf.grad, link.gamma.grad, link.beta.grad), expected):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    for a in seen:
        close(a, normalized(leaf.array, link.gamma.array, link.beta.array))


@pytest.mark.usefixtures("nothing_left")
@each(had_gradient=[False, True])
def test_an_output_that_became_a_leaf_has_the_masked_gradient(had_gradient):
    link, leaf = make_link(), Variable(draw(3))
    h = link(leaf * 1.0)
    y = F.relu(h)
    assert y.creator.masks_later
    h.unchain()
    before = draw(5) if had_gradient else None
    h.grad = None if before is None else before.copy()
    y.grad = gy = draw(4)
    y.backward()
    wanted = gy * (normalized(leaf.array, link.gamma.array, link.beta.array) > 0)
    np.testing.assert_array_equal(h.grad, wanted if before is None else before + wanted.astype("f"))
    assert leaf.grad is None


@pytest.mark.usefixtures("nothing_left")
def test_gradients_of_the_output_and_of_its_relu_add_up():
    link, leaf = make_link(), Variable(draw(3))
    h = link(leaf * 1.0)
    y = F.relu(h) * 2.0 + h * 3.0
    y.grad = gy = draw(4)
    gh, gx = dbrdist.grad([y], [h, leaf], [Variable(gy)])
    close(gh.array, gy * (2.0 * (h.array > 0) + 3.0))
    y.backward(retain_grad=True)
    np.testing.assert_array_equal(leaf.grad, gx.array)
    close(h.grad, gh.array)


# ---- who else can reach the input: nothing waits then
def with_handle(x, handle):
    return x, [handle]


def of_user_function():
    node = Keeps()
    return node.apply((Variable(draw(3)),))[0], [node.made]


def seen_by_user_function():
    x, node = made(3), Keeps()
    node.apply((x,))
    return x, [node.seen]


def from_foreign_memory():
    memory = bytearray(draw(3).tobytes())
    array = np.frombuffer(memory, np.float32).reshape(SHAPE)
    return Variable(array), [np.frombuffer(memory, np.float32)]


def by_weak_reference():
    x = made(3)
    reference = weakref.ref(x.array)
    return x, [reference]


def retained():
    x = F.exp(made(3))
    return x, [x.creator.output_data[0]]


def leaf_view():
    buffer = draw(3, (6, *SHAPE[1:]))
    return Variable(buffer[1:5]), [buffer]


def leaf():
    buffer = draw(3)
    return Variable(buffer), [buffer]


SOURCES = {
    "leaf": leaf,
    "view of a buffer": leaf_view,
    "raw reference": lambda: with_handle(x := made(3), x.array),
    "view": lambda: with_handle(x := made(3), x.array[1]),
    "view of a view": lambda: with_handle(x := made(3), x.array.T[2:3][..., 1]),
    "memoryview": lambda: with_handle(x := made(3), np.asarray(memoryview(x.array))),
    "output is a transposed view": lambda: with_handle((h := made(3)).transpose(0, 1, 2, 3), h.array),
    "output is a slice": lambda: with_handle((h := ops.concat((made(3), made(4)), 0))[2:6], h.array),
    "dropout outside of training": lambda: with_handle(identity(h := made(3)), h.array),
    "two Variables": lambda: with_handle(Variable((h := made(3)).array), h.array),
    "a user's function": of_user_function,
    "seen by a user's function": seen_by_user_function,
    "foreign memory": from_foreign_memory,
    "weak reference": by_weak_reference,
    "a retained output": retained,
}


def identity(x):
    with using_config("train", False):
        return F.dropout(x)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("source", SOURCES)
def test_an_input_that_others_can_reach_does_not_wait(source):
    link = make_link()
    x, handles = SOURCES[source]()
    fusion.settle()
    expected = normalized(x._array.copy(), link.gamma.array, link.beta.array)
    h = link(x)
    assert not is_waiting()
    for handle in handles:
        array = handle() if isinstance(handle, weakref.ref) else handle
        array[...] = 7
    close(h._array.copy(), expected)  # as it is in memory, with no reader that could settle
    close(F.relu(h).array, np.maximum(expected, 0))


@pytest.mark.usefixtures("nothing_left")
def test_reshaped_views_are_not_private():
    x = Variable(draw(0, 4096)) * 1.0
    assert is_private(x)
    y = x.reshape(64, 64)
    assert not is_private(y)
    assert not is_private(x)
    del x
    assert is_private(y)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "make",
    [
        lambda: L.Convolution2D(3, 16, 3, pad=1)(draw(0, (4, 3, 8, 8))),
        lambda: L.Convolution2D(3, 16, 3, pad=1, nobias=True)(draw(0, (4, 3, 8, 8))),
        lambda: made(1) + made(2),
        lambda: ops.concat((made(1)[:, :8], made(2)[:, 8:]), 1),
        lambda: F.average_pooling_2d(made(1), 1),
    ],
)
def test_outputs_of_functions_wait(make):
    """The count of references holds, compiled and interpreted."""
    link = make_link()
    h = link(make())
    assert is_waiting()
    y = F.relu(h)
    assert y.creator.masks_later
    for mode in (dbrdist.no_backprop_mode(), using_config("train", False)):
        with mode:
            h = link(make())
            assert is_waiting()
            assert np.shares_memory(next(iter(fusion.waiting.values())).rectified, F.relu(h).array)


@pytest.mark.usefixtures("nothing_left")
def test_matrices_wait_too():
    link, x = L.BatchNormalization(64), draw(0, (128, 32))
    linear = L.Linear(32, 64)
    F.relu(link(linear(x)))
    h = link(linear(x))
    assert is_waiting()
    y, a = F.relu(h), linear(x).array.astype("d")
    close(y.array, np.maximum((a - a.mean(0)) / np.sqrt(a.var(0) + EPS), 0))


# ---- the findings that led to this design
@pytest.mark.usefixtures("nothing_left")
def test_refilled_input_buffer():
    link, buffer, expected_mean = L.BatchNormalization(64), draw(0, (128, 64)), draw(0, (128, 64)).mean(0)
    y = link(buffer)
    buffer[...] = 5.7
    a = draw(0, (128, 64)).astype("d")
    close(y.array, (a - a.mean(0)) / np.sqrt(a.var(0) + EPS))
    np.testing.assert_allclose(link.avg_mean, 0.1 * expected_mean, atol=1e-6)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("reads", [(0, 1), (1, 0), (1,), ()])
@pytest.mark.parametrize("finetune", [False, True])
def test_statistics_move_in_the_order_of_calls(reads, finetune):
    link, xs = make_link(), [made(1) + 2.0, made(2) - 5.0]
    ys = [link(x, finetune=finetune) for x in xs]
    for i in reads:
        ys[i].array.sum()
    del ys
    a, b = (x.array.astype("d").mean(AXIS) for x in xs)
    np.testing.assert_allclose(link.avg_mean, (a + b) / 2 if finetune else 0.09 * a + 0.1 * b, atol=1e-5)


@pytest.mark.usefixtures("nothing_left")
def test_copies_of_a_link_have_the_statistics_of_the_calls_before():
    link, x = make_link(), made(1) + 2.0
    h = link(x)
    for other in (copy.deepcopy(link), pickle.loads(pickle.dumps(link)), link.copy()):
        np.testing.assert_allclose(other.avg_mean, 0.1 * x.array.mean(AXIS), atol=1e-6)
    del h


@pytest.mark.usefixtures("nothing_left")
def test_backward_of_an_evaluation_uses_the_statistics_of_its_call():
    link, x = make_link(expects=False), Variable(draw(1))
    with using_config("train", False):
        y = link(x)
    in_training(link)
    y.grad = np.ones(SHAPE, np.float32)
    y.backward()
    close(x.grad, np.broadcast_to(per_channel(link.gamma.array / np.sqrt(1 + EPS)), SHAPE))


@pytest.mark.usefixtures("nothing_left")
def test_another_thread_that_dies_leaves_its_output_to_the_reader():
    link, x = make_link(), made(3)
    expected = normalized(x.array.copy(), link.gamma.array.copy(), link.beta.array)
    h = in_a_thread(lambda: link(x))
    assert is_waiting()
    link.gamma.array[...] = 7
    close(h.array, expected)


@pytest.mark.usefixtures("nothing_left")
def test_sums_of_views_are_computed_at_once():
    buffer = draw(0, (4, 6, 32, 32))
    x = Variable(buffer)
    expected = buffer[:, :3] + buffer[:, 3:]
    s = x[:, :3] + x[:, 3:]
    buffer[...] = 0
    np.testing.assert_array_equal(s.array, expected)


@pytest.mark.usefixtures("nothing_left")
def test_hooks_and_debug_mode_see_every_pass_where_it_runs():
    link = make_link()
    h, n = made(3), function_node.get_function_hooks()
    with Recorder() as hook:
        assert n
        y = link(h)
        assert not fusion.waiting
        F.relu(y)
    assert [s[0] for s in hook.seen] == ["BatchNormalization", "ReLU"]
    close(hook.seen[1][1], normalized(h.array, link.gamma.array, link.beta.array))
    with using_config("debug", True):
        link(made(3))
        assert not fusion.waiting


@pytest.mark.usefixtures("nothing_left")
def test_shape_type_and_size_run_no_pass():
    h = make_link()(made(3))
    assert (h.shape, h.dtype, h.ndim, h.size, len(h), h.rank) == (SHAPE, np.float32, 4, 4096, 4, 2)
    assert h.xp is np
    assert h.device == dbrdist.get_device("@numpy")
    assert h.label == "(4, 16, 8, 8), float32"
    assert is_waiting()


# ---- what is kept, and for how long
@pytest.mark.usefixtures("nothing_left")
def test_at_most_one_output_waits_however_many_live():
    link, kept = make_link(), []
    for i in range(50):
        kept.append(link(made(i)))
        assert len(fusion.waiting) <= 1
    close(kept[7].array, normalized(draw(7), link.gamma.array, link.beta.array))


@pytest.mark.usefixtures("nothing_left")
def test_a_dead_output_is_forgotten_with_its_input():
    link = make_link()
    gc.disable()
    try:
        x = made(3)
        h = link(x)
        gone, dead = weakref.ref(x._array), weakref.ref(h.creator)
        del h
        assert not fusion.waiting
        del x
        assert gone() is None
        assert dead() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("nothing_left")
def test_inference_keeps_no_input():
    link = make_link()
    with dbrdist.no_backprop_mode(), using_config("train", False):
        h = link(made(3))
        x = next(iter(fusion.waiting.values())).write.args[0]
        assert h.size == x.size
        y = F.relu(h)
        gone = weakref.ref(x)
        del h, x
        assert gone() is None
        assert not fusion.waiting
        assert y.array.min() == 0


@pytest.mark.usefixtures("nothing_left")
def test_an_unused_expectation_is_given_up():
    link = make_link()
    link(made(1)) * 1.0
    assert not rectified.expects_relu(link.gamma, True)
    link(made(1))
    assert not is_waiting()
    F.relu(link(made(1)))
    assert rectified.expects_relu(link.gamma, False)


@pytest.mark.usefixtures("nothing_left")
def test_a_parameter_met_for_the_first_time_expects_a_relu_and_another_variable_does_not():
    link = L.BatchNormalization(16)
    h = link(made(1))
    assert is_waiting()
    close(h.array, normalized(draw(1), np.ones(16), np.zeros(16)))
    F.batch_normalization(made(1), Variable(np.ones(16, np.float32)), np.zeros(16, np.float32))
    assert not is_waiting()


@pytest.mark.usefixtures("nothing_left")
def test_links_die_though_they_were_expected_to_meet_a_relu():
    gamma = weakref.ref(make_link().gamma)
    gc.collect()
    assert gamma() is None


@pytest.mark.usefixtures("nothing_left")
def test_a_pass_that_fails_is_tried_again_by_the_next_reader(monkeypatch):
    from dbrdist.core.tape.fusion import Pending

    link, x = make_link(), made(3)
    expected = normalized(x.array, link.gamma.array, link.beta.array)
    h = link(x)
    finish = Pending.finish

    def fail(self):
        raise MemoryError("broken on purpose")

    monkeypatch.setattr(Pending, "finish", fail)
    with pytest.raises(MemoryError, match="on purpose"):
        h.array  # noqa: B018
    monkeypatch.setattr(Pending, "finish", finish)
    close(h.array, expected)


@pytest.mark.usefixtures("nothing_left")
def test_forward_of_a_node_alone_gives_finished_arrays():
    from dbrdist.functions.normalization import BatchNormalization

    link, x = make_link(), draw(3)
    (y,) = BatchNormalization(EPS, AXIS).forward((x, link.gamma.array, link.beta.array))
    close(y, normalized(x, link.gamma.array, link.beta.array))


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_threads_that_read_each_other():
    """Readers in other threads wait for an output that is being written, and never see it half."""
    links, num_rounds = [make_link(i) for i in range(4)], 40
    boxes, errors = [None] * 4, []

    def work(rank):
        link = links[rank]
        gamma, beta = link.gamma.array.copy(), link.beta.array.copy()
        for i in range(num_rounds):
            h = link(made(100 * rank + i))
            boxes[rank] = h
            other = boxes[(rank + 1) % 4]
            seen = None if other is None else other.array.sum()
            y = F.relu(h)
            expected = normalized(draw(100 * rank + i), gamma, beta)
            if not np.allclose(y.array, np.maximum(expected, 0), atol=1e-4) or not np.allclose(
                h.array, expected, atol=1e-4
            ):
                errors.append((rank, i))
            if other is not None and seen != other.array.sum():
                errors.append((rank, i, "changed"))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors
    assert not any(t.is_alive() for t in threads)


@pytest.mark.usefixtures("nothing_left")
def test_the_output_of_a_relu_is_not_kept_where_the_normalization_keeps_its_mask():
    link, leaf = make_link(), Variable(draw(3))
    y = F.relu(link(leaf * 1.0))
    expected, array = y.array.copy(), weakref.ref(y.array)
    node = y.creator
    total = F.sum(y)
    del y
    assert (array() is None) == (node._for_rule is not None)
    assert (node._positive() != 0).tobytes() == (expected != 0).tobytes()
    total.backward()
    close(leaf.grad, gradients(draw(3), link.gamma.array, link.beta.array, 1.0)[0])


@pytest.mark.usefixtures("nothing_left")
def test_unwritten_memory_is_apart_from_the_heap_and_can_be_written():
    like = np.zeros(1, np.float32)
    for shape in ((3, 5, 7, 1 << 12), (1 << 19,), (3, 4)):
        a = backend.unwritten(shape, np.float32, like)
        a[...] = 2
        assert (a.shape, a.dtype, a.sum()) == (shape, np.float32, 2 * a.size)
        assert a.ndim < 4 or backend.is_channels_last(a)
        zeros = backend.aligned_zeros(a.size, np.float32, like)
        assert not zeros.any() and backend.address(zeros) % 64 == 0 and zeros.flags.writeable


class Waiting:
    """A normalization that waits for a ReLU."""

    taker, is_offer, recipe = ReLU, False, None
    left = rectified.PendingNormalization.left

    def __init__(self, x):
        self.x, self.gamma, self.rectified, self.mask = x, Variable(x), "its ReLU", "its mask"
        self.taken, self.is_finished = False, False

    def output(self):
        return self.x

    def finish(self):
        self.is_finished = True


def test_only_the_relu_of_what_waits_is_there_already(monkeypatch):
    me, x, other = threading.get_ident(), np.zeros(1), np.zeros(1)
    for at, asked, found in ((me, x, ("its ReLU", "its mask")), (me, other, (None, None)), (me + 1, x, (None, None))):
        pending = Waiting(x)
        monkeypatch.setattr(fusion, "waiting", {at: pending})
        assert rectified.take(asked) == found
        is_taken = found[0] is not None
        assert pending.taken == is_taken and pending.is_finished == (not is_taken)
        assert bool(fusion.waiting) == is_taken
        assert rectified.expects_relu(pending.gamma, None) is is_taken
    pending = Waiting(x)
    monkeypatch.setattr(fusion, "waiting", {me: pending})
    rectified.take(x)
    assert rectified.take(x) == (None, "its mask") and pending.is_finished  # a second one is computed


def test_what_waits_is_written_before_gradients_are_computed(monkeypatch):
    x, pending = Variable(np.ones(2, "f")), Waiting(np.zeros(1))
    y = F.sum(x * x)
    monkeypatch.setattr(fusion, "waiting", {threading.get_ident(): pending})
    y.backward()
    assert pending.is_finished and not pending.taken and not fusion.waiting
    assert x.grad.tolist() == [2, 2]
