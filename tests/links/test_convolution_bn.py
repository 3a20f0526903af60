"""A convolution with normalization, addition and ReLU after it: one pass at inference, else the calls themselves."""

import contextlib
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.core.model.link_hook import LinkHook
from dbrdist.core.tape.function_node import FunctionHook, capturing
from dbrdist.kernels import ConvGeometry
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.reference import numpy_
from dbrdist.links.model.vision.resnet import BuildingBlock
from dbrdist.models.resnet import ResNet, ResNetCIFAR
from tests.each import each

EPS = 2.0**-23
BFLOAT16 = backend.as_dtype("bfloat16")


try:
    onednn.library()
    has_onednn = True
except onednn.Unavailable:
    has_onednn = False


needs_onednn = pytest.mark.skipif(not has_onednn, reason="without oneDNN the calls are made one by one")
cpu = Path("/proc/cpuinfo")
# Elsewhere oneDNN has slow kernels alone for some sizes, which are refused.
knows_all_sizes = cpu.exists() and "avx512f" in cpu.read_text() and "ONEDNN_MAX_CPU_ISA" not in os.environ


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def stir(*links):
    """Parameters and statistics of which none is what it starts from."""
    for link in links:
        for i, p in enumerate(link.params()):
            p.array[...] = draw(i, *p.shape)
        if isinstance(link, L.BatchNormalization):
            link.avg_mean[...] = draw(7, *link.avg_mean.shape)
            link.avg_var[...] = np.abs(draw(8, *link.avg_var.shape)) + 0.1
    return links


def make(i=16, o=24, ksize=3, stride=1, pad=1, nobias=True, bn=None, **options):
    conv = L.Convolution2D(i, o, ksize, stride, pad, nobias, **options)
    return stir(conv, L.BatchNormalization(o, **(bn or {})))


def one_by_one(conv, bn, x, relu=False, residual=None):
    h = bn(conv(x))
    h = h if residual is None else h + (residual() if callable(residual) else residual)
    return F.relu(h) if relu else h


def inference():
    """Both switches of inference."""
    config = dbrdist.using_config("train", False)
    config.__enter__()
    with dbrdist.no_backprop_mode():
        yield
    config.__exit__(None, None, None)


@pytest.fixture
def at_inference():
    yield from inference()


@pytest.fixture
def passes(monkeypatch):
    """The results of the kernel: an array for each fused pass, None for each refusal."""
    found, kernel = [], kernels.conv_bn_inference

    def spy(*arguments):
        found.append(kernel(*arguments))
        return found[-1]

    monkeypatch.setattr(kernels, "conv_bn_inference", spy)
    return found


def reference(conv, bn, x, relu=False, residual=None, W_type="d"):
    """In float64 from the definitions, and the sum of the absolute values of what is added up."""
    g = ConvGeometry(*conv.stride, *conv.pad, *conv.dilate, conv.groups)
    W, x = conv.W.array.astype(W_type).astype("d"), x.astype("d")
    o = W.shape[0]
    zero = np.zeros(o)
    b, beta = (zero if p is None else p.array.astype("d") for p in (conv.b, bn.beta))
    scale = (1 if bn.gamma is None else bn.gamma.array.astype("d")) / np.sqrt(bn.avg_var.astype("d") + bn.eps)
    mean, r = bn.avg_mean.astype("d"), 0 if residual is None else residual.astype("d")

    def along(v):
        return v.reshape(1, -1, 1, 1)

    y = (numpy_.conv_forward(x, W, None, g) + along(b - mean)) * along(scale) + along(beta) + r
    sizes = numpy_.conv_forward(np.abs(x), np.abs(W), None, g) + along(np.abs(b) + np.abs(mean))
    sizes = sizes * along(np.abs(scale)) + along(np.abs(beta)) + np.abs(r)
    return np.where(y < 0, 0, y) if relu else y, sizes


def check(conv, bn, x, relu=False, residual=None):
    """Within 4 units in the last place of the exact result, those of its summands' sum; so are the calls themselves."""
    exact, sizes = reference(conv, bn, x, relu, residual)
    for f in (L.conv_bn, one_by_one):
        y = f(conv, bn, x, relu=relu, residual=residual)
        assert y.dtype == np.float32 and backend.is_channels_last(y.array) and not y.requires_grad
        assert (np.abs(y.array - exact) <= 4 * EPS * sizes).all()


