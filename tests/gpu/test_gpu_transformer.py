"""Parts of a Transformer that a GPU does in one pass each, against NumPy in float64 and the functions one by one:

``--on whole``, also on a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import put

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import FunctionHook, Variable, grad, kernels, using_config
from dbrdist.core.array import backend, random
from dbrdist.core.model.link_hook import LinkHook

TOLERANCE = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 0.15}
FUSED = {"split_heads", "merge_heads", "attention_weights", "attention_weights_backward"}
B, N, E, H = 3, 5, 12, 3


@pytest.fixture(autouse=True)
def launched(on):
    if on not in ("whole", "cupy"):
        pytest.skip("runs with --on whole")
    if on == "cupy":
        yield None
        return
    import host_cuda

    host_cuda.launched.clear()
    yield lambda: {name.partition("<")[0] for _, name, _, _ in host_cuda.launched}


def numbers(shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def filled(net):
    """Values that do not depend on the type."""
    for k, (_, p) in enumerate(sorted(net.namedparams())):
        p.array[...] = numbers(p.shape, k, 0.3) + (1 if "gamma" in (p.name or "") else 0)
    return net


def results(net, call, arrays, place, dtype, mixed=False):
    """The output, the gradients of inputs and of all parameters, and the state of random numbers afterwards."""
    random.set_stream(5, 1, 2, row=3)
    xs = [Variable(put(place, a.astype(backend.as_dtype(dtype)))) for a in arrays]
    with using_config("dtype", "mixed16" if mixed else backend.as_dtype(dtype)):
        y = call(net, *xs)
    y.grad = put(place, numbers(y.shape, 99).astype(y.dtype))
    y.backward()
    made = {"y": y.array, **{f"gradient of input {k}": x.grad for k, x in enumerate(xs)}}
    made |= {f"gradient of {name}": p.grad for name, p in net.namedparams() if p.grad is not None}
    return {k: backend.to_cpu(a).astype("d") for k, a in made.items() if a is not None}, random.get_state()[:5]


def compare(make, call, device, dtype, arrays, mixed=False, factor=1):
    with using_config("dtype", np.dtype("f") if mixed else backend.as_dtype(dtype)):
        net = filled(make())
    found, state = results(net.to_device(device), call, arrays, device, dtype, mixed)
    with using_config("dtype", np.dtype("d")):
        exact_net = make()
    for (_, p), (_, q) in zip(sorted(exact_net.namedparams()), sorted(filled(make()).namedparams())):
        p.array[...] = q.array.astype(backend.as_dtype(dtype) if not mixed else "f").astype("d")
    exact, exact_state = results(exact_net, call, arrays, backend.get_device("@numpy"), "float64")
    assert found.keys() == exact.keys()
    assert state == exact_state
    for name in exact:
        difference = np.abs(found[name] - exact[name]).max()
        assert difference <= factor * TOLERANCE[dtype] * max(1, np.abs(exact[name]).max()), (name, difference)
    return found


def seen_mask():
    """Booleans (B, 1, 1, S): keys beyond the end of a sequence are not seen."""
    return np.arange(N) < np.array([5, 2, 3])[:, None, None, None]


MASKS = {
    "none": lambda: None,
    "keys": seen_mask,
    "queries and keys": lambda: np.random.default_rng(3).random((B, N, N)) < 0.6,  # some queries may see nothing
    "nothing": lambda: np.zeros((B, 1, 1, N), bool),
    "added": lambda: np.where(seen_mask(), numbers((B, H, N, N), 4), -np.inf),
    "of heads": lambda: np.random.default_rng(4).random((H, N, N)) < 0.7,
}
BLOCKS = {
    "plain": {}, "without dropout": {"dropout": 0.0}, "norm first": {"norm_first": True}, "no biases": {"nobias": True},
    "norm first without dropout": {"norm_first": True, "dropout": 0.0}, "GELU": {"activation": F.gelu},
    "half dropped": {"dropout": 0.5, "n_hidden": 7},
}  # fmt: skip


def masked(kind, causal=False):
    mask = MASKS[kind]()

    def call(net, x, *others):
        m = mask
        if m is not None and m.dtype != bool:
            m = m.astype(x.dtype)
        m = m if m is None else put(x.device, m)
        return net(x, *others, mask=m, is_causal=causal)

    return call


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name, dtype, device, launched):
    options = BLOCKS[name]
    compare(lambda: L.TransformerBlock(E, H, **options), masked("none"), device, dtype, [numbers((B, N, E))])
    if launched:
        assert launched() >= FUSED | ({"relu_dropout", "relu_dropout_backward"} if name != "GELU" else set())
        assert not launched() & {"add_bias", "dropout", "relu_forward", "softmax"} or name == "GELU"


def test_a_block_of_mixed16(device, launched):
    compare(lambda: L.TransformerBlock(16, 2), masked("keys"), device, "float16", [numbers((B, N, 16))], mixed=True)
    if launched:
        assert "ln_of_sum_backward" in launched()


def test_a_block_of_bfloat16(device):
    """Of numbers whose hidden units stay on their side of zero when they are rounded."""
    arrays = [numbers((B, N, 16), 1)]
    compare(lambda: L.TransformerBlock(16, 2, dropout=0.25), masked("none"), device, "bfloat16", arrays)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind, causal, device, launched):
    found = compare(
        lambda: L.MultiHeadAttention(E, H, 0.2), masked(kind, causal), device, "float32", [numbers((B, N, E))]
    )
    if launched:
        assert launched() >= FUSED
    assert all(np.isfinite(a).all() for a in found.values())


@pytest.mark.parametrize("kind", ["none", "nothing"])
def test_evaluation_drops_nothing(kind, device):
    with using_config("train", False):
        compare(lambda: L.TransformerBlock(E, H), masked(kind), device, "float32", [numbers((B, N, E))])


@pytest.mark.parametrize("num_keys", [1, 7, 40])
def test_keys_of_another_length(num_keys, device):
    """Queries, keys and values from three arrays; more keys than a warp has threads."""
    arrays = [numbers((B, N, E)), numbers((B, num_keys, E), 1), numbers((B, num_keys, E), 2)]
    compare(lambda: L.MultiHeadAttention(E, H, 0.3), lambda net, *xs: net(*xs), device, "float32", arrays)


class Attention(L.MultiHeadAttention):
    """A link without parameters of its own: the function, of values of another width."""

    def forward(self, q, k, v):
        return F.multi_head_attention(q, k, v, H, is_causal=True)


@pytest.mark.parametrize("width", [H, 2 * H, 8 * H])
def test_values_of_another_width(width, device, launched):
    arrays = [numbers((B, N, E)), numbers((B, 6, E), 1), numbers((B, 6, width), 2)]
    compare(lambda: Attention(E, H), lambda net, *xs: net(*xs), device, "float32", arrays)
    if launched:
        assert launched() >= FUSED


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some_operands(wanted, device, rng):
    arrays = [numbers((B, N, E)), numbers((B, 6, E), 1), numbers((B, 6, 2 * H), 2)]
    found = []
    for place, dtype in ((device, "f"), (backend.get_device("@numpy"), "d")):
        xs = [Variable(put(place, a.astype(dtype)), requires_grad=k in wanted) for k, a in enumerate(arrays)]
        y = F.multi_head_attention(*xs, H)
        F.sum(y * y).backward()
        assert all((x.grad is not None) == (k in wanted) for k, x in enumerate(xs))
        found.append([backend.to_cpu(xs[k].grad) for k in wanted])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_operands_that_begin_anywhere(start, dtype, device):
    """Heads of eight numbers, which are moved 16 bytes at a time where they begin at a multiple of that."""
    size, shape = 2 * 4 * 16, (2, 4, 16)
    found = []
    for place, kind in ((device, dtype), (backend.get_device("@numpy"), "float64")):
        flat = put(place, numbers((size + 3,)).astype(dtype).astype(kind))
        x = Variable(flat[start : start + size].reshape(shape))
        y = F.multi_head_attention(x, x, x, 2)
        F.sum(y * y).backward()
        found.append([backend.to_cpu(a).astype("d") for a in (y.array, x.grad)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE[dtype] * 10, rtol=0)


def second(place, dtype, make, x_shape):
    """The gradient of the squared norm of a gradient, of inputs and parameters."""
    random.set_stream(5, 1, 2, row=3)
    with using_config("dtype", np.dtype(dtype)):
        net = filled(make()).to_device(place)
        x = Variable(put(place, numbers(x_shape).astype(dtype)))
        y = net(x)
        [gx] = grad([F.sum(y * y * y)], [x], enable_double_backprop=True)
        F.sum(gx * gx).backward()
    made = {"x": x.grad, **{name: p.grad for name, p in net.namedparams()}}
    return {k: backend.to_cpu(a) for k, a in made.items() if a is not None}


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"dropout": 0.0}, {"nobias": True}], ids=str)
def test_second_derivatives(options, device):
    def make():
        return L.TransformerBlock(8, 2, 6, **options)

    found = second(device, "f", make, (2, 3, 8))
    exact = second(backend.get_device("@numpy"), "d", make, (2, 3, 8))
    assert found.keys() == exact.keys()
    largest = max(np.abs(g).max() for g in exact.values())  # that of the keys' biases is 0
    for name in exact:
        np.testing.assert_allclose(found[name], exact[name], rtol=2e-3, atol=1e-5 * largest, err_msg=name)


class _Seen(FunctionHook):
    name = "seen"

    def __init__(self):
        self.labels = []

    def forward_postprocess(self, function, in_data):
        self.labels.append(function.label)


class _Doubled(LinkHook):
    """Sees each link that is called."""

    name = "doubled"

    def __init__(self):
        self.paths = []

    def forward_postprocess(self, args):
        self.paths.append(type(args.link).__name__)


def test_function_hooks_see_each_function(device):
    net, x = filled(L.TransformerBlock(E, H)).to_device(device), put(device, numbers((B, N, E)))
    with _Seen() as hook:
        net(x)
    assert {"ReLU", "LinearFunction", "Dropout", "LayerNormalization"} <= set(hook.labels)


def test_link_hooks_see_each_link(device):
    net, x = filled(L.TransformerBlock(E, H)).to_device(device), put(device, numbers((B, N, E)))
    with _Doubled() as hook:
        net(x)
    assert hook.paths.count("Linear") == 6 and hook.paths.count("LayerNormalization") == 2
    one = _Doubled()
    net.linear1.add_hook(one)
    net(x)
    net.attention.key.add_hook(two := _Doubled())
    net(x)
    assert one.paths == ["Linear"] * 2 and two.paths == ["Linear"]


class _Twice(L.Linear):
    def forward(self, x, n_batch_axes=1):
        return 2 * super().forward(x, n_batch_axes)


@pytest.mark.parametrize("place", ["linear1", "linear2", "query", "out"])
def test_links_of_other_classes_are_called(place, device):
    def make():
        net = L.TransformerBlock(E, H, E)
        owner = net if place.startswith("linear") else net.attention
        with owner.init_scope():
            setattr(owner, place, _Twice(E, E))
        return net

    compare(make, masked("none"), device, "float32", [numbers((B, N, E))])


def test_providers_of_arrays_do_the_same(device):
    """Where no kernel serves, biases are added by the formula."""

    def make():
        return L.TransformerBlock(E, H)

    with kernels.use("numpy"):
        compare(make, masked("keys"), device, "float32", [numbers((B, N, E))])


def test_results_keep_when_the_input_is_used_again(device):
    """Nothing is written over what the program can read: rows, outputs of part one, parameters."""
    net, x = filled(L.TransformerBlock(E, H)).to_device(device), Variable(put(device, numbers((B, N, E))))
    before = backend.to_cpu(x.array).copy()
    y = net(x)
    kept = backend.to_cpu(y.array).copy()
    z = net(y)
    z.grad = z.array
    z.backward(retain_grad=True)
    np.testing.assert_array_equal(backend.to_cpu(x.array), before)
    np.testing.assert_array_equal(backend.to_cpu(y.array), kept)


def test_gradients_of_several_layouts(device):
    """A gradient that is no rows in memory: of a transposed sum, of repeated numbers."""
    found = []
    for place, dtype in ((device, "f"), (backend.get_device("@numpy"), "d")):
        random.set_stream(5, 1, 2, row=3)
        with using_config("dtype", np.dtype(dtype)):
            net = filled(L.TransformerBlock(E, H)).to_device(place)
        x = Variable(put(place, numbers((B, N, E)).astype(dtype)))
        y = net(x)
        (F.sum(F.transpose(y, (2, 1, 0)) * put(place, numbers((E, N, B)).astype(dtype))) + F.sum(y)).backward()
        found.append([backend.to_cpu(x.grad), *[backend.to_cpu(p.grad) for _, p in sorted(net.namedparams())]])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_attention_of_heads_at_hand(device, launched):
    """scaled_dot_product_attention of (B, H, L, D), with a scale of its own, against float64."""
    found = []
    for place, dtype in ((device, "f"), (backend.get_device("@numpy"), "d")):
        q, k, v = (Variable(put(place, numbers((2, 3, 4, 6), s).astype(dtype))) for s in range(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7)
        F.sum(y * y).backward()
        found.append([backend.to_cpu(a) for a in (y.array, q.grad, k.grad, v.grad)])
    if launched:
        assert launched() == {"attention_weights", "attention_weights_backward"}
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


FUSED_TYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@FUSED_TYPES
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [5, 9])
@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_cudnn_attends_with_the_dropout_of_the_host(ratio, length, causal, dtype, device, launched):
    """Heads of eight numbers, keys as many as queries or more; with the draws of the host, or none."""
    arrays = [numbers((B, 5, 16)), numbers((B, length, 16), 1), numbers((B, length, 16), 2)]
    call = lambda net, *xs: net(*xs, is_causal=causal)  # noqa: E731
    compare(lambda: L.MultiHeadAttention(16, 2, dropout=ratio), call, device, dtype, arrays)
    if launched:
        assert launched() & FUSED == {"split_heads"} and ("attention_mask" in launched()) == (ratio > 0)


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_attends_to_heads_at_hand(causal, device, launched):
    found = []
    for place, dtype in ((device, "e"), (backend.get_device("@numpy"), "d")):
        flats = [put(place, numbers((2 * 3 * 4 * 8,), s).astype("e").astype(dtype)) for s in range(3)]
        q, k, v = (Variable(flat.reshape(2, 3, 4, 8)) for flat in flats)  # `put` would make images of four axes
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.4)
        F.sum(y * y).backward()
        found.append([backend.to_cpu(a) for a in (y.array, q.grad, k.grad, v.grad)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)
    if launched:
        assert not launched() & FUSED


@pytest.mark.parametrize("options, mask", [({"dropout": 0.2}, "keys"), ({}, "keys")])
def test_own_kernels_attend_where_something_is_dropped_or_hidden(options, mask, device, launched):
    compare(lambda: L.MultiHeadAttention(16, 2, **options), masked(mask), device, "float16", [numbers((B, N, 16))])
    if launched:
        assert launched() >= FUSED


def test_cudnn_can_be_switched_off(device, launched):
    with using_config("use_cudnn", "never"):
        compare(lambda: L.MultiHeadAttention(16, 2), masked("none"), device, "float16", [numbers((B, N, 16))])
    if launched:
        assert launched() >= FUSED


def in_order(device, *shape, seed):
    """Numbers of float16 in C order on the device, and the same of float64."""
    a = numbers(shape, seed, 0.5).astype("e")
    return device.xp.ascontiguousarray(device.send(a)), a.astype("d")


def test_stacks_are_multiplied_and_scaled_by_one_kernel(device):
    (a, a64), (b, b64) = in_order(device, 2, 3, 5, 8, seed=1), in_order(device, 2, 3, 8, 7, seed=2)
    y = kernels.scaled_matmul(a, b, 0.25)
    np.testing.assert_allclose(backend.to_cpu(y).astype("d"), 0.25 * (a64 @ b64), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("drops", (False, True))
@pytest.mark.parametrize("is_merged", (False, True))
@pytest.mark.parametrize("is_causal", (False, True))
def test_attention_of_cudnn_is_that_of_the_definition(device, is_causal, is_merged, drops):
    (q, q64), (k, k64), (v, v64) = (in_order(device, 2, 3, 6, 8, seed=i) for i in range(3))
    scores = 0.3 * q64 @ k64.swapaxes(2, 3) + np.where(np.tri(6, dtype=bool) | (not is_causal), 0, -np.inf)
    weights = np.exp(scores - scores.max(3, keepdims=True))
    weights /= weights.sum(3, keepdims=True)
    g64 = numbers((2, 3, 6, 8), 9).astype("e").astype("d")
    random.set_stream(5, 1, 2, row=3)
    lines = random.Lines(18, 6)
    bits = np.stack([lines.bits(row, 0, 18) for row in range(2)]).reshape(2, 3, 6, 6)
    kept = (bits >= 2**30) * (4 / 3) if drops else np.ones(1)
    drop = (lines.draw, 2**30, float(np.float16(4 / 3))) if drops else (None, 0, 1.0)
    of_weights = kept * (g64 @ v64.swapaxes(2, 3))
    of_scores = 0.3 * weights * (of_weights - (of_weights * weights).sum(3, keepdims=True))
    dropped = weights * kept
    expected = dropped @ v64, of_scores @ k64, of_scores.swapaxes(2, 3) @ q64, dropped.swapaxes(2, 3) @ g64

    def placed(a):
        return np.ascontiguousarray(a.swapaxes(1, 2)).reshape(2, 6, 24) if is_merged else a

    y, stats, mask = kernels.fused_attention(q, k, v, drop, 0.3, is_causal, is_merged)
    assert (mask is not None) == drops
    gy = device.xp.ascontiguousarray(device.send(placed(g64).astype("e")))
    grads = kernels.fused_attention_backward(q, k, v, y, stats, mask, gy, 0.3, is_causal, is_merged)
    for made, wanted in zip((y, *grads), expected, strict=True):
        np.testing.assert_allclose(backend.to_cpu(made).astype("d"), placed(wanted), rtol=1e-2, atol=5e-3)


def test_cudnn_attends_to_heads_that_begin_anywhere(device):
    """After others of their shape that begin where cuDNN expects it: plans are shared."""
    size = 2 * 3 * 4 * 8
    for start in (0, 1, 3):
        found = []
        for place, dtype in ((device, "e"), (backend.get_device("@numpy"), "d")):
            flats = [put(place, numbers((size + 3,), s).astype("e").astype(dtype)) for s in range(3)]
            q, k, v = (Variable(flat[start : start + size].reshape(2, 3, 4, 8)) for flat in flats)
            y = F.scaled_dot_product_attention(q, k, v)
            F.sum(y * y).backward()
            found.append([backend.to_cpu(a).astype("d") for a in (y.array, q.grad, k.grad, v.grad)])
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("of_heads", [False, True])
def test_gradients_of_cudnn_where_it_was_switched_off_meanwhile(of_heads, device):
    found = []
    for place, dtype in ((device, "e"), (backend.get_device("@numpy"), "d")):
        shape = (2, 3, 4, 8) if of_heads else (2, 4, 24)
        flats = [put(place, numbers((2 * 3 * 4 * 8,), s).astype("e").astype(dtype)) for s in range(3)]
        xs = [Variable(flat.reshape(shape)) for flat in flats]
        y = F.scaled_dot_product_attention(*xs) if of_heads else F.multi_head_attention(*xs, 3)
        with using_config("use_cudnn", "never"):
            F.sum(y * y).backward()
        assert all(x.grad.dtype == dtype for x in xs)
        found.append([backend.to_cpu(x.grad).astype("d") for x in xs])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


def test_second_derivatives_of_fused_attention(device):
    found = []
    for place, dtype in ((device, "e"), (backend.get_device("@numpy"), "d")):
        q = Variable(put(place, numbers((2, 4, 16), 0, 0.5).astype("e").astype(dtype)))
        y = F.multi_head_attention(q, q, q, 2)
        [g] = grad([F.sum(y * y)], [q], enable_double_backprop=True)
        F.sum(g * g).backward()
        found.append(backend.to_cpu(q.grad))
    np.testing.assert_allclose(*found, rtol=5e-2, atol=1e-2)


def test_a_mask_that_wants_a_gradient_gets_it(device):
    found = []
    for place, dtype in ((device, "f"), (backend.get_device("@numpy"), "d")):
        q = Variable(put(place, numbers((2, 3, 4, 6)).astype(dtype)))
        mask = Variable(put(place, numbers((3, 4, 4), 1).astype(dtype)))
        F.sum(F.scaled_dot_product_attention(q, q, q, mask) ** 2).backward()
        found.append([backend.to_cpu(a) for a in (q.grad, mask.grad)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_scores_beyond_float16_are_scaled_before_they_are_stored(device):
    """q k' of 64 numbers of 40 is 102,400, an eighth of which float16 holds."""
    q = put(device, np.full((1, 2, 1, 64), 40, np.float16))
    y = F.scaled_dot_product_attention(q, q, q)
    assert (backend.to_cpu(y.array) == 40).all()


