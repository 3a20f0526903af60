"""What a convolution keeps of its weights at inference, and that it never outlives them."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import kernels, optimizers, serializers
from dbrdist.core.array import ownership
from dbrdist.core.model import parameter
from dbrdist.core.tape.function_node import FunctionHook
from dbrdist.kernels import ConvGeometry
from dbrdist.kernels.reference import numpy_
from tests.functions import references as R

X = np.random.default_rng(0).standard_normal((2, 16, 9, 9), np.float32)
NEW = np.random.default_rng(2).standard_normal((24, 16, 3, 3), np.float32)
has_onednn = kernels.provider_of("conv_forward", X, NEW, None, ConvGeometry(1, 1, 1, 1)) == "onednn"


def make_link():
    conv = L.Convolution2D(16, 24, 3, pad=1, nobias=True)
    conv.W.array[...] = np.random.default_rng(1).standard_normal(conv.W.shape)
    return conv


def infer(conv, x=X):
    with dbrdist.no_backprop_mode():
        return conv(x).array


def check(conv, W):
    """The link computes with W, by NumPy in float64, at the first call and at those after it."""
    y = numpy_.conv_forward(X.astype("d"), W.astype("d"), None, ConvGeometry(1, 1, 1, 1))
    for _ in range(3):
        np.testing.assert_allclose(infer(conv), y, rtol=1e-4, atol=1e-4)


def is_kept(conv):
    return conv.W._kept is not None and conv.W._kept.made[0] is not None


@pytest.mark.skipif(not has_onednn, reason="NumPy uses weights as they lie")
def test_weights_are_packed_once():
    conv = make_link()
    infer(conv)
    made = conv.W._kept.made
    infer(conv)
    assert conv.W._kept.made is made
    assert made[1].nbytes <= 4 * 64 * 16 * 9, "no more than the weights, padded to a block of channels"
    check(conv, conv.W.array.copy())


def write_array(conv):
    conv.W.array[...] = NEW


def write_data(conv):
    conv.W.data[:] = NEW


def assign(conv):
    conv.W.array = NEW.copy()


def copy_data(conv):
    conv.W.copydata(dbrdist.Parameter(NEW))


def write_item(conv):
    np.copyto(conv.namedparams().__next__()[1].array.reshape(-1), NEW.reshape(-1))


def load(conv, tmp_path):
    other = make_link()
    other.W.array[...] = NEW
    serializers.save_npz(tmp_path / "link.npz", other)
    serializers.load_npz(tmp_path / "link.npz", conv)


def set_state(conv):
    other = make_link()
    other.W.array[...] = NEW
    conv.copyparams(other)


WRITERS = [write_array, write_data, assign, copy_data, write_item, set_state]


@pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
def test_new_values_are_seen(write):
    conv = make_link()
    infer(conv)
    write(conv)
    check(conv, NEW)


def test_loaded_values_are_seen(tmp_path):
    conv = make_link()
    infer(conv)
    load(conv, tmp_path)
    check(conv, NEW)


def test_writing_through_an_array_that_was_taken_before():
    conv = make_link()
    whole, part = conv.W.array, conv.W.array[0]
    for held in (whole, part):
        infer(conv)
        held[...] = NEW[0] if held is part else NEW
        check(conv, NEW)
    del whole
    infer(conv)
    part[...] = 0
    check(conv, np.concatenate((np.zeros_like(NEW[:1]), NEW[1:])))


def test_an_array_of_the_user_is_never_kept():
    W = NEW.copy()
    conv = L.Convolution2D(16, 24, 3, pad=1, nobias=True, initialW=W)
    conv.W.array = W
    infer(conv)
    assert W.flags.writeable
    W[...] *= 2
    check(conv, 2 * NEW)


def test_views_by_functions_do_not_write_unnoticed():
    conv = make_link()
    infer(conv)
    old = conv.W.__getstate__()["array"].copy()
    with dbrdist.no_backprop_mode():
        infer(conv)
        flat = F.reshape(conv.W, (24, -1))
    try:
        flat.array[...] = 0
    except ValueError:
        check(conv, old)
    else:
        check(conv, np.zeros_like(old))


def test_training_lets_go_and_sees_updates():
    conv = make_link()
    infer(conv)
    optimizer = optimizers.SGD(0.5).setup(conv)
    assert conv.W._kept is None
    for _ in range(2):
        conv.cleargrads()
        F.sum(conv(X)).backward()
        optimizer.update()
        check(conv, conv.W.array.copy())


def test_gradients_after_inference_go_on():
    conv = make_link()
    infer(conv)
    y = conv(X)
    assert conv.W._kept is None and conv.W.array.flags.writeable
    F.sum(y).backward()
    gW = numpy_.conv_backward_weight(
        X.astype("d"), np.ones(y.shape), NEW.shape, ConvGeometry(1, 1, 1, 1), np.dtype("d")
    )
    np.testing.assert_allclose(conv.W.grad, gW, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), lambda c: c.copy()])
def test_copies_have_their_own_values(copied):
    conv = make_link()
    infer(conv)
    old = conv.W.__getstate__()["array"].copy()
    other = copied(conv)
    is_shared = other.W.array is conv.W.array
    infer(other)
    infer(conv)
    other.W.array[...] = NEW
    check(other, NEW)
    check(conv, NEW if is_shared else old)


def test_a_hook_may_write_to_what_it_is_given():
    class Zero(FunctionHook):
        def forward_preprocess(self, function, in_data):
            in_data[1][...] = 0

    conv = make_link()
    infer(conv)
    with Zero():
        assert not infer(conv).any()
    assert not infer(conv).any()


def test_a_view_that_another_thread_takes_just_now(monkeypatch):
    views = []

    def is_private(p):
        was_private = ownership.is_private(p)
        if not views:
            views.append(p._array[:])  # between the question and its answer
        return was_private

    monkeypatch.setattr(parameter, "is_private", is_private)
    conv = make_link()
    infer(conv)
    views[0][...] = NEW
    check(conv, NEW)


def test_other_shapes_and_types_and_threads_between():
    conv = make_link()
    W = conv.W.array.copy()
    check(conv, W)
    wide = np.random.default_rng(3).standard_normal((1, 16, 40, 7), np.float32)
    y = numpy_.conv_forward(wide.astype("d"), W.astype("d"), None, ConvGeometry(1, 1, 1, 1))
    np.testing.assert_allclose(infer(conv, wide), y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(infer(conv, wide.astype(np.float16)), y, rtol=1e-2, atol=0.1)
    with kernels.use("numpy"):
        check(conv, W)
    failures = []

    def work():
        try:
            check(conv, W)
        except AssertionError as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert not failures
    check(conv, W)


@pytest.mark.skipif(not has_onednn, reason="NumPy uses weights as they lie")
def test_what_is_kept_dies_with_the_parameter():
    conv = make_link()
    infer(conv)
    kept = weakref.ref(conv.W._kept.made[1].base)
    del conv
    assert kept() is None


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype("f")


def test_convolution_calls_the_function():
    link = L.Convolution2D(4, 6, 3, stride=2, pad=1, dilate=(1, 2), groups=2, initial_bias=0.5)
    x = draw(0, 2, 4, 7, 9)
    expected = F.convolution_2d(x, link.W, np.full(6, 0.5, "f"), 2, 1, dilate=(1, 2), groups=2)
    np.testing.assert_array_equal(link(x).array, expected.array)
    assert [(name, p.shape) for name, p in link.namedparams()] == [("/W", (6, 2, 3, 3)), ("/b", (6,))]


@pytest.mark.parametrize("arguments", [(None, 6, 3), (6, 3)])
def test_convolution_learns_its_input_size(arguments):
    link = L.Convolution2D(*arguments, nobias=True)
    assert not link.W.is_initialized
    assert link(draw(0, 1, 5, 4, 4)).shape == (1, 6, 2, 2)
    assert link.W.shape == (6, 5, 3, 3)
    assert link.b is None
    assert "in_channels=5" in repr(link)


def test_deconvolution_calls_the_function():
    link = L.Deconvolution2D(None, 3, 4, stride=2, pad=1)
    x = draw(0, 2, 8, 4, 4)
    assert link(x).shape == (2, 3, 8, 8)
    np.testing.assert_array_equal(link(x).array, F.deconvolution_2d(x, link.W, link.b, 2, 1).array)


def test_channels_that_groups_do_not_divide():
    with pytest.raises(ValueError, match="Convolution2D: out_channels: expected a multiple of groups=4, got 6"):
        L.Convolution2D(4, 6, 3, groups=4)
    with pytest.raises(ValueError, match="Convolution2D: in_channels: expected a multiple of groups=2, got 5"):
        L.Convolution2D(None, 6, 3, groups=2)(draw(0, 1, 5, 4, 4))


X4 = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")


def close(y, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def wide(*arrays):
    return [None if a is None else np.asarray(getattr(a, "array", a), np.float64) for a in arrays]


GEOMETRY = [
    {"stride": (2, 1)},
    {"pad": (1, 2)},
    {"dilate": (1, 2)},
    {"groups": 2},
    {"nobias": True},
    {"stride": 2, "pad": 1, "dilate": 2, "groups": 2},
]


@pytest.mark.parametrize("options", GEOMETRY, ids=str)
def test_convolution(options):
    link = L.Convolution2D(4, 6, (3, 2), initial_bias=0.5, **options)
    assert (link.b is None) == options.get("nobias", False)
    given = {k: v for k, v in options.items() if k != "nobias"}
    close(link(X4), R.convolution_2d(*wide(X4, link.W, link.b), **given))


@pytest.mark.parametrize(
    "options", [*GEOMETRY, {"stride": 2, "outsize": (14, 11)}, {"stride": 2, "outsize": (13, 10)}], ids=str
)
def test_deconvolution(options):
    link = L.Deconvolution2D(4, 6, (3, 2), initial_bias=0.5, **options)
    assert (link.b is None) == options.get("nobias", False)
    given = {k: v for k, v in options.items() if k != "nobias"}
    close(link(X4), R.deconvolution_2d(*wide(X4, link.W, link.b), **given))


@pytest.mark.parametrize("make", [L.Convolution2D, L.Deconvolution2D])
def test_initial_values_of_convolutions(make):
    link = make(4, 6, 3, initialW=0.25, initial_bias=np.arange(6.0))
    assert (link.W.array == 0.25).all()
    np.testing.assert_array_equal(link.b.array, np.arange(6))