# in, out, kernel, stride, pad, options, batch and image
CONVOLUTIONS = [
    (16, 24, 3, 1, 1, {}, (2, 9, 9)),
    (64, 64, 3, 1, 1, {}, (1, 14, 14)),
    (64, 128, 1, 2, 0, {}, (2, 7, 7)),
    (128, 32, 1, 1, 0, {"nobias": False}, (1, 7, 7)),
    (3, 16, 7, 2, 3, {"nobias": False}, (1, 21, 19)),
    (16, 32, 3, (2, 1), (0, 2), {"groups": 4}, (2, 8, 7)),
    (16, 16, 3, 1, 1, {"groups": 16, "nobias": False}, (1, 10, 10)),
    (8, 10, 3, 1, 2, {"dilate": 2}, (3, 11, 10)),
    (5, 7, (3, 2), 1, (1, 0), {"nobias": False}, (1, 6, 5)),
    (1, 1, 1, 1, 0, {}, (1, 1, 1)),
]


@needs_onednn
@each(case=CONVOLUTIONS, relu=[False, True], has_residual=[False, True])
def test_one_pass_is_exact_to_rounding(case, relu, has_residual, at_inference, passes):
    i, o, ksize, stride, pad, options, (n, h, w) = case
    conv, bn = make(i, o, ksize, stride, pad, **options)
    x = draw(20, n, i, h, w)
    residual = draw(21, *conv(x).shape) if has_residual else None
    check(conv, bn, x, relu, residual)
    assert passes.pop() is not None or not knows_all_sizes


@needs_onednn
@each(layout=["nchw", "channels last", "sliced", "reversed"])
def test_inputs_in_any_layout(layout, at_inference, passes):
    lay = {
        "nchw": np.ascontiguousarray, "channels last": backend.channels_last,
        "sliced": lambda a: np.repeat(a, 2, 3)[..., ::2], "reversed": lambda a: a[::-1].copy()[::-1],
    }[layout]  # fmt: skip
    conv, bn = make()
    check(conv, bn, lay(draw(3, 2, 16, 9, 9)), True, lay(draw(4, 2, 24, 9, 9)))
    constant = np.broadcast_to(draw(5, 1, 24, 1, 1), (2, 24, 9, 9))
    check(conv, bn, draw(3, 2, 16, 9, 9), True, constant)
    assert passes.pop() is not None and passes.pop() is not None and not passes


@needs_onednn
@each(bn=[{"use_gamma": False}, {"use_beta": False}, {"eps": 0.5}, {"axis": (0, 2, 3)}, {"dtype": np.float64}])
def test_normalizations_of_all_kinds(bn, at_inference, passes):
    conv, bn = make(bn=bn)
    check(conv, bn, draw(3, 2, 16, 9, 9), True)
    assert passes.pop() is not None and not passes


@needs_onednn
def test_bfloat16_is_rounded_once(at_inference, passes):
    conv, bn = make()
    x, residual = draw(3, 2, 16, 9, 9).astype(BFLOAT16), draw(4, 2, 24, 9, 9).astype(BFLOAT16)
    try:
        kernels.conv_inference(x, conv.W.array.astype(BFLOAT16), None, ConvGeometry(1, 1, 1, 1), None)
    except Exception:
        pytest.skip("no bfloat16 here")
    for relu in (False, True):
        exact, sizes = reference(conv, bn, x, relu, residual, BFLOAT16)
        y = L.conv_bn(conv, bn, x, relu=relu, residual=residual)
        assert y.dtype == BFLOAT16
        if passes.pop() is not None:
            assert (np.abs(y.array.astype("d") - exact) <= 2.0**-8 * np.abs(exact) + 4 * EPS * sizes).all()


