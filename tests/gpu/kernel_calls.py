"""One call of each heavy operation that has kernels of its own on a GPU, for tests that look at all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dbrdist import kernels
from dbrdist.core.array import backend, random
from dbrdist.kernels import ConvGeometry, PoolGeometry
from dbrdist.kernels.gpu import cuda_transformer
from dbrdist.kernels.gpu.cuda_layout import FilterLayout
from dbrdist.kernels.reference import numpy_recurrent

F32 = np.float32
AXIS = (0, 2, 3)


class Call(NamedTuple):
    """An operation, its arguments in host memory, and the CUDA kernels that it launches."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    launches: tuple[str, ...]


def _images(rng: Any, *shape: int) -> Any:
    n, c, h, w = shape
    return rng.standard_normal((n, h, w, c)).astype(F32).transpose(0, 3, 1, 2)


def calls(rng: Any, count: int = 4096) -> dict[str, Call]:
    """The calls, with some ``count`` elements in each array, so that few blocks have to work in loops."""
    c = 8
    side = max(int((count / 2 / c) ** 0.5), 4)
    x, gy = _images(rng, 2, c, side, side), _images(rng, 2, c, side, side)
    gamma, beta, mean = (rng.standard_normal(c).astype(F32) for _ in range(3))
    var = rng.random(c).astype(F32) + F32(0.5)
    flat = [rng.standard_normal(count).astype(F32) for _ in range(4)]
    rows = rng.standard_normal((count // 8, 9)).astype(F32)
    t = rng.integers(0, 9, len(rows)).astype(np.int32)
    W, b = rng.standard_normal((5, 9)).astype(F32), rng.standard_normal(5).astype(F32)
    max_pool, average = PoolGeometry("max", 2, 2, 2, 2), PoolGeometry("average", 2, 2, 2, 2)
    made: dict[str, Call] = {
        "relu_forward": Call(kernels.relu_forward, (x,), ("relu_forward",)),
        "relu_backward": Call(kernels.relu_backward, (np.maximum(x, 0), gy), ("relu_backward",)),
        "relu_backward_of_sum": Call(
            kernels.relu_backward_of_sum, (np.maximum(x, 0), gy, x), ("relu_backward_of_sum",)
        ),
        "add": Call(kernels.add, (x, gy), ("add",)),
        "linear": Call(kernels.linear, (rows, W, b), ("add_bias",)),
        "column_sums": Call(kernels.column_sums, (rows, np.dtype(F32)), ("column_sums",)),
        "bn_statistics": Call(kernels.bn_statistics, (x, AXIS), ("bn_statistics",)),
        "bn_inference": Call(kernels.bn_inference, (x, gamma, beta, mean, var, 1e-5), ("bn_apply",)),
        "bn_forward": Call(kernels.bn_forward, (x, gamma, beta, 1e-5), ("bn_statistics", "bn_apply")),
        "bn_sums": Call(kernels.bn_sums, (x, mean, var, gy, 1e-5), ("bn_sums",)),
        "bn_move": Call(
            lambda a, b, *rest: (a, b, kernels.bn_move(a, b, *rest))[:2],
            (flat[0], flat[1], flat[2], flat[3], 0.9, (0.1, 0.2)),
            ("bn_move",),
        ),
        "bn_backward": Call(_bn_backward, (x, gamma, beta, gy), ("bn_sums", "bn_input_gradient")),
        "two normalizations": Call(
            _two, (x, gy, gamma, beta, mean, var), ("bn_of_sums", "bn_apply_two", "bn_sums_of_two", "bn_input_gradient")
        ),
        "max pooling": Call(lambda x: _pooled(x, max_pool), (x,), ("max_forward", "backward")),
        "average pooling": Call(lambda x: _pooled(x, average), (x,), ("average_forward", "backward")),
        "cross_entropy": Call(_cross_entropy, (rows, t), ("cross_entropy", "cross_entropy_backward")),
        "conv": Call(_convolution, (x, _plain(rng, 8, c, 3, 3), gy), ("to_channels_last", "to_plain")),
        "conv whose gradients are written later": Call(_later, (x, _plain(rng, 8, c, 3, 3), gy), ("all_to_plain",)),
        "weights laid out together": Call(_together, (_plain(rng, 8, c, 3, 3), W), ("all_to_channels_last",)),
        "conv of few channels": Call(_stem, (_images(rng, 2, 3, side, side), _plain(rng, 8, 3, 3, 3)), ("widen",)),
    }
    made |= _of_rows(rng, rows, x, gamma, flat, count)
    layers = ((0, count // 2, True), (count // 2, count, False))
    updates = {
        "sgd": (2, (0.1,)), "momentum_sgd": (3, (0.1, 0.9)),
        "corrected_momentum_sgd": (3, (0.1, 0.9)), "nesterov_ag": (3, (0.1, 0.9)), "ada_grad": (3, (0.1, 1e-8)),
        "rmsprop": (3, (0.1, 0.9, 0.1, 1e-8)),
        "adam": (5, (0.9, 0.1, 0.999, 0.001, 0.01, 1e-8, 0.99)),
        "lars": (3, (layers, 0.1, 0.9, 1e-4, 0.01, 1e-9)),
    }  # fmt: skip
    for rule, (num, numbers) in updates.items():
        arrays = tuple([np.abs(flat[k % 4]) + F32(0.1) for k in range(num)])
        names = ("lars_norms", "lars") if rule == "lars" else (rule,)
        made[f"update by {rule}"] = Call(_update(rule, numbers), arrays, names)
    return made


def _of_rows(rng: Any, rows: Any, x: Any, gamma: Any, flat: Any, count: int) -> dict[str, Call]:
    """Softmax, layer normalization, dropout, recurrent layers, and normalization with its running statistics."""
    g, scale, shift = rng.standard_normal(rows.shape).astype(F32), flat[0][:9], flat[1][:9]
    n, u = count // 16, 8
    states = [rng.standard_normal((n, u)).astype(F32) for _ in range(2)]
    z, V = rng.standard_normal((2 * n, 4 * u)).astype(F32), rng.standard_normal((4 * u, u)).astype(F32)
    pixels = np.arange(256, dtype=np.uint8)
    return {
        "softmax": Call(_softmax("softmax"), (rows, g), ("softmax", "softmax_backward")),
        "log_softmax": Call(_softmax("log_softmax"), (rows, g), ("log_softmax", "log_softmax_backward")),
        "layer normalization": Call(
            _layer, (rows, scale, shift, g), ("ln_forward", "ln_backward", "ln_columns")
        ),
        "dropout": Call(_dropout, (rows,), ("dropout",)),
        "linear maps with what follows": Call(
            _after_linear, (rows, scale, g, shift, scale, rows + g), ("relu_dropout", "relu_dropout_backward",
             "dropout_add", "masked", "ln_of_sum", "ln_of_sum_backward", "ln_columns"),
        ),
        "attention": Call(
            _attention, (heads := _plain(rng, 2, max(count // 128, 3), 64), heads[::-1] + F32(1), flat[2][:64]),
            ("split_heads", "merge_heads", "attention_mask", "attention_weights", "attention_weights_backward"),
        ),
        "by_table": Call(_by_table, (np.resize(pixels, (2, 5 * (count // 10), 4)),), ("by_table",)),
        "LSTM": Call(_lstm, (*states, z, V), ("lstm_forward", "lstm_backward")),
        "GRU": Call(
            _gru, (states[0], z[:, : 3 * u].copy(), V[: 3 * u], flat[2][: 3 * u]), ("gru_forward", "gru_backward")
        ),
        "the end of a residual block": Call(
            _residual, (x, gamma, gamma, x + 1, x, gamma * 3, gamma * gamma),
            ("bn_statistics", "bn_apply", "bn_sums", "bn_input_gradient"),
        ),
        "moving statistics": Call(_moved, (x, gamma, gamma, gamma * 3, gamma * gamma), ("bn_statistics",)),
    }  # fmt: skip


def _softmax(name: str) -> Callable[..., Any]:
    def run(x: Any, gy: Any) -> Any:
        y = getattr(kernels, name)(x, 1)
        return y, getattr(kernels, f"{name}_backward")(y, gy, 1)

    return run


def _layer(x: Any, gamma: Any, beta: Any, gy: Any) -> Any:
    y, mean, var = kernels.ln_forward(x, gamma, beta, 1e-5)
    return y, mean, var, *kernels.ln_backward(x, gamma, mean, var, gy, 1e-5)


def _by_table(x: Any) -> Any:
    """Each value in its channel, as numbers; images (N, H W, C) with H = 5."""
    x = x.reshape(2, 5, -1, 4)
    table = np.arange(1024, dtype=F32).reshape(256, 4) / F32(7)
    if isinstance(x, np.ndarray) and type(x).__module__ == "numpy":
        return table[x, np.arange(4)].transpose(0, 3, 1, 2)
    return kernels.by_table(x, backend.device_of(x).send(table))


def _dropout(x: Any) -> Any:
    random.set_stream(2**40 + 5, 3, 7, row=11)
    if type(x) is np.ndarray:
        bits = np.ascontiguousarray(random.raw_words(len(x), 5)).view("<u4")[:, : x.shape[1]]
        mask = (bits >= 2**30).astype(F32) * F32(4 / 3)
        return x * mask, mask
    return kernels.dropout(x, x.shape[1], random.next_draw(len(x), 5), 2**30, float(F32(4 / 3)))


def _after_linear(z: Any, b: Any, r: Any, gamma: Any, beta: Any, gy: Any) -> Any:
    """A bias with ReLU and dropout, with dropout and addition, and with layer normalization besides."""
    random.set_stream(5, 3, 7, row=11)
    if type(z) is np.ndarray:
        m = _dropout(z)[1]
        y, s = np.maximum(z + b, 0) * m, (z + b) * m + r
        mean, var = s.mean(1), s.var(1)
        n, *gradients = _layer(s, gamma, beta, gy)[::3]
        return y, np.where(y != 0, gy * F32(4 / 3), 0), s, m != 0, gy * m, n, mean, var, gradients[0] * m, *gradients
    random.set_stream(2**40 + 5, 3, 7, row=11)
    scale = float(F32(4 / 3))
    drop = random.next_draw(len(z), 5), 2**30, scale
    y = kernels.relu_dropout(z.copy(), b, *drop)
    s, kept = kernels.dropout_add(z.copy(), b, r, *drop)
    n, mean, var, _ = kernels.ln_of_sum(x := z.copy(), b, r, gamma, beta, 1e-5, *drop)
    gz, gs, *_ = kernels.ln_of_sum_backward(x, gamma, mean, var, gy, 1e-5, kept, scale, None, None)
    return (
        y, kernels.relu_dropout_backward(y, gy, scale), s, kept, kernels.masked(gy, kept, scale), n, mean, var, gz, gs,
    )  # fmt: skip


def _attention(x: Any, gy: Any, b: Any) -> Any:
    """Heads of 16 numbers, whose products with themselves are the scores, of causal attention with dropout."""
    heads, length = 4, x.shape[1]
    random.set_stream(5, 3, 7, row=11)
    lines = random.Lines(heads * length, length)
    keys = np.arange(length) % 3 != 1
    if type(x) is np.ndarray:
        q, g = ((a + v).reshape(2, length, heads, 16).transpose(0, 2, 1, 3) for a, v in ((x, b), (gy, 0)))
        seen = keys & np.tri(length, dtype=bool)
        scores = np.where(seen, q @ q.swapaxes(2, 3), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        bits = np.stack([lines.bits(row, 0, heads * length) for row in range(2)]).reshape(p.shape)
        w, gw = p * (bits >= 2**30) * F32(4 / 3), q @ g.swapaxes(2, 3)
        gs = w * gw - p * (w * gw).sum(-1, keepdims=True)
        mask = (bits >= 2**30) * F32(4 / 3)
        return q, g, g.transpose(0, 2, 1, 3).reshape(x.shape), p, w, gs, mask
    q, g = (*kernels.split_heads((x,), (b,), heads), *kernels.split_heads((gy,), (None,), heads))
    host_q, host_g = (np.array(a) for a in (q, g))
    send = backend.device_of(x).send
    made = host_q @ host_q.swapaxes(2, 3), host_q @ host_g.swapaxes(2, 3)
    s, gw = (send(a.reshape(-1)).reshape(a.shape) for a in made)  # in C order
    p, w = kernels.attention_weights(s, send(keys), None, True, lines.draw, 2**30, float(F32(4 / 3)))
    mask = cuda_transformer.mask_of_weights(q, length)(lines.draw, 2**30, float(F32(4 / 3)))
    return q, g, *kernels.merge_heads((g,)), p, w, kernels.attention_weights_backward(p, w, gw), mask


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _lstm(h: Any, c: Any, z: Any, V: Any) -> Any:
    """Two steps; the second one of a third of the examples."""
    n = len(h)
    steps = [(0, n), (n, n // 3)]
    if type(z) is not np.ndarray:
        y, (h, c), kept = kernels.recurrent_forward("lstm", steps, z, V, V[:, 0].copy(), [h, c])
        _compare_backward("lstm", steps, kept, V, y, [h, c])
        return y[: n + n // 3], h, c
    h, c, ys = h.copy(), c.copy(), []
    for start, m in steps:
        a, i, f, o = (z[start : start + m] + h[:m] @ V.T).reshape(m, 4, -1).transpose(1, 0, 2)
        c[:m] = _sigmoid(f) * c[:m] + np.tanh(a) * _sigmoid(i)
        h[:m] = _sigmoid(o) * np.tanh(c[:m])
        ys.append(h[:m].copy())
    return np.concatenate(ys), h, c


def _compare_backward(kind: str, steps: Any, kept: Any, V: Any, gy: Any, gs: Any) -> None:
    """The backward pass against that of the reference."""
    host = [[np.array(a) for a in arrays] for arrays in (kept, gs)]
    of_device, gs = kernels.recurrent_backward(kind, steps, kept, V, gy, own := [g * 1 for g in gs]), own
    expected = numpy_recurrent.recurrent_backward(kind, steps, host[0], np.array(V), np.array(gy), host[1])
    end = sum(steps[-1])
    for a, b in zip([*(g[:end] for g in of_device), *gs], [*(g[:end] for g in expected), *host[1]], strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-3, atol=1e-4)


def _gru(h: Any, z: Any, V: Any, d: Any) -> Any:
    n = len(h)
    steps = [(0, n), (n, n // 3)]
    if type(z) is not np.ndarray:
        y, (h,), kept = kernels.recurrent_forward("gru", steps, z, V, d, [h])
        _compare_backward("gru", steps, kept, V, y, [h])
        return y[: n + n // 3], h
    h, ys = h.copy(), []
    for start, m in steps:
        x_new, x_r, x_z = z[start : start + m].reshape(m, 3, -1).transpose(1, 0, 2)
        h_new, h_r, h_z = (h[:m] @ V.T + d).reshape(m, 3, -1).transpose(1, 0, 2)
        keep = _sigmoid(x_z + h_z)
        h[:m] = (1 - keep) * np.tanh(x_new + _sigmoid(x_r + h_r) * h_new) + keep * h[:m]
        ys.append(h[:m].copy())
    return np.concatenate(ys), h


def _moved(x: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> Any:
    if type(x) is not np.ndarray:
        y = kernels.bn_forward_and_move(x, gamma, beta, 1e-5, False, AXIS, (mean, var), 0.9, (0.1, 0.2))[0]
        return y, mean, var
    y, *of_batch, _ = kernels.bn_forward(x, gamma, beta, 1e-5)
    return y, 0.9 * mean + 0.1 * of_batch[0], 0.9 * var + 0.2 * of_batch[1]


def _plain(rng: Any, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(F32)


def _residual(x: Any, gamma: Any, beta: Any, added: Any, gy: Any, mean: Any, var: Any) -> Any:
    made = kernels.bn_add_relu(x, gamma, beta, added, 1e-5, AXIS, (mean, var), 0.9, (0.1, 0.2))
    if made is None:
        y, *of_batch, saved = kernels.bn_forward(x, gamma, beta, 1e-5)
        y = np.maximum(y + added, 0)
        kernels.bn_move(mean, var, *of_batch, 0.9, (0.1, 0.2))
        g = kernels.relu_backward_of_sum(y, gy, added)
        return y, *of_batch, mean, var, *kernels.bn_backward(x, gamma, *of_batch, g, 1e-5, saved), g
    y, *of_batch, _ = made
    return (
        y, *of_batch, mean, var,
        *kernels.bn_backward_of_sum(x, gamma, *of_batch, y, (gy, added), 1e-5, AXIS),
    )  # fmt: skip


def _two(x: Any, x2: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> Any:
    """The ReLU of a normalization from sums plus that of x2 with running statistics, and gradients of both."""
    count, dtype = x.size // len(gamma), np.dtype(F32)
    flat = x.transpose(1, 0, 2, 3).reshape(len(gamma), -1)
    sums = backend.empty((2, len(gamma)), F32, x)
    sums[0], sums[1] = flat.sum(1), (flat * flat).sum(1)
    running, given = (backend.copy(mean), backend.copy(var)), (mean, var, gamma, beta, 1e-5)
    made = kernels.bn_of_sums(sums, gamma, beta, 1e-5, count, dtype, running, 0.9, (0.1, 0.2))
    if made is not None:
        of_x = *made[:2], gamma, beta, 1e-5
        y = kernels.bn_relu_of_sum(x, of_x, x2, given)
        (gx, *first), (gx2, *second) = kernels.bn_backward_of_two(
            (x, x2), (of_x, given), y, (x, x2), (None,) * 4, False
        )
        return *made, *running, y, gx, *first, gx2, *second
    of_x = kernels.bn_statistics(x, AXIS)
    scale = gamma / np.sqrt(of_x[1] + 1e-5)
    y, _, _, saved = kernels.bn_forward(x, gamma, beta, 1e-5)
    other = kernels.bn_inference(x2, gamma, beta, mean, var, 1e-5)
    y = np.maximum(y + other, 0)
    g = np.where(y > 0, x + x2, 0)
    ggamma, gbeta = kernels.bn_sums(x2, mean, var, g, 1e-5)
    gx2 = kernels.bn_input_gradient(x2, gamma, mean, var, g, ggamma, gbeta, count, 1e-5, AXIS)
    moved = 0.9 * mean + 0.1 * of_x[0], 0.9 * var + 0.2 * of_x[1]
    affine = np.stack([scale, beta - of_x[0] * scale])
    own = kernels.bn_backward(x, gamma, *of_x, g, 1e-5, saved)
    return *of_x, np.concatenate([gamma, beta]), affine, *moved, y, *own, gx2, ggamma, gbeta


def _bn_backward(x: Any, gamma: Any, beta: Any, gy: Any) -> Any:
    _, mean, var, saved = kernels.bn_forward(x, gamma, beta, 1e-5, True)
    return kernels.bn_backward(x, gamma, mean, var, gy, 1e-5, saved, True)


def _pooled(x: Any, geometry: Any) -> Any:
    y, saved = kernels.pool_forward(x, geometry)
    return y, kernels.pool_backward(y * 0.5, x.shape, saved, geometry)


def _cross_entropy(x: Any, t: Any) -> Any:
    y, saved = kernels.cross_entropy(x, t, -1, 0)
    return y, kernels.cross_entropy_backward(x, t, saved, y * 0 + 1, -1)


_SAME = ConvGeometry(1, 1, 1, 1)


def _convolution(x: Any, W: Any, gy: Any) -> Any:
    y = kernels.conv_forward(x, W, None, _SAME)
    gx = kernels.conv_backward_data(gy, W, x.shape, _SAME)
    return y, gx, kernels.conv_backward_weight(x, gy, W.shape, _SAME)


def _later(x: Any, W: Any, gy: Any) -> Any:
    """Two gradients in one launch."""
    if type(x) is np.ndarray:
        return [kernels.conv_backward_weight(x, gy, W.shape, _SAME)] * 2
    outs = [backend.empty((W.size,), W.dtype, W).reshape(W.shape) for _ in range(2)]
    made = [kernels.conv_backward_weight_later(x, gy, W.shape, _SAME, out) for out in outs]
    made[0][0]([piece for _, piece in made])
    return outs


def _together(*weights: Any) -> Any:
    """Those of a convolution and of a linear layer, in one launch."""
    numbers = [(len(W), W.shape[1], W.size // (len(W) * W.shape[1]), W.shape[1]) for W in weights]
    if type(weights[0]) is np.ndarray:
        return [W.reshape(o, i, k).transpose(0, 2, 1).ravel() for W, (o, i, k, _) in zip(weights, numbers)]
    layouts = [FilterLayout(W.dtype, W.dtype, four) for W, four in zip(weights, numbers)]
    return layouts[0].together([(layout, W.copy("C")) for layout, W in zip(layouts, weights)])  # as in flat memory


def _stem(x: Any, W: Any) -> Any:
    return kernels.conv_forward(x, W, None, _SAME)


def _update(rule: str, numbers: Any) -> Callable[..., Any]:
    def run(*arrays: Any) -> Any:
        done = kernels.update(rule, (*arrays,), numbers)
        assert done, f"no kernel of the rule {rule}"
        return arrays

    return run
