"""Complete steps by dbrdist's own kernels and cuDNN under the tape, against NumPy in float64: ``--on whole``."""

from __future__ import annotations

import numpy as np
import pytest
import whole_models
from support import put

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, kernels, using_config
from dbrdist.core.array import backend, random
from dbrdist.kernels.gpu import cuda_source
from dbrdist.optimizers import Adam, MomentumSGD

# By type: how far a step may be from float64 for the norm of the difference, relative to the norm; of mixed16, how much
# further than NumPy's own mixed16.
TOLERANCE, TIMES = 2e-3, 1.5
SLACK = 2e-2


def two_steps(name, device, mode, make_optimizer=MomentumSGD):
    """Losses of two steps, the first step's gradients and the values after both, in float64 on the host."""
    random.set_seed(3)
    make, data = whole_models.MODELS[name]
    dtype = np.float16 if mode == "mixed16" else mode
    with using_config("dtype", mode if mode == "mixed16" else np.dtype(mode)):
        net = make()
        numbers = np.random.default_rng(5)
        for _, p in sorted(net.namedparams()):  # the same of every type
            value = numbers.standard_normal(p.shape).astype("f") / np.float32(max(p.size // len(p), 1) ** 0.5)
            p.array[...] = 1 + value / 8 if p.ndim == 1 else value
        optimizer = make_optimizer().setup(net.to_device(device))
        x, t = (put(device, a) for a in data(np.random.default_rng(1), dtype))
        losses, found = [], {}
        for k in range(2):
            losses.append(float(backend.to_cpu(whole_models.step(net, optimizer, x, t).array)))
            if k == 0:
                found |= {f"gradient of {n}": backend.to_cpu(p.grad).astype("d") for n, p in net.namedparams()}
    found |= {n: backend.to_cpu(p.array).astype("d") for n, p in net.namedparams()}
    for path, link in net.namedlinks():
        found |= {f"{path}/{n}": backend.to_cpu(a).astype("d") for n in link._persistent
                  if backend.is_array(a := getattr(link, n))}  # fmt: skip
    return losses, found


def distance(a, b):
    """Of all numbers together, relative to the norm of b."""
    return float(np.sqrt(sum(np.square(a[k] - b[k]).sum() for k in b) / sum(np.square(b[k]).sum() for k in b)))


def gradients(found):
    return {k: v for k, v in found.items() if k.startswith("gradient")}


@pytest.fixture
def on_host(on):
    if on != "whole":
        pytest.skip("runs with --on whole")
    import host_cuda

    host_cuda.launched.clear()
    return lambda: {name.partition("<")[0] for _, name, _, _ in host_cuda.launched}


@pytest.mark.parametrize("mode", ["float32", "mixed16"])
@pytest.mark.parametrize("name", whole_models.MODELS)
def test_steps_are_those_of_float64(name, mode, device, on_host):
    numpy = backend.get_device("@numpy")
    losses, found = two_steps(name, device, mode)
    exact_losses, exact = two_steps(name, numpy, "float64")
    assert found.keys() == exact.keys()
    if mode == "float32":
        np.testing.assert_allclose(losses, exact_losses, rtol=1e-5)
        assert distance(gradients(found), gradients(exact)) < TOLERANCE
        assert distance(found, exact) < TOLERANCE
    else:
        _, by_numpy = two_steps(name, numpy, mode)
        np.testing.assert_allclose(losses, exact_losses, rtol=SLACK)
        for part in (gradients, dict):
            error, usual = (distance(part(v), part(exact)) for v in (found, by_numpy))
            assert error < TIMES * usual + 1e-3, (error, usual)


LAUNCHED = {
    "ResNet-20": {"bn_statistics", "bn_apply", "bn_sums", "bn_input_gradient", "momentum_sgd", "cross_entropy",
                  "cross_entropy_backward"},
    "bottlenecks": {"max_forward", "average_forward", "backward", "widen"},
    "LSTM": {"add_bias"},
    "Transformer": {"add_bias"},
}  # fmt: skip


@pytest.mark.parametrize("name", whole_models.MODELS)
def test_own_kernels_run_under_the_tape(name, device, on_host):
    two_steps(name, device, "float32")
    assert on_host() >= LAUNCHED[name]


@pytest.mark.parametrize("name", ["ResNet-20", "Transformer"])
def test_steps_are_the_same_twice(name, device, on_host):
    """Blocks and threads run in another order each time."""
    with using_config("cudnn_deterministic", True):
        (first, a), (second, b) = (two_steps(name, device, "float32", Adam) for _ in range(2))
    assert first == second
    for key in a:
        np.testing.assert_array_equal(a[key], b[key], key)


# ---- recurrent layers

LAYERS = {
    "n_step_lstm": (8, 2, 1), "n_step_bilstm": (8, 2, 2), "n_step_gru": (6, 1, 1), "n_step_bigru": (6, 1, 2),
}  # fmt: skip


def layer(name, device, dtype, rng, lengths=(4, 4, 2, 1)):
    """Outputs, last states and the gradients of all inputs of two layers over sequences of several lengths."""
    count, num_states, directions = LAYERS[name]
    units, inputs, num = 5, 3, 2 * directions

    def variables(*shapes):
        return [Variable(put(device, rng.standard_normal(s).astype("f").astype(dtype) / 2)) for s in shapes]

    states = variables(*[(num, lengths[0], units)] * num_states)
    widths = [inputs if k < directions else directions * units for k in range(num)]
    ws = [variables(*[(units, w if j < count // 2 else units) for j in range(count)]) for w in widths]
    bs = [variables(*[(units,)] * count) for _ in widths]
    xs = variables(*[(n, inputs) for n in lengths])
    *last, ys = getattr(F, name)(2, 0.0, *states, ws, bs, xs)
    loss = sum(F.sum(y * y) * (k + 1.0) for k, y in enumerate([*last, *ys]))
    loss.backward()
    leaves = [*states, *xs, *[v for row in (*ws, *bs) for v in row]]
    return [backend.to_cpu(a).astype("d") for a in (*[v.array for v in (*last, *ys)], *[v.grad for v in leaves])]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 2e-2)])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_of_several_lengths(name, dtype, tolerance, device, on_host):
    found = layer(name, device, dtype, np.random.default_rng(2))
    exact = layer(name, backend.get_device("@numpy"), "float64", np.random.default_rng(2))
    kind = "lstm" if "lstm" in name else "gru"
    assert {f"{kind}_forward", f"{kind}_backward"} <= on_host()
    for k, (a, b) in enumerate(zip(found, exact, strict=True)):
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, abs(b).max()), rtol=0, err_msg=str(k))


# ---- rows


def softmaxes(device, dtype, rng, name):
    x = Variable(put(device, rng.standard_normal((3, 5, 37)).astype("f").astype(dtype) * 3))
    y = getattr(F, name)(x, axis=2)
    F.sum(y * y * y * 1e-3).backward()
    return [backend.to_cpu(a).astype("d") for a in (y.array, x.grad)]


def layer_norm(device, dtype, rng, name):
    x, gamma, beta = (Variable(put(device, rng.standard_normal(s).astype("f").astype(d)))
                      for s, d in (((70, 37), dtype), ((37,), dtype), ((37,), dtype)))  # fmt: skip
    y = F.layer_normalization(x * 2.0 + 3.0, gamma, beta)
    F.sum(y * y * y).backward()
    return [backend.to_cpu(a).astype("d") for a in (y.array, x.grad, gamma.grad, beta.grad)]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("float16", 3e-2), ("bfloat16", 0.2)])