@needs_onednn
@each(value=[np.nan, np.inf, -np.inf], place=["x", "W", "gamma", "beta", "mean", "var", "residual", "b"])
def test_what_is_not_finite_goes_through(value, place, at_inference, passes):
    conv, bn = make(pad=0, nobias=False)  # a weight counts in the padding in some providers
    x, residual = draw(3, 2, 16, 9, 9), draw(4, 2, 24, 7, 7)
    targets = {
        "x": x[0, 3], "W": conv.W.array[2, 3], "gamma": bn.gamma.array, "beta": bn.beta.array, "mean": bn.avg_mean,
        "var": bn.avg_var, "residual": residual[1, 2], "b": conv.b.array,
    }  # fmt: skip
    targets[place].reshape(-1)[1] = value
    with np.errstate(all="ignore"):
        exact, _ = reference(conv, bn, x, True, residual)
    del targets
    for f in (L.conv_bn, one_by_one):
        y = f(conv, bn, x, relu=True, residual=residual).array
        np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
        np.testing.assert_allclose(y, exact, rtol=1e-3, atol=1e-3)
    assert passes.pop() is not None


@needs_onednn
def test_a_variance_below_zero_is_nan_without_a_warning(at_inference):
    conv, bn = make()
    bn.avg_var[3] = -1
    y = L.conv_bn(conv, bn, draw(3, 1, 16, 9, 9)).array
    assert np.isnan(y[:, 3]).all() and np.isfinite(np.delete(y, 3, 1)).all()


@needs_onednn
def test_a_large_mean_does_not_cancel(at_inference, passes):
    """The mean is taken off before the scale; off the shift afterwards it would cost three digits here."""
    conv, bn = make(nobias=False)
    conv.W.array[...] *= 1e-2
    conv.b.array[...] = 1000
    bn.avg_mean[...] = 1000
    bn.avg_var[...] = 1e-4
    x = draw(3, 1, 16, 9, 9)
    exact, _ = reference(conv, bn, x)
    y = L.conv_bn(conv, bn, x).array
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-3)
    assert passes[0] is not None


@needs_onednn
def test_new_values_are_seen_at_the_next_call(at_inference, passes):
    conv, bn = make(nobias=False)
    x = draw(3, 2, 16, 9, 9)
    check(conv, bn, x)
    changes = [
        lambda: conv.W.array.fill(0.25), lambda: setattr(conv.W, "array", draw(30, 24, 16, 3, 3)),
        lambda: conv.b.array.fill(2), lambda: setattr(bn.gamma, "array", draw(31, 24)), lambda: bn.beta.array.fill(3),
        lambda: bn.avg_mean.fill(1), lambda: setattr(bn, "avg_mean", draw(32, 24)), lambda: bn.avg_var.fill(2),
        lambda: setattr(bn, "eps", 1.0), lambda: setattr(conv, "stride", (2, 2)), lambda: setattr(bn, "gamma", None),
    ]  # fmt: skip
    for change in changes:
        change()
        check(conv, bn, x)
    with dbrdist.using_config("train", True):
        bn(conv(x))  # which moves the statistics
    check(conv, bn, x)
    assert len(passes) == len(changes) + 2 and all(y is not None for y in passes)


@needs_onednn
def test_weights_are_packed_once(at_inference):
    conv, bn = make()
    x = draw(3, 2, 16, 9, 9)
    L.conv_bn(conv, bn, x)
    made = conv.W._kept.made
    assert made[0] is not None
    L.conv_bn(conv, bn, x, relu=True)
    assert conv.W._kept.made is made
    conv.W._kept.made = object(), np.zeros_like(made[1])  # what another kernel made
    y = L.conv_bn(conv, bn, x).array
    np.testing.assert_allclose(y, reference(conv, bn, x)[0], rtol=1e-3, atol=1e-3)


@needs_onednn
@pytest.mark.filterwarnings("ignore:SGD.update. config.train is False")
def test_weights_in_flat_memory(at_inference, passes):
    """They may change at any time, and nothing is kept of them."""
    conv, bn = make()
    net = dbrdist.Sequential(conv, bn)
    optimizer = dbrdist.optimizers.SGD(0.1).setup(net)
    x = draw(3, 2, 16, 9, 9)
    check(conv, bn, x)
    with dbrdist.using_config("train", True), dbrdist.force_backprop_mode():
        net.cleargrads()
        F.sum(F.square(net(x))).backward()
    optimizer.update()
    check(conv, bn, x)
    assert conv.W._kept is None and passes[1] is not None


class Recording(FunctionHook):
    def __init__(self):
        self.seen = []

    def forward_postprocess(self, function, in_data):
        self.seen.append(function.label)


