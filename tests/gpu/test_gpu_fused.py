"""Residual blocks whose convolutions do more than convolve (``config.fused_convolutions``): ``--on whole``.

What blocks give and leave is compared with float64, and with the errors of the separate calls; where they do not serve,
with the bits of those.
"""

from __future__ import annotations

import gc
import threading
import warnings

import host_cudnn
import numpy as np
import pytest
import test_gpu_graphs
import whole_models
from support import images, put
from test_gpu_blocks import Notes, kinds
from test_gpu_whole import distance, gradients, two_steps

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, Sequential, kernels, optimizers, using_config
from dbrdist.core.array import backend
from dbrdist.functions import rectified
from dbrdist.kernels.gpu import cudnn_convolution
from dbrdist.links.model.vision.resnet import BottleneckA, BottleneckB
from dbrdist.models.blocks import Basic, Bottleneck

NUMPY = backend.get_device("@numpy")


class Net(Chain):
    """A stem, bottlenecks of each kind and basic blocks of both."""

    def __init__(self, width=8):
        super().__init__()
        with self.init_scope():
            self.conv, self.bn = L.Convolution2D(3, 16, 3, 1, pad=1, nobias=True), L.BatchNormalization(16)
            self.blocks = Sequential(
                Bottleneck(16, width, 1), Bottleneck(4 * width, width, 1), Bottleneck(4 * width, 16, 2),
                Bottleneck(64, 16, 1), Basic(64, 16, 2), Basic(16, 16, 1),
            )  # fmt: skip
            self.fc = L.Linear(16, 10)

    def forward(self, x):
        h = self.blocks(L.conv_bn(self.conv, self.bn, x, relu=True))
        return self.fc(F.average_pooling_2d(h, h.shape[2:]))


def _images(rng, dtype):
    return rng.standard_normal((4, 3, 11, 13)).astype(dtype), np.arange(4, dtype=np.int32)


@pytest.fixture(autouse=True)
def fused(on, monkeypatch):
    if on != "whole":
        pytest.skip("runs with --on whole")
    for width in (8, 6):
        monkeypatch.setitem(whole_models.MODELS, f"net of {width}", (lambda width=width: Net(width), _images))
    with using_config("fused_convolutions", True), using_config("cudnn_deterministic", True):
        yield


MADE = {"bn_of_sums", "bn_apply_two", "bn_sums_of_two"}


@pytest.mark.parametrize("name, made", [("net of 8", MADE), ("net of 6", MADE), ("bottlenecks", MADE)])
def test_steps_are_those_of_float64(name, made, device, launched):
    """As accurate as NumPy's own mixed16; widths that cuDNN does not fuse go by the separate calls."""
    losses, found = two_steps(name, device, "mixed16")
    names = launched()
    assert made <= {*names}
    assert (names.count("bn_statistics") == 2) == (name == "net of 8")  # of the stem, in both steps
    exact_losses, exact = two_steps(name, NUMPY, "float64")
    _, by_numpy = two_steps(name, NUMPY, "mixed16")
    np.testing.assert_allclose(losses, exact_losses, rtol=2e-2)
    for part in (gradients, dict):
        error, usual = (distance(part(v), part(exact)) for v in (found, by_numpy))
        assert error < 1.5 * usual + 1e-3, (error, usual)


# ---- what programs do with blocks