@pytest.mark.parametrize("name, function, launched", [
    ("softmax", softmaxes, {"softmax", "softmax_backward"}),
    ("log_softmax", softmaxes, {"log_softmax", "log_softmax_backward"}),
    ("layer_normalization", layer_norm, {"ln_forward", "ln_backward", "ln_columns"}),
])  # fmt: skip
def test_rows_are_those_of_float64(name, function, launched, dtype, tolerance, device, on_host):
    found = function(device, backend.as_dtype(dtype), np.random.default_rng(2), name)
    exact = function(backend.get_device("@numpy"), np.dtype("d"), np.random.default_rng(2), name)
    assert launched <= on_host()
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, abs(b).max()), rtol=0)


@pytest.mark.parametrize("shape", [(), (7,), (6, 5), (3, 8), (4, 3, 5, 2), (2, 3, 4), (2, 0)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dropout_has_the_bits_of_the_host(shape, dtype, device, on_host, rng):
    """Several draws, in the layout of images too, and the same gradients; then the host's stream is where it was."""
    dtype, results, states = backend.as_dtype(dtype), [], []
    values = np.asarray(rng.standard_normal(shape)).astype(dtype)
    for place in (device, backend.get_device("@numpy")):
        random.set_stream(5, 1, 2, row=3)
        x = Variable(put(place, values))
        ys = [F.dropout(x, ratio, return_mask=True) for ratio in (0.3, 0.5)]
        F.sum(sum(y for y, _ in ys)).backward()
        arrays = [a for y, mask in ys for a in (y.array, mask)]
        results.append([backend.to_cpu(a).astype("d") for a in (*arrays, x.grad)])
        states.append(random.get_state())
    assert not values.size or "dropout" in on_host()
    assert states[0] == states[1]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_dropout_of_four_axes_in_c_order_has_the_bits_of_the_host(device, xp, on_host):
    found = []
    for place in (device, backend.get_device("@numpy")):
        random.set_stream(5, 1, 2, row=3)
        x = place.xp.ones((2, 3, 4, 5), np.float32)
        found.append(backend.to_cpu(F.dropout(x, 0.4).array))
    np.testing.assert_array_equal(*found)


def test_a_recurrent_layer_takes_gradients_of_any_layout(device, on_host, rng):
    """Repeated numbers, as the gradient of a sum is, of outputs and last states."""
    values, found = rng.standard_normal((3, 4, 5)).astype("f"), []
    ws, b = rng.standard_normal((8, 5, 5)).astype("f"), np.zeros(5, "f")
    for place in (device, backend.get_device("@numpy")):
        x = [Variable(put(place, v)) for v in values]
        weights = [[put(place, w) for w in ws]]
        hy, cy, ys = F.n_step_lstm(
            1, 0.0, *[put(place, np.zeros((1, 4, 5), "f"))] * 2, weights, [[put(place, b)] * 8], x
        )
        (F.sum(F.transpose(hy, (0, 2, 1))) + F.sum(cy) + F.sum(F.concat(ys, axis=0).T)).backward()
        found.append([backend.to_cpu(v.grad) for v in x])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)


def test_attention_drops_the_weights_that_the_host_drops(device, on_host, rng):
    values, results = rng.standard_normal((3, 2, 4, 6, 5)).astype("f"), []
    for place in (device, backend.get_device("@numpy")):
        random.set_stream(5, 1, 2, row=3)
        q, k, v = (Variable(put(place, a)) for a in values)
        y = F.scaled_dot_product_attention(q, k, v, dropout_ratio=0.4)
        F.sum(y * y).backward()
        results.append([backend.to_cpu(a) for a in (y.array, q.grad, k.grad, v.grad)])
    assert "attention_weights" in on_host()
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_running_statistics_move_with_the_batch(dtype, train, device, on_host, rng):
    """Three batches, and an evaluation that moves nothing; of float16 in their own launch."""
    found = []
    for place in (device, backend.get_device("@numpy")):
        numbers = np.random.default_rng(1)
        link = L.BatchNormalization(5, dtype=np.dtype(dtype))
        link.to_device(place)
        with using_config("train", train):
            for k in range(3):
                link(put(place, (numbers.standard_normal((4, 5, 6, 6)) * (k + 1) + k).astype(dtype)))
        found.append([backend.to_cpu(a).astype("d") for a in (link.avg_mean, link.avg_var)])
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-6)
    assert ("bn_move" in on_host()) == (train and dtype == "float16")