class Links(LinkHook):
    name = "Links"

    def __init__(self):
        self.seen = []

    def forward_postprocess(self, args):
        self.seen.append(type(args.link).__name__)


class OwnConvolution(L.Convolution2D):
    def forward(self, x):
        return 2 * super().forward(x)


class OwnNormalization(L.BatchNormalization):
    def forward(self, x, finetune=False):
        return super().forward(x) + 1


def same_as_calls(conv, bn, x, residual=None, relu=True):
    y, z = (f(conv, bn, x, relu=relu, residual=residual).array for f in (L.conv_bn, one_by_one))
    assert y.dtype == z.dtype
    np.testing.assert_array_equal(y, z)


def test_where_the_calls_are_made_one_by_one(at_inference, passes):
    x, residual = draw(3, 2, 16, 9, 9), draw(4, 2, 24, 9, 9)
    same_as_calls(*stir(OwnConvolution(16, 24, 3, pad=1), L.BatchNormalization(24)), x, residual)
    same_as_calls(*stir(L.Convolution2D(16, 24, 3, pad=1), OwnNormalization(24)), x, residual)
    same_as_calls(*stir(L.Convolution2D(16, 24, 3, pad=1), L.BatchRenormalization(24)), x, residual)
    same_as_calls(*stir(L.DilatedConvolution2D(16, 24, 3, pad=2, dilate=2), L.BatchNormalization(24)), x)
    same_as_calls(lambda x: 2 * x, make(16, 16)[1], x)
    same_as_calls(*make(bn={"axis": (0, 2)})[:1], L.BatchNormalization((24, 9), axis=(0, 2)), x)
    same_as_calls(make(16, 9)[0], *stir(L.BatchNormalization(9, axis=(0, 1, 2))), x)  # as many columns as channels
    for i in range(2):
        links = make()
        links[i].forward = lambda x: F.concat([x, x[:, :8]]) * 3 if x.shape[1] == 16 else x * 3
        same_as_calls(*links, x, residual)
    conv, bn = make()
    with dbrdist.using_config("debug", True):
        same_as_calls(conv, bn, x, residual)
    with capturing():
        same_as_calls(conv, bn, x, residual)
    with dbrdist.force_backprop_mode():
        assert L.conv_bn(conv, bn, x).creator is not None
    with dbrdist.using_config("train", True):
        same_as_calls(conv, bn, x, residual)
    assert not passes
    same_as_calls(conv, bn, x, residual[:1])  # which broadcasts
    same_as_calls(conv, bn, x, 2.0)
    same_as_calls(conv, bn, x, residual.astype("d"))
    same_as_calls(conv, bn, x.astype(np.float16))
    with kernels.use("numpy"):
        same_as_calls(conv, bn, x, residual)
    conv.to_device("@numpy")
    same_as_calls(*stir(L.Convolution2D(16, 24, 3), L.BatchNormalization(24)), x[:0])
    assert all(y is None for y in passes)


def test_hooks_see_the_same_calls(at_inference):
    conv, bn = make()
    shortcut = L.Convolution2D(16, 24, 1)
    x = draw(3, 2, 16, 9, 9)
    for hook_type in (Recording, Links):
        seen = []
        for f in (L.conv_bn, one_by_one):
            hook = hook_type()
            with hook:
                f(conv, bn, x, relu=True, residual=lambda: shortcut(x))
            seen.append(hook.seen)
        assert seen[0] == seen[1] and len(seen[0]) >= 3
    for link in (conv, bn):
        hook = Links()
        link.add_hook(hook)
        L.conv_bn(conv, bn, x)
        assert hook.seen == [type(link).__name__]
        link.delete_hook("Links")


def test_a_function_that_gives_no_residual(at_inference):
    conv, bn = make()
    x = draw(3, 2, 16, 9, 9)
    for train in (False, True):
        with dbrdist.using_config("train", train):
            y, z = (L.conv_bn(conv, bn, x, residual=residual).array for residual in (lambda: None, None))
            np.testing.assert_array_equal(y, z)