class Blocks(Chain):
    """With a projection, with the input itself, and of two stages."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.one, self.two, self.three = Bottleneck(16, 8, 2), Bottleneck(32, 8, 1), Basic(32, 32, 1)

    def forward(self, x):
        return self.three(self.two(self.one(x)))


class Side:
    """Blocks on a device or the host, with the switch on or off."""

    def __init__(self, device, is_fused=False, setup=True, make=Blocks, mode="mixed16"):
        self.is_fused, mode = is_fused, np.dtype("d") if device is NUMPY else mode
        numbers = np.random.default_rng(3)
        with using_config("dtype", mode):
            self.net = make()
        for _, p in sorted(self.net.namedparams()):
            values = numbers.standard_normal(p.shape)
            p.array[...] = 1 + values / 8 if p.ndim == 1 else values / (p.size // len(p)) ** 0.5
        self.net.to_device(device)
        self.optimizer = optimizers.MomentumSGD(0.01).setup(self.net) if setup else None
        x = images(numbers, (4, 16, 9, 7), np.float16)
        self.x = dbrdist.Variable(put(device, x if device is not NUMPY else x.astype("d")))
        self.gy = put(device, numbers.standard_normal((4, 32, 5, 4)).astype(self.x.dtype) / 16)

    def forward(self):
        with using_config("fused_convolutions", self.is_fused):
            y = self.net(self.x)
        assert (kinds(y) == ["ResidualBlock"] * 3) if self.is_fused else "ResidualBlock" not in kinds(y)
        return y

    def loss(self, y, factor=1.0):
        return F.sum(F.cast(y * self.gy, np.float32 if y.dtype == np.float16 else y.dtype)) * factor

    def found(self, *more):
        """What is in the network."""
        values = [p.grad for _, p in sorted(self.net.namedparams())]
        values += [p.lend() for _, p in sorted(self.net.namedparams())] + [self.x.grad]
        for _, link in sorted(self.net.namedlinks()):
            values += [getattr(link, n) for n in link._persistent]
        return [backend.to_cpu(a) for a in (*more, *values) if backend.is_array(a)]


FLIPS = 3e-2  # the share in a gradient of a few of some thousand elements that a ReLU stops or not, by rounding


def assert_as_accurate(found, usual, exact):
    """No further from the last than 1.5 times the distance of the second, and some flips."""
    assert len(found) == len(usual) == len(exact)
    wide = [[a.astype("d") for a in v] for v in (found, usual, exact)]
    for a, b, right in zip(*wide, strict=True):
        error, expected = (np.linalg.norm(v - right) / np.linalg.norm(right) for v in (a, b))
        assert error < 1.5 * expected + FLIPS, (error, expected)
    whole = [dict(enumerate(v)) for v in wide]
    error, expected = (distance(v, whole[2]) for v in whole[:2])
    assert error < 1.5 * expected + FLIPS / 2, (error, expected)


def _passed(side):
    y = side.forward()
    side.net.cleargrads()
    side.loss(y).backward()
    return y


def _one_loss(side):
    y = _passed(side)
    side.optimizer.update()
    return side.found(y.array)


def _without_flat_memory(side):
    return side.found(_passed(side).array)


def _two_losses(side):
    y = side.forward()
    side.net.cleargrads()
    (side.loss(y) + side.loss(F.sigmoid(y), 3.0)).backward()
    side.loss(y).backward()
    return side.found(y.array)


def _chosen(side):
    W, gamma = side.net.one.conv2.W, side.net.two.bn1.gamma
    made = dbrdist.grad([side.loss(side.forward())], [W, side.x, gamma])
    return side.found(*[g.array for g in made])


def _frozen(side):
    for link in (side.net.one.conv1, side.net.one.shortcut, side.net.two.bn2, side.net.two.conv3):
        link.disable_update()
    return _one_loss(side)


def _constant_input(side):
    side.x = side.x.array if side.x.dtype == np.float64 else dbrdist.Variable(side.x.array, requires_grad=False)
    side.x = dbrdist.as_variable(side.x)
    return side.found(_passed(side).array)


def _assigned(side):
    """``stale_parameters`` "warn": the rule has the new values."""
    y = side.forward()
    for conv in (side.net.one.conv2, side.net.two.conv1, side.net.three.conv2):
        conv.W.array = conv.W.array * 2
    side.net.two.bn3.gamma.array = side.net.two.bn3.gamma.array * 2
    side.net.cleargrads()
    with using_config("stale_parameters", "warn"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        side.loss(y).backward()
    return side.found(y.array)


def _another_thread(side):
    y = side.forward()
    side.net.cleargrads()
    loss = side.loss(y)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return side.found(y.array)


def _second_derivatives(side):
    y, params = side.forward(), [*side.net.params()]
    gs = dbrdist.grad([side.loss(y)], [side.x, *params], enable_double_backprop=True)
    side.net.cleargrads()
    sum(F.sum(F.cast(g, side.gy.dtype if side.gy.dtype == np.float64 else np.float32) ** 2) for g in gs).backward()
    return side.found(y.array, *[g.array for g in gs])


def _shared(side):
    """A stage twice in one block."""
    side.net.three.conv2, side.net.three.bn2 = side.net.three.conv1, side.net.three.bn1
    side.optimizer = optimizers.MomentumSGD(0.01).setup(side.net)
    return _one_loss(side)


def _in_c_order(side):
    side.x = dbrdist.Variable(backend.get_array_module(side.x.array).ascontiguousarray(side.x.array))
    return _one_loss(side)


def _misaligned(side):
    """Where 16 bytes cannot be read at once."""
    room = backend.get_array_module(side.x.array).empty(side.x.size + 1, side.x.dtype)
    x = room[1:].reshape(4, 9, 7, 16).transpose(0, 3, 1, 2)
    x[...] = side.x.array
    side.x = dbrdist.Variable(x)
    return _one_loss(side)


def _of_running_statistics_in_float64(side):
    for _, link in side.net.namedlinks():
        if isinstance(link, L.BatchNormalization):
            link.avg_var = backend.device_of(link.avg_var).send(backend.to_cpu(link.avg_var).astype("d"))
    return _one_loss(side)


USES = [_one_loss, _in_c_order, _misaligned, _of_running_statistics_in_float64, _without_flat_memory, _two_losses,
        _chosen, _frozen, _constant_input, _assigned, _another_thread, _second_derivatives, _shared]  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
def test_values_are_as_accurate_as_those_of_the_calls(use, device):
    setup = use is not _without_flat_memory
    found, usual, exact = (use(Side(*of, setup=setup)) for of in ((device, True), (device, False), (NUMPY, False)))
    assert_as_accurate(found, usual, exact)


# ---- what ends or changes blocks


def same_bits_as_calls(device, use, **options):
    """The same as with the switch off, and no block."""
    results = []
    for is_fused in (True, False):
        side = Side(device, **options)
        with using_config("fused_convolutions", is_fused):
            results.append(use(side))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def _stepped(side):
    y = side.net(side.x)
    assert "ResidualBlock" not in kinds(y)
    side.net.cleargrads()
    side.loss(y).backward()
    return side.found(y.array)


def _function_hook(side):
    with Notes() as notes:
        found = _stepped(side)
    assert notes.forward.count("Convolution2D") == notes.backward.count("Convolution2D") == 9
    return found


def _debug(side):
    with using_config("debug", True):
        return _stepped(side)


def _predicted(side):
    with using_config("train", False), dbrdist.no_backprop_mode():
        y = side.net(side.x)
    with using_config("train", False):
        z = side.net(side.x)
    return side.found(y.array, z.array)


def _forgotten(side):
    y = F.forget(side.net, side.x)
    side.net.cleargrads()
    side.loss(y).backward()
    return side.found(y.array)


def _without_cudnn(side):
    with using_config("use_cudnn", "never"):
        return _stepped(side)


def _of_float32(side):
    side.x, side.gy = dbrdist.Variable(side.x.array.astype("f")), side.gy.astype("f")
    return _stepped(side)


def _of_subclasses(side):
    for _, link in side.net.namedlinks():
        if isinstance(link, L.BatchNormalization) and link.name != "bn1":
            link.__class__ = Scaled
    return _stepped(side)


class Scaled(L.BatchNormalization):
    def forward(self, x):
        return super().forward(x) * 2.0


ENDS = [_function_hook, _debug, _predicted, _forgotten, _without_cudnn, _of_float32,
        _of_subclasses]  # fmt: skip


@pytest.mark.parametrize("use", ENDS, ids=lambda f: f.__name__)
def test_the_calls_are_made_where_blocks_do_not_serve(use, device):
    same_bits_as_calls(device, use)


class LinkNotes(dbrdist.LinkHook):
    name = "notes of links"

    def __init__(self):
        self.called = []

    def forward_postprocess(self, args):
        self.called.append(args.link.name)


def test_links_with_hooks_are_called(device):
    side, notes = Side(device), LinkNotes()
    side.net.two.bn2.add_hook(notes)
    side.net.one.shortcut.add_hook(notes, "another")
    y = side.net(side.x)
    assert sorted(notes.called) == ["bn2", "shortcut"] and kinds(y).count("ResidualBlock") == 1
    side.net.two.bn2.delete_hook(notes.name), side.net.one.shortcut.delete_hook("another")
    assert kinds(side.net(side.x)) == ["ResidualBlock"] * 3


def test_one_line_says_where_cudnn_has_no_kernel(device, monkeypatch):
    def refuse(self, num_in, num_out):
        raise RuntimeError("no engine")

    monkeypatch.setattr(host_cudnn.Graph, "_validate_fused", refuse)
    monkeypatch.setattr(cudnn_convolution, "_said", [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_bits_as_calls(device, _stepped)
    (said,) = [w for w in caught if "fused" in str(w.message)]
    assert str(said.message) == "config.fused_convolutions has no effect on some blocks: cuDNN: no engine"


@pytest.mark.parametrize("setup", [True, False])
def test_parameters_in_float16(setup, device):
    """Gradients of 1x1 filters are written where they belong."""
    use = _one_loss if setup else _without_flat_memory
    sides = (Side(*of, setup=setup, mode=np.dtype("e")) for of in ((device, True), (device, False), (NUMPY, False)))
    assert_as_accurate(*map(use, sides))


class Vision(Chain):
    """Blocks as of :class:`L.ResNet50Layers`."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.one, self.two, self.three = BottleneckA(16, 8, 32, 2), BottleneckB(32, 8), BottleneckA(32, 8, 32, 1)

    def forward(self, x):
        return self.three(self.two(self.one(x)))