# ---- what the bench itself finds


def relu(x, y, size):
    cuda_source.kernel("elementwise", "relu_forward", x.dtype)((1,), (32,), (x, y, size))


def arrays(xp, count=7):
    return xp.ones(count, np.float32), xp.empty(count, np.float32)


def test_a_kernel_that_reads_or_writes_beyond_an_array_is_reported(xp, on_host):
    x, y = arrays(xp)
    relu(x, y, 7)
    with pytest.raises(AssertionError, match=r"relu_forward<float>: (?s:.)*AddressSanitizer"):
        relu(x, y, 8)
    relu(x, y, 7)
    with pytest.raises(AssertionError, match=r"(?s:.)*AddressSanitizer"):
        relu(x, xp.empty(6, np.float32), 7)


def test_a_kernel_that_reads_freed_memory_is_reported(xp, on_host):
    x, y = arrays(xp)
    pointer = x.data
    del pointer.mem
    freed = cuda_source.kernel("elementwise", "relu_forward", x.dtype)
    address = np.uint64(pointer.ptr)
    freed((1,), (32,), (address, y, 7))
    del x
    with pytest.raises(AssertionError, match=r"(?s:.)*AddressSanitizer"):
        freed((1,), (32,), (address, y, 7))


def test_a_kernel_is_ordered_by_its_stream(xp, on_host):
    import clocks

    x, y = arrays(xp)
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True):
        relu(x, y, 7)
    with pytest.raises(clocks.Race):
        relu(y, x, 7)
    xp.cuda.Device().synchronize()
    relu(y, x, 7)


def test_cudnn_is_ordered_by_its_stream_too(device, xp, on_host, rng):
    import clocks

    x, W = put(device, rng.standard_normal((2, 4, 5, 5)).astype("f"), rng.standard_normal((4, 4, 1, 1)).astype("f"))
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True):
        y = kernels.conv_forward(x, W, None, kernels.ConvGeometry())
    with pytest.raises(clocks.Race):
        kernels.conv_backward_data(y, W, x.shape, kernels.ConvGeometry())


def test_threads_of_a_block_that_wait_in_different_places_are_reported(xp, on_host):
    """Labels of half a warp: the sum over a warp wants all of it."""
    import host_cuda

    text = "void wrong() { if (threadIdx.x < 16) __syncthreads(); else __syncwarp(); }"
    run = host_cuda.launcher("wrong", text, ())
    assert run(host_cuda._two((1,)), host_cuda._two((32,)), 0, None, None, 0) == -3
