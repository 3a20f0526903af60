"""Every differentiable function against Chainer 7.8.1 on NumPy 1.23: forward and backward, float32, one thread.

The same call runs on both sides, at sizes of Chainer's examples. Goal: none above 1.2 of Chainer's time, the median at
most 0.5. Views are above it by intent: a leaf copies a gradient that is a view of the one that the caller gave (in
transpose, moveaxis, rollaxis, swapaxes, concat, stack and add), so that changing one leaves the other as it is; Chainer
hands the caller's own array on.

The peer's environment: ``pip install "numpy==1.23.5" "scipy==1.10.1" "setuptools<70"``, then ``pip install
--no-build-isolation chainer==7.8.1``. SciPy is needed on both sides.

    python benchmarks/vocabulary.py --chainer-python CHAINER_VENV/bin/python --record
    python benchmarks/vocabulary.py --chainer-python CHAINER_VENV/bin/python --only relu lstm
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import harness

# Floating operands, which take gradients: shape and what they hold. A call names those that it takes.
OPERANDS: dict[str, tuple[tuple[int, ...], str]] = {
    # the activations of Chainer's MNIST example
    **dict.fromkeys(("m", "m1", "m2"), ((100, 1000), "any")),
    **dict.fromkeys(("p", "p1"), ((100, 1000), "positive")),
    "inner": ((100, 1000), "inner"),
    "unit": ((100, 1000), "unit"),
    "row": ((1000,), "any"),
    "row1": ((1000,), "any"),
    "row_p": ((1000,), "positive"),
    "scalar": ((), "any"),
    "w": ((1000, 1000), "any"),
    "w_bias": ((1000,), "any"),
    "scores": ((100, 10), "any"),
    "flat": ((100,), "any"),
    "flat1": ((100,), "any"),
    # images
    "x": ((32, 32, 28, 28), "any"),
    "x1": ((32, 32, 28, 28), "any"),
    "small": ((32, 32, 14, 14), "any"),
    "x_w": ((32, 32, 3, 3), "any"),
    "x_w_grouped": ((32, 8, 3, 3), "any"),
    "x_w_depth": ((2, 32, 3, 3), "any"),
    "x_b": ((32,), "any"),
    "x_b1": ((32,), "any"),
    "x_b_depth": ((64,), "any"),
    "x_mean": ((32,), "any"),
    "x_var": ((32,), "positive"),
    "channels": ((32,), "any"),
    "local_w": ((8, 12, 12, 32, 3, 3), "inner"),
    "offset": ((32, 18, 14, 14), "inner"),
    "theta": ((32, 2, 3), "inner"),
    "grid": ((32, 2, 28, 28), "inner"),
    "line": ((32, 32, 256), "any"),
    "line_w": ((32, 32, 3), "any"),
    "line_b": ((32,), "any"),
    "cube": ((4, 8, 12, 12, 12), "any"),
    "cube_w": ((8, 8, 3, 3, 3), "any"),
    "cube_b": ((8,), "any"),
    # matrices
    "square": ((64, 64), "regular"),
    "squares": ((32, 16, 16), "regular"),
    "a3": ((32, 40, 50), "any"),
    "b3": ((32, 50, 30), "any"),
    "left": ((32, 40), "any"),
    "right": ((32, 50), "any"),
    "w3": ((40, 50, 20), "any"),
    "v1": ((40, 20), "any"),
    "v2": ((50, 20), "any"),
    "vb": ((20,), "any"),
    "projection": ((2, 16, 16), "any"),
    "embeddings": ((4, 4, 32, 32), "any"),
    # sequences: PTB's 20 by 650
    "cell": ((20, 650), "any"),
    "cell1": ((20, 650), "any"),
    "gates": ((20, 2600), "any"),
    "gates1": ((20, 2600), "any"),
    "tree_gates": ((20, 3250), "any"),
    "table": ((10000, 650), "any"),
    "h": ((1, 20, 100), "any"),
    "c": ((1, 20, 100), "any"),
    "h2": ((2, 20, 100), "any"),
    "c2": ((2, 20, 100), "any"),
    "big_w": ((10000, 100), "inner"),
    "embedded": ((20, 100), "any"),
    "cost": ((9, 9), "any"),
    "probabilities": ((20, 30), "any"),
}
_BOUNDS = {"any": (-2.0, 2.0), "positive": (0.3, 2.0), "inner": (-0.9, 0.9), "unit": (0.05, 0.95)}

_ROIS = "rois, roi_places, (7, 7), 1.0"
CASES: dict[str, str] = {
    "absolute": "F.absolute(m)",
    "absolute_error": "F.absolute_error(m, m1)",
    "accuracy": "F.accuracy(scores, t)",
    "add": "F.add(m, m1)",
    "arccos": "F.arccos(inner)",
    "arcsin": "F.arcsin(inner)",
    "arctan": "F.arctan(m)",
    "arctan2": "F.arctan2(m, p)",
    "arctanh": "F.arctanh(inner)",
    "argmax": "F.argmax(m, 1)",
    "argmax_crf1d": "F.argmax_crf1d(cost, tags)[0]",
    "argmin": "F.argmin(m, 1)",
    "as_strided": "F.as_strided(m, (100, 500), (1000, 2), 0)",
    "average": "F.average(m, 1)",
    "average_pooling_1d": "F.average_pooling_1d(line, 2)",
    "average_pooling_2d": "F.average_pooling_2d(x, 2)",
    "average_pooling_3d": "F.average_pooling_3d(cube, 2)",
    "average_pooling_nd": "F.average_pooling_nd(cube, 2)",
    "batch_det": "F.batch_det(squares)",
    "batch_inv": "F.batch_inv(squares)",
    "batch_l2_norm_squared": "F.batch_l2_norm_squared(m)",
    "batch_matmul": "F.batch_matmul(a3, b3)",
    "batch_normalization": "F.batch_normalization(x, x_b, x_b1)",
    "batch_renormalization": (
        "F.batch_renormalization(x, x_b, x_b1, 3.0, 5.0, running_mean=zeros32, running_var=ones32)"
    ),
    "bernoulli_nll": "F.bernoulli_nll(unit, m)",
    "bias": "F.bias(x, channels)",
    "bilinear": "F.bilinear(left, right, w3, v1, v2, vb)",
    "binary_accuracy": "F.binary_accuracy(m, bits)",
    "black_out": "F.black_out(embedded, words20, big_w, negatives)",
    "broadcast": "F.broadcast(m, row)",
    "broadcast_to": "F.broadcast_to(row, (100, 1000))",
    "cast": "F.cast(m, np.float64)",
    "ceil": "F.ceil(m)",
    "cholesky": "F.cholesky(square)",
    "classification_summary": "F.classification_summary(scores, t)[0]",
    "clip": "F.clip(m, -1.0, 1.0)",
    "clipped_relu": "F.clipped_relu(m, 1.0)",
    "concat": "F.concat((m, m1), 1)",
    "connectionist_temporal_classification": "F.connectionist_temporal_classification(frames, ctc_t, 0)",
    "contrastive": "F.contrastive(m, m1, pairs)",
    "convolution_1d": "F.convolution_1d(line, line_w, line_b, pad=1)",
    "convolution_2d": "F.convolution_2d(x, x_w, x_b, pad=1)",
    "convolution_3d": "F.convolution_3d(cube, cube_w, cube_b, pad=1)",
    "convolution_nd": "F.convolution_nd(cube, cube_w, cube_b, pad=1)",
    "copy": "F.copy(m, '@numpy')",
    "cos": "F.cos(m)",
    "cosh": "F.cosh(m)",
    "crelu": "F.crelu(m)",
    "crf1d": "F.crf1d(cost, tags, tag_ids)",
    "cross_covariance": "F.cross_covariance(scores, m)",
    "cumprod": "F.cumprod(p, 1)",
    "cumsum": "F.cumsum(m, 1)",
    "deconvolution_1d": "F.deconvolution_1d(line, line_w, line_b, pad=1)",
    "deconvolution_2d": "F.deconvolution_2d(x, x_w, x_b, pad=1)",
    "deconvolution_3d": "F.deconvolution_3d(cube, cube_w, cube_b, pad=1)",
    "deconvolution_nd": "F.deconvolution_nd(cube, cube_w, cube_b, pad=1)",
    "decorrelated_batch_normalization": "F.decorrelated_batch_normalization(small, groups=2)",
    "decov": "F.decov(m)",
    "deformable_convolution_2d_sampler": "F.deformable_convolution_2d_sampler(small, offset, x_w, x_b, pad=1)",
    "depth2space": "F.depth2space(x, 2)",
    "depthwise_convolution_2d": "F.depthwise_convolution_2d(x, x_w_depth, x_b_depth, pad=1)",
    "det": "F.det(square)",
    "diagonal": "F.diagonal(a3, 0, 1, 2)",
    "digamma": "F.digamma(p)",
    "dilated_convolution_2d": "F.dilated_convolution_2d(x, x_w, x_b, pad=2, dilate=2)",
    "discriminative_margin_based_clustering_loss": (
        "F.discriminative_margin_based_clustering_loss(embeddings, segments, 0.5, 1.5, 4)[0]"
    ),
    "dropout": "F.dropout(m)",
    "dstack": "F.dstack((m, m1))",
    "einsum": "F.einsum('ij,jk->ik', m, w)",
    "elu": "F.elu(m)",
    "embed_id": "F.embed_id(words, table)",
    "erf": "F.erf(m)",
    "erfc": "F.erfc(m)",
    "erfcinv": "F.erfcinv(unit)",
    "erfcx": "F.erfcx(m)",
    "erfinv": "F.erfinv(inner)",
    "exp": "F.exp(m)",
    "expand_dims": "F.expand_dims(m, 1)",
    "expm1": "F.expm1(m)",
    "f1_score": "F.f1_score(scores, t)[0]",
    "fft": "F.fft((m, m1))",
    "fix": "F.fix(m)",
    "fixed_batch_normalization": "F.fixed_batch_normalization(x, x_b, x_b1, zeros32, ones32)",
    "fixed_batch_renormalization": "F.fixed_batch_renormalization(x, x_b, x_b1, zeros32, ones32)",
    "fixed_decorrelated_batch_normalization": (
        "F.fixed_decorrelated_batch_normalization(small, zeros2x16, eyes2x16, groups=2)"
    ),
    "flatten": "F.flatten(m)",
    "flip": "F.flip(m, 1)",
    "fliplr": "F.fliplr(m)",
    "flipud": "F.flipud(m)",
    "floor": "F.floor(m)",
    "fmod": "F.fmod(m, p)",
    "forget": "F.forget(F.tanh, m)",
    "gaussian": "F.gaussian(m, m1)",
    "gaussian_kl_divergence": "F.gaussian_kl_divergence(m, m1)",
    "gaussian_nll": "F.gaussian_nll(m, m1, m2)",
    "get_item": "F.get_item(m, (slice(10, 90), slice(None, None, 2)))",
    "group_normalization": "F.group_normalization(x, 8, x_b, x_b1)",
    "gumbel_softmax": "F.gumbel_softmax(m)",
    "hard_sigmoid": "F.hard_sigmoid(m)",
    "hinge": "F.hinge(scores, t)",
    "hstack": "F.hstack((m, m1))",
    "huber_loss": "F.huber_loss(m, m1, 1.0)",
    "identity": "F.identity(m)",
    "ifft": "F.ifft((m, m1))",
    "im2col": "F.im2col(x, 3, pad=1)",
    "inv": "F.inv(square)",
    "layer_normalization": "F.layer_normalization(m, row, row1)",
    "leaky_relu": "F.leaky_relu(m)",
    "lgamma": "F.lgamma(p)",
    "linear": "F.linear(m, w, w_bias)",
    "linear_interpolate": "F.linear_interpolate(unit, m, m1)",
    "local_convolution_2d": "F.local_convolution_2d(small, local_w)",
    "local_response_normalization": "F.local_response_normalization(x)",
    "log": "F.log(p)",
    "log10": "F.log10(p)",
    "log1p": "F.log1p(p)",
    "log2": "F.log2(p)",
    "log_ndtr": "F.log_ndtr(m)",
    "log_softmax": "F.log_softmax(m)",
    "logsumexp": "F.logsumexp(m, 1)",
    "lstm": "F.lstm(cell, gates)",
    "matmul": "F.matmul(m, w)",
    "max": "F.max(m, 1)",
    "max_pooling_1d": "F.max_pooling_1d(line, 2)",
    "max_pooling_2d": "F.max_pooling_2d(x, 2)",
    "max_pooling_3d": "F.max_pooling_3d(cube, 2)",
    "max_pooling_nd": "F.max_pooling_nd(cube, 2)",
    "maximum": "F.maximum(m, m1)",
    "maxout": "F.maxout(m, 4)",
    "mean": "F.mean(m, 1)",
    "mean_absolute_error": "F.mean_absolute_error(m, m1)",
    "mean_squared_error": "F.mean_squared_error(m, m1)",
    "min": "F.min(m, 1)",
    "minimum": "F.minimum(m, m1)",
    "moveaxis": "F.moveaxis(x, 1, 3)",
    "n_step_bigru": "F.n_step_bigru(1, 0.0, h2, both_gru_ws, both_gru_bs, steps)[0]",
    "n_step_bilstm": "F.n_step_bilstm(1, 0.0, h2, c2, both_lstm_ws, both_lstm_bs, steps)[0]",
    "n_step_birnn": "F.n_step_birnn(1, 0.0, h2, both_rnn_ws, both_rnn_bs, steps)[0]",
    "n_step_gru": "F.n_step_gru(1, 0.0, h, gru_ws, gru_bs, steps)[0]",
    "n_step_lstm": "F.n_step_lstm(1, 0.0, h, c, lstm_ws, lstm_bs, steps)[0]",
    "n_step_rnn": "F.n_step_rnn(1, 0.0, h, rnn_ws, rnn_bs, steps)[0]",
    "ndtr": "F.ndtr(m)",
    "ndtri": "F.ndtri(unit)",
    "negative_sampling": "F.negative_sampling(embedded, words20, big_w, sampler, 5)",
    "normalize": "F.normalize(m)",
    "pad": "F.pad(m, ((2, 2), (3, 3)), 'constant')",
    "pad_sequence": "F.pad_sequence(steps_back)",
    "permutate": "F.permutate(m, order)",
    "polygamma": "F.polygamma(ones, p)",
    "precision": "F.precision(scores, t)[0]",
    "prelu": "F.prelu(m, row)",
    "prod": "F.prod(scores, 1)",
    "r2_score": "F.r2_score(m, m1)",
    "recall": "F.recall(scores, t)[0]",
    "relu": "F.relu(m)",
    "relu6": "F.relu6(m)",
    "repeat": "F.repeat(m, 2, 1)",
    "reshape": "F.reshape(m, (1000, 100))",
    "resize_images": "F.resize_images(x, (40, 40))",
    "roi_average_align_2d": f"F.roi_average_align_2d(x, {_ROIS}, 2)",
    "roi_average_pooling_2d": f"F.roi_average_pooling_2d(x, {_ROIS})",
    "roi_max_align_2d": f"F.roi_max_align_2d(x, {_ROIS}, 2)",
    "roi_max_pooling_2d": f"F.roi_max_pooling_2d(x, {_ROIS})",
    "roi_pooling_2d": "F.roi_pooling_2d(x, rois5, 7, 7, 1.0)",
    "rollaxis": "F.rollaxis(x, 3, 1)",
    "rrelu": "F.rrelu(m)",
    "rsqrt": "F.rsqrt(p)",
    "scale": "F.scale(x, channels)",
    "scatter_add": "F.scatter_add(m, (slice(0, 50),), halves)",
    "select_item": "F.select_item(scores, t)",
    "selu": "F.selu(m)",
    "separate": "F.separate(scores, 1)",
    "shift": "F.shift(x)",
    "sigmoid": "F.sigmoid(m)",
    "sigmoid_cross_entropy": "F.sigmoid_cross_entropy(m, bits)",
    "sign": "F.sign(m)",
    "simplified_dropconnect": "F.simplified_dropconnect(scores, drop_w, drop_b)",
    "sin": "F.sin(m)",
    "sinh": "F.sinh(m)",
    "slstm": "F.slstm(cell, cell1, gates, gates1)",
    "softmax": "F.softmax(m)",
    "softmax_cross_entropy": "F.softmax_cross_entropy(m, t1000)",
    "softplus": "F.softplus(m)",
    "space2depth": "F.space2depth(x, 2)",
    "sparse_matmul": "F.sparse_matmul(sparse, w)",
    "spatial_pyramid_pooling_2d": "F.spatial_pyramid_pooling_2d(x, 3, 'max')",
    "spatial_transformer_grid": "F.spatial_transformer_grid(theta, (28, 28))",
    "spatial_transformer_sampler": "F.spatial_transformer_sampler(x, grid)",
    "split_axis": "F.split_axis(m, 4, 1)",
    "sqrt": "F.sqrt(p)",
    "square": "F.square(m)",
    "squared_difference": "F.squared_difference(m, m1)",
    "squared_error": "F.squared_error(m, m1)",
    "squeeze": "F.squeeze(h)",
    "stack": "F.stack((m, m1))",
    "sum": "F.sum(m, 1)",
    "sum_to": "F.sum_to(m, (1, 1000))",
    "swapaxes": "F.swapaxes(x, 1, 2)",
    "swish": "F.swish(m, row)",
    "tan": "F.tan(inner)",
    "tanh": "F.tanh(m)",
    "tensordot": "F.tensordot(a3, w3, ((1, 2), (0, 1)))",
    "tile": "F.tile(m, (1, 2))",
    "transpose": "F.transpose(x, (0, 2, 3, 1))",
    "transpose_sequence": "F.transpose_sequence(steps_back)",
    "tree_lstm": "F.tree_lstm(cell, cell1, tree_gates)",
    "triplet": "F.triplet(m, m1, m2)",
    "unpooling_1d": "F.unpooling_1d(line, 2)",
    "unpooling_2d": "F.unpooling_2d(small, 2)",
    "unpooling_3d": "F.unpooling_3d(cube, 2)",
    "unpooling_nd": "F.unpooling_nd(cube, 2)",
    "upsampling_2d": "F.upsampling_2d(small, indexes, 2)",
    "vstack": "F.vstack((m, m1))",
    "where": "F.where(holds, m, m1)",
    "zeta": "F.zeta(p2, p)",
    "zoneout": "F.zoneout(m, m1)",
}


def drawn(shape: tuple[int, ...], kind: str, rng: Any) -> Any:
    """Numbers of float32: the same on both sides."""
    import numpy as np

    if kind == "regular":
        a = rng.uniform(-0.5, 0.5, shape) / shape[-1]
        return (a + np.swapaxes(a, -1, -2) + np.eye(shape[-1])).astype(np.float32)
    return np.asarray(rng.uniform(*_BOUNDS[kind], shape), np.float32)


def other_arguments(framework: Any) -> dict[str, Any]:
    """Labels, places, weights in lists and what else a call takes that is no plain floating operand."""
    import numpy as np

    rng = np.random.default_rng(1)
    variable = framework.Variable

    def floats(*shape: int) -> Any:
        return variable(rng.uniform(-0.1, 0.1, shape).astype(np.float32))

    def weights(num_gates: int, num_halves: int = 1) -> tuple[Any, Any]:
        ws = [[floats(100, 100) for _ in range(2 * num_gates)] for _ in range(num_halves)]
        return ws, [[floats(100) for _ in range(2 * num_gates)] for _ in range(num_halves)]

    scope: dict[str, Any] = {
        "np": np,
        "F": framework.functions,
        "t": rng.integers(0, 10, 100).astype(np.int32),
        "t1000": rng.integers(0, 1000, 100).astype(np.int32),
        "bits": rng.integers(0, 2, (100, 1000)).astype(np.int32),
        "pairs": rng.integers(0, 2, 100).astype(np.int32),
        "holds": rng.integers(0, 2, (100, 1000)).astype(bool),
        "order": rng.permutation(100).astype(np.int32),
        "words": rng.integers(0, 10000, (20, 35)).astype(np.int32),
        "words20": rng.integers(0, 10000, 20).astype(np.int32),
        "negatives": rng.integers(0, 10000, (20, 5)).astype(np.int32),
        "segments": rng.integers(0, 4, (4, 32, 32)).astype(np.int32),
        "indexes": rng.integers(0, 4, (32, 32, 14, 14)).astype(np.int32),
        "zeros32": np.zeros(32, np.float32),
        "ones32": np.ones(32, np.float32),
        "zeros2x16": np.zeros((2, 16), np.float32),
        "eyes2x16": np.stack([np.eye(16, dtype=np.float32)] * 2),
        "ones": np.ones((100, 1000), np.int32),
        "p2": np.full((100, 1000), 2.0, np.float32),
        "halves": floats(50, 1000),
        "drop_w": floats(100, 10),
        "drop_b": floats(100),
        "steps": [floats(20, 100) for _ in range(20)],
        "steps_back": [floats(n, 100) for n in range(40, 20, -1)],
        "frames": [floats(20, 30) for _ in range(30)],
        "ctc_t": rng.integers(1, 30, (20, 8)).astype(np.int32),
        "tags": [floats(32, 9) for _ in range(20)],
        "tag_ids": [rng.integers(0, 9, 32).astype(np.int32) for _ in range(20)],
        "sampler": lambda shape: rng.integers(0, 10000, shape).astype(np.int32),
    }
    corners = np.sort(rng.integers(0, 28, (4, 2, 2)), 1).astype(np.float32)
    scope["rois"] = corners.reshape(4, 4)
    scope["roi_places"] = np.arange(4, dtype=np.int32)
    scope["rois5"] = np.concatenate([scope["roi_places"][:, None], corners[:, :, ::-1].reshape(4, 4)], 1)
    scope["rois5"] = scope["rois5"].astype(np.float32)
    dense = rng.uniform(-1, 1, (100, 1000)) * (rng.uniform(0, 1, (100, 1000)) < 0.05)
    scope["sparse"] = framework.utils.to_coo(dense.astype(np.float32), requires_grad=True)
    for name, gates in (("rnn", 1), ("lstm", 4), ("gru", 3)):
        scope[f"{name}_ws"], scope[f"{name}_bs"] = weights(gates)
        scope[f"both_{name}_ws"], scope[f"both_{name}_bs"] = weights(gates, 2)
    return scope


def _case(framework: Any, name: str) -> Callable[[], Any]:
    import numpy as np

    warnings.simplefilter("ignore")
    expression = CASES[name]
    rng = np.random.default_rng(0)
    arrays = {n: drawn(*spec, rng) for n, spec in OPERANDS.items()}
    taken = [n for n in re.findall(r"\b[a-z]\w*\b", expression) if n in OPERANDS]
    variables = [framework.Variable(arrays[n]) for n in taken]
    scope = {**other_arguments(framework), **dict(zip(taken, variables))}
    code = compile(expression, name, "eval")

    def outputs() -> list[Any]:
        ys = eval(code, scope)
        return [y for y in (ys if isinstance(ys, (tuple, list)) else [ys]) if isinstance(y, framework.Variable)]

    seen = outputs()
    gys = [framework.Variable(np.ones(y.shape, y.dtype)) for y in seen]
    has_gradient = all(y.creator is not None and y.dtype.kind == "f" for y in seen) and seen

    def step() -> None:
        for v in variables:
            v.cleargrad()
        ys = outputs()
        if has_gradient:
            framework.backward(ys, gys)

    return step


def dbrdist_case(name: str) -> Callable[[], Any]:
    """Forward and backward with dbrdist."""
    import dbrdist
    import dbrdist.functions
    import dbrdist.utils

    return _case(dbrdist, name)


def chainer_case(name: str) -> Callable[[], Any]:
    """The same with Chainer, which looks for NumPy's functions in its backends first."""
    import chainer

    return _case(chainer, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chainer-python", required=True, help="interpreter of an environment that has Chainer")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="these functions alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.03, help="of each sample")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=["dbrdist", "chainer"], help=argparse.SUPPRESS)
    args = parser.parse_args([*sys.argv[1:], *(["--chainer-python", ""] if "--worker" in sys.argv else [])])
    if args.worker:
        harness.serve({"function": dbrdist_case if args.worker == "dbrdist" else chainer_case})
        return
    workers = {
        "dbrdist": harness.Worker(sys.executable, __file__, "dbrdist"),
        "chainer": harness.Worker(args.chainer_python, __file__, "chainer"),
    }
    results: dict[str, Any] = {}
    ratios = {}
    for name in args.only:
        measured = harness.compare(
            workers, "function", num_rounds=args.rounds, min_seconds=args.seconds, arguments={"name": name}
        )
        pairs = zip(measured["dbrdist"]["samples"], measured["chainer"]["samples"])
        ratios[name] = statistics.median(a / b for a, b in pairs)
        results[name] = {**measured, "ratio": ratios[name]}
        words = [f"{label} {r['median_seconds'] * 1e3:8.3f} ms" for label, r in measured.items()]
        print(f"{name:<44}", "  ".join(words), f"  ratio {ratios[name]:5.2f}", flush=True)
    results["median_ratio"] = statistics.median(ratios.values())
    results["above_goal"] = {n: r for n, r in ratios.items() if r > 1.2}
    print(f"median ratio {results['median_ratio']:.2f} of {len(ratios)}; above 1.2:")
    for name, ratio in sorted(results["above_goal"].items(), key=lambda item: -item[1]):
        print(f"  {name} {ratio:.2f}")
    about = {label: w.ask("about")["versions"] for label, w in workers.items()}
    for w in workers.values():
        w.close()
    if args.record:
        settings = {"num_rounds": args.rounds, "min_seconds": args.seconds}
        print(harness.record("vocabulary", settings, results, about))


if __name__ == "__main__":
    main()