def test_blocks_of_vision_models(device):
    sides = (Side(*of, make=Vision) for of in ((device, True), (device, False), (NUMPY, False)))
    assert_as_accurate(*map(_one_loss, sides))


@pytest.mark.parametrize("is_large", [True, False])
def test_gradients_that_wait_for_their_sum(is_large, device, monkeypatch):
    """Large ones are added by the rule of the block before, in the pass that masks them."""
    monkeypatch.setattr(rectified, "_LARGE", 1 if is_large else 1 << 30)
    found, usual, exact = (_two_losses(Side(*of)) for of in ((device, True), (device, False), (NUMPY, False)))
    assert_as_accurate(found, usual, exact)


def test_running_statistics_move_as_by_the_calls(device):
    found = []
    for is_fused in (True, False):
        side = Side(device, is_fused)
        for bn in (side.net.one.bn1, side.net.one.shortcut.bn):
            bn.decay = 0.5
        for _ in range(2):
            side.forward()
        found.append([backend.to_cpu(a) for bn in (side.net.one.bn1, side.net.one.shortcut.bn)
                      for a in (bn.avg_mean, bn.avg_var)])  # fmt: skip
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)


def test_switches_between_forward_and_backward(device):
    """The activations are made then that a convolution without cuDNN reads."""

    def use(side):
        y = side.forward()
        side.net.cleargrads()
        with using_config("use_cudnn", "never"):
            side.loss(y).backward()
        return side.found(y.array)

    found, usual, exact = (use(Side(*of)) for of in ((device, True), (device, False), (NUMPY, False)))
    assert_as_accurate(found, usual, exact)