def test_nan_stays_nan(device):
    x = numbers((B, N, E))
    x[1, 2, 3] = np.nan
    with using_config("dtype", np.dtype("f")):
        y = backend.to_cpu(filled(L.TransformerBlock(E, H)).to_device(device)(put(device, x)).array)
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


def random_mask(r, kind, num_examples, heads, length):
    if kind == "examples":
        return r.random((num_examples, 1, 1, length)) < 0.5
    if kind == "queries":
        return r.random((num_examples, length, length)) < 0.5
    if kind == "heads":
        return r.random((1, heads, 1, length)) < 0.6
    if kind == "added":
        return np.where(r.random((length, length)) < 0.7, r.standard_normal((length, length)), -np.inf).astype("f")
    return None


@pytest.mark.parametrize("seed", range(12))
def test_blocks_of_random_sizes(seed, device):
    r = np.random.default_rng(seed)
    heads, num_examples, length = (int(n) for n in r.integers(1, (5, 4, 36)))
    width = heads * int(r.choice([3, 4, 8, 16]))
    kind = str(r.choice(["none", "causal", "examples", "queries", "heads", "added"]))
    mask = random_mask(r, kind, num_examples, heads, length)
    options = {
        "n_hidden": int(r.integers(1, 20)), "dropout": float(r.choice([0, 0.1, 0.5, 0.9])),
        "norm_first": bool(r.integers(2)), "nobias": bool(r.integers(2)),
        "activation": (F.relu, F.gelu, F.tanh)[int(r.integers(3))],
    }  # fmt: skip

    def call(net, x):
        there = None if mask is None else put(x.device, mask if mask.dtype == bool else mask.astype(x.dtype))
        return net(x, mask=there, is_causal=kind == "causal")

    def make():
        return L.TransformerBlock(width, heads, **options)

    compare(make, call, device, "float32", [numbers((num_examples, length, width), seed)], factor=10)