def test_training_is_bit_for_bit_that_of_the_calls():
    results = []
    for f in (L.conv_bn, one_by_one):
        conv, bn = make()
        side, side_bn = make(ksize=1, pad=0)
        x = dbrdist.Variable(draw(3, 2, 16, 9, 9))
        y = f(conv, bn, x, relu=True, residual=lambda: side_bn(side(x)))  # noqa: B023
        F.sum(y * y).backward()
        found = [y.array, x.grad, bn.avg_mean, bn.avg_var]
        results.append(found + [p.grad for link in (conv, bn, side, side_bn) for p in link.params()])
    for a, b in zip(*results):
        np.testing.assert_array_equal(a, b)


def test_links_that_wait_for_their_first_batch(at_inference):
    conv, bn = L.Convolution2D(None, 24, 3, pad=1), L.BatchNormalization()
    x = draw(3, 2, 16, 9, 9)
    first = L.conv_bn(conv, bn, x).array
    assert conv.W.shape == (24, 16, 3, 3) and bn.avg_mean.shape == (24,)
    np.testing.assert_allclose(L.conv_bn(conv, bn, x).array, first, rtol=1e-5, atol=1e-5)


@each(x=[draw(3, 2, 15, 9, 9), draw(3, 2, 16, 9), np.ones((2, 16, 9, 9), int), draw(3, 2, 16, 0, 9)])
def test_errors_are_those_of_the_calls(x, at_inference):
    words = []
    for f in (L.conv_bn, one_by_one):
        chain = dbrdist.Chain(**dict(zip(("conv", "bn"), make(pad=0))))
        with pytest.raises((ValueError, TypeError)) as caught:
            f(chain.conv, chain.bn, x)
        words.append(str(caught.value))
    assert words[0] == words[1]
    conv, bn = make()[0], L.BatchNormalization(23)
    with pytest.raises(ValueError, match="gamma: expected shape"):
        L.conv_bn(conv, bn, draw(3, 2, 16, 9, 9))


@each(place=["gamma", "beta", "b", "residual", "avg_mean", "avg_var"])
def test_what_has_no_array_is_not_passed_over(place, at_inference):
    """An uninitialised parameter is not one that was left out."""
    conv, bn = make(nobias=False)
    residual = dbrdist.Parameter() if place == "residual" else None
    if place != "residual":
        empty = None if place == "avg_var" else dbrdist.Parameter()
        setattr(conv if place == "b" else bn, place, empty)
    with pytest.raises((RuntimeError, ValueError, TypeError, AttributeError)):
        L.conv_bn(conv, bn, draw(3, 2, 16, 9, 9), residual=residual)


@each(x=[None, [[1.0]], 3.0, np.ma.zeros((2, 16, 9, 9), "f")])
def test_inputs_that_are_no_arrays(x, at_inference, passes):
    for f in (L.conv_bn, one_by_one):
        with contextlib.suppress(Exception):
            f(*make(), x)
    assert not passes


@each(dtype=[">f4", "<f8", ">f2"])
def test_other_types_of_vectors_and_images(dtype, at_inference, passes):
    conv, bn = make(nobias=False)
    for name in ("avg_mean", "avg_var"):
        setattr(bn, name, getattr(bn, name).astype(dtype))
    x, residual = draw(3, 2, 16, 9, 9), draw(4, 2, 24, 9, 9)
    y = L.conv_bn(conv, bn, x, relu=True, residual=residual).array
    exact, _ = reference(conv, bn, x, True, residual)
    np.testing.assert_allclose(y, exact, rtol=1e-3, atol=1e-3)
    for odd in (x.astype(dtype), residual.astype(dtype)):
        passes.clear()
        with contextlib.suppress(TypeError):
            L.conv_bn(conv, bn, odd) if odd.shape == x.shape else L.conv_bn(conv, bn, x, residual=odd)
        assert not any(y is not None for y in passes)


@needs_onednn
def test_an_output_that_a_normalization_left_unwritten(at_inference, passes):
    """What waits for a ReLU is written before a fused pass reads it, as input or as residual."""
    conv, bn = make(16, 16)
    x = draw(3, 4, 16, 24, 24)
    written = bn(conv(x)).array.copy()
    for _ in range(2):
        F.relu(bn(conv(x)))  # from now on its outputs may wait
        check_pair = [L.conv_bn(conv, bn, bn(conv(x))).array, L.conv_bn(conv, bn, x, residual=bn(conv(x))).array]
        exact = [reference(conv, bn, written)[0], reference(conv, bn, x, False, written)[0]]
        for y, z in zip(check_pair, exact):
            np.testing.assert_allclose(y, z, rtol=1e-3, atol=1e-3)
    assert len(passes) == 4