def test_plans_hold_no_images(device):
    """Memory of a step is free after it, whatever was planned."""
    import whole

    side = Side(device, True)
    before = None
    for _ in range(3):
        _one_loss(side)
        gc.collect()
        used = whole.used_bytes()
        before = used if before is None else before
    assert used == before


def test_captured_steps_have_the_bits_of_eager_ones(device, launched, monkeypatch):
    from dbrdist.kernels.gpu import cublaslt

    monkeypatch.setattr(backend.capturing, "product", cublaslt.serve)

    class Small(Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.one, self.two = Bottleneck(8, 8, 2), Bottleneck(32, 8, 1)
                self.fc = L.Linear(32, 10)

        def forward(self, x):
            h = self.two(self.one(x))
            return self.fc(F.average_pooling_2d(h, h.shape[2:]))

    data = test_gpu_graphs.examples(shape=(8, 6, 6), dtype=np.float16)
    options = {"make": lambda: L.Classifier(Small()), "data": data, "make_optimizer": optimizers.MomentumSGD}
    test_gpu_graphs.both(device, mode="mixed16", steps=6, scale="dynamic", **options)
    assert {*launched()} >= MADE


# ---- numbers


@pytest.mark.parametrize("ratio", [0.0, 3.0, 30.0])
def test_variances_lose_no_more_digits_than_their_sums(ratio, device, rng):
    """For means of so many deviations, from sums that were rounded to float32 once."""
    h = (rng.standard_normal((4096, 16)) + ratio).astype(np.float16)
    sums = np.stack([h.sum(0, "d"), np.square(h.astype("d")).sum(0)]).astype("f")
    ones, zeros = np.ones(16, "f"), np.zeros(16, "f")
    there = put(device, sums, ones, zeros)
    made = kernels.bn_of_sums(*there, 1e-5, len(h), h.dtype, None, 0.0, (0.0, 0.0))
    mean, var, saved, affine = (backend.to_cpu(a).astype("d") for a in made)
    exact = h.astype("d")
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(var, exact.var(0), rtol=4e-7 * (1 + ratio**2))
    np.testing.assert_array_equal(saved, np.concatenate([ones, zeros]))
    scale = 1 / np.sqrt(exact.var(0) + 1e-5)
    np.testing.assert_allclose(affine, [scale, -exact.mean(0) * scale], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0, 3e4])
def test_variances_of_one_value_and_of_none(value, device):
    """Equal numbers are normalized to about 0, however large, though float16 has no 1 / sqrt(eps) times them."""
    h = np.full((48, 8), value, "f")
    with np.errstate(all="ignore"):
        sums = np.stack([h.sum(0), np.square(h).sum(0) * np.float32(1 - 1e-6)])
    there = put(device, sums, np.ones(8, "f"), np.zeros(8, "f"))
    made = kernels.bn_of_sums(*there, 1e-5, 48, np.dtype("e"), None, 0.0, (0.0, 0.0))
    mean, var, _, (factor, summand) = (backend.to_cpu(a) for a in made)
    if np.isfinite(value):
        np.testing.assert_allclose(var, np.square(value) / 2**22, rtol=1e-5)
        assert (abs(factor * np.float16(value) + summand) <= 1).all()
    else:
        assert not np.isfinite(var).any() and not np.isfinite(mean).any()


class Doubled(Chain):
    def __init__(self, conv):
        super().__init__()
        with self.init_scope():
            self.inner = conv

    def forward(self, x):
        return 2 * self.inner(x)


def test_a_link_of_the_program_in_the_place_of_a_convolution(device):
    side = Side(device, True)
    with side.net.two.init_scope():
        side.net.two.conv2 = Doubled(side.net.two.conv2)
    assert kinds(side.net(side.x)).count("ResidualBlock") == 2