@needs_onednn
def test_inputs_stay_as_they_are(at_inference):
    conv, bn = make()
    x, residual = draw(3, 2, 16, 9, 9), draw(4, 2, 24, 9, 9)
    before = [a.copy() for a in (x, residual, bn.avg_mean, bn.avg_var)]
    first = L.conv_bn(conv, bn, x, relu=True, residual=residual).array
    kept = first.copy()
    L.conv_bn(conv, bn, -x, relu=True, residual=residual)
    np.testing.assert_array_equal(first, kept)
    for a, b in zip((x, residual, bn.avg_mean, bn.avg_var), before):
        np.testing.assert_array_equal(a, b)


@needs_onednn
def test_threads_do_not_disturb_each_other():
    conv, bn = make()
    batches = [draw(40 + i, 2, 16, 9, 9) for i in range(3)]
    exact = [reference(conv, bn, x, True) for x in batches]
    failures = []

    def work(i):
        for _ in inference():
            for _ in range(30):
                y = L.conv_bn(conv, bn, batches[i], relu=True).array
                if not (np.abs(y - exact[i][0]) <= 4 * EPS * exact[i][1]).all():
                    failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failures


@needs_onednn
def test_a_call_takes_the_memory_of_its_output(at_inference):
    conv, bn = make(16, 32)
    x = draw(3, 4, 16, 64, 64)
    for _ in range(2):
        L.conv_bn(conv, bn, x, relu=True)
    tracemalloc.start()
    y = L.conv_bn(conv, bn, x, relu=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.1 * y.array.nbytes + x.nbytes  # the input is brought to channels-last


def networks():
    yield ResNetCIFAR(10, 8), (2, 3, 16, 16)
    yield ResNet(10, (1, 1, 1, 1)), (1, 3, 32, 32)
    yield L.InceptionBN(8, 8, 4, 8, 4, 8, "max", 8), (2, 8, 9, 9)
    yield BuildingBlock(2, 8, 4, 16, 2), (2, 8, 9, 9)


@pytest.mark.slow
@needs_onednn
@each(**{"net, shape": networks})
def test_networks_take_one_pass_per_normalization(net, shape, at_inference, passes):
    stir(*net.links())
    for link in net.links():
        if isinstance(link, L.Convolution2D):
            link.W.array[...] /= np.sqrt(link.W.array[0].size)
    passes.clear()
    x = draw(3, *shape)
    y = net(x).array
    assert len(passes) == sum(isinstance(link, L.BatchNormalization) for link in net.links())
    assert all(y is not None for y in passes) or not knows_all_sizes
    with Recording():
        np.testing.assert_allclose(y, net(x).array, rtol=1e-4, atol=1e-4 * np.abs(y).max())


def test_the_link():
    link = L.Conv2DBNActiv(16, 24, 3, pad=1)
    assert [path for path, _ in link.namedparams()] == ["/conv/W", "/bn/gamma", "/bn/beta"]
    x = draw(3, 2, 16, 9, 9)
    late = L.Conv2DBNActiv(24, 3, pad=1, nobias=False, activ=None, bn_kwargs={"eps": 0.5, "use_beta": False})
    assert late(x).shape == (2, 24, 9, 9) and late.bn.eps == 0.5
    assert [path for path, _ in late.namedparams()] == ["/conv/W", "/conv/b", "/bn/gamma"]
    stir(*link.children())
    stir(*late.children())
    tanh = L.Conv2DBNActiv(16, 24, 3, 2, 2, 2, 4, activ=F.tanh)
    stir(*tanh.children())
    for _ in inference():
        for l, activ in ((link, F.relu), (late, lambda h: h), (tanh, F.tanh)):
            np.testing.assert_allclose(l(x).array, activ(l.bn(l.conv(x))).array, rtol=1e-4, atol=1e-5)
    assert tanh.conv.stride == (2, 2) and tanh.conv.dilate == (2, 2) and tanh.conv.groups == 4
