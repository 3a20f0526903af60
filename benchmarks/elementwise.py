"""Elementwise functions, activations, losses and reductions against PyTorch: forward and backward of 2^20 float32.

One thread; each function alternates with the peers. Goal: each at most 1.2 of PyTorch's time, the median at most 0.85;
the median at most 1.0 of the time of ``torch.compile``.

    python benchmarks/elementwise.py --torch-python TORCH_VENV/bin/python --record
    python benchmarks/elementwise.py --torch-python TORCH_VENV/bin/python --only leaky_relu huber_loss
    python benchmarks/elementwise.py --torch-python TORCH_VENV/bin/python --compile-only    # once: fills its cache
    python benchmarks/elementwise.py --torch-python TORCH_VENV/bin/python --compiled --record
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import harness

ROWS, COLUMNS = 1024, 1024
IMAGES = 16, 16, 64, 64
# name: number of floating operands, what they hold, dbrdist's call, PyTorch's call (t: integer labels)
CASES: dict[str, tuple[int, str, str, str]] = {
    "add": (2, "any", "a + b", "a + b"),
    "sub": (2, "any", "a - b", "a - b"),
    "mul": (2, "any", "a * b", "a * b"),
    "div": (2, "positive", "a / b", "a / b"),
    "pow": (2, "positive", "a ** b", "a ** b"),
    "pow_number": (1, "positive", "a ** 3", "a ** 3"),
    "neg": (1, "any", "-a", "-a"),
    "absolute": (1, "any", "F.absolute(a)", "torch.abs(a)"),
    "maximum": (2, "any", "F.maximum(a, b)", "torch.maximum(a, b)"),
    "minimum": (2, "any", "F.minimum(a, b)", "torch.minimum(a, b)"),
    "clip": (1, "any", "F.clip(a, -0.5, 0.5)", "torch.clamp(a, -0.5, 0.5)"),
    "squared_difference": (2, "any", "F.squared_difference(a, b)", "(a - b) ** 2"),
    "exp": (1, "any", "F.exp(a)", "torch.exp(a)"),
    "expm1": (1, "any", "F.expm1(a)", "torch.expm1(a)"),
    "log": (1, "positive", "F.log(a)", "torch.log(a)"),
    "log1p": (1, "positive", "F.log1p(a)", "torch.log1p(a)"),
    "log2": (1, "positive", "F.log2(a)", "torch.log2(a)"),
    "log10": (1, "positive", "F.log10(a)", "torch.log10(a)"),
    "sqrt": (1, "positive", "F.sqrt(a)", "torch.sqrt(a)"),
    "rsqrt": (1, "positive", "F.rsqrt(a)", "torch.rsqrt(a)"),
    "square": (1, "any", "F.square(a)", "torch.square(a)"),
    "sin": (1, "any", "F.sin(a)", "torch.sin(a)"),
    "cos": (1, "any", "F.cos(a)", "torch.cos(a)"),
    "tan": (1, "inner", "F.tan(a)", "torch.tan(a)"),
    "arcsin": (1, "inner", "F.arcsin(a)", "torch.asin(a)"),
    "arccos": (1, "inner", "F.arccos(a)", "torch.acos(a)"),
    "arctan": (1, "any", "F.arctan(a)", "torch.atan(a)"),
    "arctan2": (2, "any", "F.arctan2(a, b)", "torch.atan2(a, b)"),
    "arctanh": (1, "inner", "F.arctanh(a)", "torch.atanh(a)"),
    "sinh": (1, "any", "F.sinh(a)", "torch.sinh(a)"),
    "cosh": (1, "any", "F.cosh(a)", "torch.cosh(a)"),
    "tanh": (1, "any", "F.tanh(a)", "torch.tanh(a)"),
    "sigmoid": (1, "any", "F.sigmoid(a)", "torch.sigmoid(a)"),
    "relu": (1, "any", "F.relu(a)", "f.relu(a)"),
    "leaky_relu": (1, "any", "F.leaky_relu(a)", "f.leaky_relu(a, 0.2)"),
    "elu": (1, "any", "F.elu(a)", "f.elu(a)"),
    "selu": (1, "any", "F.selu(a)", "f.selu(a)"),
    "softplus": (1, "any", "F.softplus(a)", "f.softplus(a)"),
    "clipped_relu": (1, "any", "F.clipped_relu(a, 0.5)", "f.hardtanh(a, 0.0, 0.5)"),
    "relu6": (1, "any", "F.relu6(a)", "f.relu6(a)"),
    "hard_sigmoid": (1, "any", "F.hard_sigmoid(a)", "torch.clamp(a * 0.2 + 0.5, 0.0, 1.0)"),
    "swish": (1, "any", "F.swish(a, ones)", "f.silu(a)"),
    "silu": (1, "any", "F.silu(a)", "f.silu(a)"),
    "mish": (1, "any", "F.mish(a)", "f.mish(a)"),
    "hardswish": (1, "any", "F.hardswish(a)", "f.hardswish(a)"),
    "gelu": (1, "any", "F.gelu(a)", "f.gelu(a)"),
    "gelu_tanh": (1, "any", "F.gelu(a, 'tanh')", "f.gelu(a, approximate='tanh')"),
    "crelu": (1, "any", "F.crelu(a)", "torch.cat((f.relu(a), f.relu(-a)), 1)"),
    "softmax": (1, "any", "F.softmax(a)", "f.softmax(a, 1)"),
    "log_softmax": (1, "any", "F.log_softmax(a)", "f.log_softmax(a, 1)"),
    "logsumexp": (1, "any", "F.logsumexp(a, 1)", "torch.logsumexp(a, 1)"),
    "softmax_cross_entropy": (1, "any", "F.softmax_cross_entropy(a, t)", "f.cross_entropy(a, t)"),
    "sigmoid_cross_entropy": (
        1, "any", "F.sigmoid_cross_entropy(a, u)", "f.binary_cross_entropy_with_logits(a, u.float())",
    ),
    "mean_squared_error": (2, "any", "F.mean_squared_error(a, b)", "f.mse_loss(a, b)"),
    "mean_absolute_error": (2, "any", "F.mean_absolute_error(a, b)", "f.l1_loss(a, b)"),
    "squared_error": (2, "any", "F.squared_error(a, b)", "f.mse_loss(a, b, reduction='none')"),
    "absolute_error": (2, "any", "F.absolute_error(a, b)", "f.l1_loss(a, b, reduction='none')"),
    "huber_loss": (2, "any", "F.huber_loss(a, b, 0.6, 'no')", "f.huber_loss(a, b, reduction='none', delta=0.6)"),
    "hinge": (1, "any", "F.hinge(a, t)", "(1 + a * sign).clamp(min=0).sum() / 1024"),
    "bernoulli_nll": (
        2, "positive", "F.bernoulli_nll(a, b)", "f.binary_cross_entropy_with_logits(b, a, reduction='sum')",
    ),
    "gaussian_kl_divergence": (
        2, "any", "F.gaussian_kl_divergence(a, b)", "((a * a + b.exp() - b - 1) * 0.5).sum()",
    ),
    "gaussian_nll": (
        3, "any", "F.gaussian_nll(a, b, c)",
        "(((a - b) ** 2 * (-c).exp() + c + 1.8378770664093453) * 0.5).sum()",
    ),
    "pow_half": (1, "positive", "a ** 0.5", "a ** 0.5"),
    "pow_minus_one": (1, "positive", "a ** -1", "a ** -1"),
    "pow_minus_half": (1, "positive", "a ** -0.5", "a ** -0.5"),
    "pow_2.5": (1, "positive", "a ** 2.5", "a ** 2.5"),
    "fmod": (2, "positive", "F.fmod(a, b)", "torch.fmod(a, b)"),
    "remainder": (2, "positive", "a % b", "a % b"),
    "erf": (1, "any", "F.erf(a)", "torch.erf(a)"),
    "erfc": (1, "any", "F.erfc(a)", "torch.erfc(a)"),
    "erfinv": (1, "inner", "F.erfinv(a)", "torch.erfinv(a)"),
    "ndtr": (1, "any", "F.ndtr(a)", "torch.special.ndtr(a)"),
    "ndtri": (1, "unit", "F.ndtri(a)", "torch.special.ndtri(a)"),
    "log_ndtr": (1, "any", "F.log_ndtr(a)", "torch.special.log_ndtr(a)"),
    "lgamma": (1, "positive", "F.lgamma(a)", "torch.lgamma(a)"),
    "digamma": (1, "positive", "F.digamma(a)", "torch.digamma(a)"),
    "where": (2, "any", "F.where(u > 0, a, b)", "torch.where(u > 0, a, b)"),
    "maxout": (1, "any", "F.maxout(a, 4)", "a.reshape(1024, 256, 4).amax(2)"),
    "swish_rows": (2, "any", "F.swish(a, b[0])", "a * torch.sigmoid(a * b[0])"),
    "prelu": (2, "any", "F.prelu(a, b[0])", "f.prelu(a, b[0])"),
    "rrelu": (1, "any", "F.rrelu(a)", "f.rrelu(a, training=True)"),
    "normalize": (1, "any", "F.normalize(a)", "f.normalize(a, dim=1, eps=1e-5)"),
    "gaussian": (2, "any", "F.gaussian(a, b)", "a + torch.exp(b * 0.5) * torch.randn_like(a)"),
    "cumsum": (1, "any", "F.cumsum(a, 1)", "torch.cumsum(a, 1)"),
    "dropout": (1, "any", "F.dropout(a)", "f.dropout(a)"),
    "sum": (1, "any", "F.sum(a)", "a.sum()"),
    "mean": (1, "any", "F.mean(a)", "a.mean()"),
    "max": (1, "any", "F.max(a, 1)", "a.amax(1)"),
    "add_three": (3, "any", "F.add(a, b, c)", "a + b + c"),
    "add_number": (1, "any", "a + 2.5", "a + 2.5"),
    "mul_number": (1, "any", "a * 2.5", "a * 2.5"),
    "number_div": (1, "positive", "2.5 / a", "2.5 / a"),
    "number_pow": (1, "any", "2.0 ** a", "2.0 ** a"),
    "add_rows": (2, "any", "a + b[0]", "a + b[0]"),
    "mul_rows": (2, "any", "a * b[0]", "a * b[0]"),
    "mul_columns": (2, "any", "a * b[:, :1]", "a * b[:, :1]"),
    "bias": (2, "any", "F.bias(a, b[0])", "a + b[0]"),
    "scale": (2, "any", "F.scale(a, b[0])", "a * b[0]"),
    "linear_interpolate": (3, "any", "F.linear_interpolate(a, b, c)", "a * b + (1 - a) * c"),
    "erfcinv": (1, "unit", "F.erfcinv(a)", "torch.erfinv(1 - a)"),
    "erfcx": (1, "any", "F.erfcx(a)", "torch.exp(a * a) * torch.erfc(a)"),
    "polygamma": (1, "positive", "F.polygamma(1, a)", "torch.polygamma(1, a)"),
    "cumprod": (1, "unit", "F.cumprod(a, 1)", "torch.cumprod(a, 1)"),
    "cumsum_columns": (1, "any", "F.cumsum(a, 0)", "torch.cumsum(a, 0)"),
    "cumprod_columns": (1, "unit", "F.cumprod(a, 0)", "torch.cumprod(a, 0)"),
    "prod": (1, "unit", "F.prod(a, 1)", "torch.prod(a, 1)"),
    "prod_columns": (1, "unit", "F.prod(a, 0)", "torch.prod(a, 0)"),
    "sum_rows": (1, "any", "F.sum(a, 0)", "a.sum(0)"),
    "sum_columns": (1, "any", "F.sum(a, 1)", "a.sum(1)"),
    "mean_rows": (1, "any", "F.mean(a, 0)", "a.mean(0)"),
    "mean_columns": (1, "any", "F.mean(a, 1)", "a.mean(1)"),
    "average": (2, "positive", "F.average(a, 1, b)", "(a * b).sum(1) / b.sum(1)"),
    "min": (1, "any", "F.min(a, 1)", "a.amin(1)"),
    "max_rows": (1, "any", "F.max(a, 0)", "a.amax(0)"),
    "max_all": (1, "any", "F.max(a)", "a.amax()"),
    "softmax_columns": (1, "any", "F.softmax(a, 0)", "f.softmax(a, 0)"),
    "log_softmax_columns": (1, "any", "F.log_softmax(a, 0)", "f.log_softmax(a, 0)"),
    "logsumexp_all": (1, "any", "F.logsumexp(a)", "torch.logsumexp(a, (0, 1))"),
    "sigmoid_focal_loss": (
        1, "any", "F.sigmoid_focal_loss(a, u)",
        "focal(a, u.float())",
    ),
    "huber_loss_mean": (2, "any", "F.huber_loss(a, b, 0.6)", "f.huber_loss(a, b, reduction='none', delta=0.6).sum(1)"),
    "laplace_nll": (
        3, "any", "F.laplace_nll(a, b, c)", "((a - b).abs() * (-c).exp() + c + 0.6931471805599453).sum()",
    ),
    "contrastive": (2, "any", "F.contrastive(a, b, u[0])", "contrastive(a, b, u[0].float())"),
    "triplet": (3, "any", "F.triplet(a, b, c)", "triplet(a, b, c)"),
    "cross_covariance": (2, "any", "F.cross_covariance(a, b)", "covariance(a, b).square().sum() * 0.5"),
    "decov": (1, "any", "F.decov(a)", "decov(a)"),
    "batch_l2_norm_squared": (1, "any", "F.batch_l2_norm_squared(a)", "a.square().sum(1)"),
    "gumbel_softmax": (1, "any", "F.gumbel_softmax(a, 0.5)", "f.gumbel_softmax(a, 0.5)"),
    "zoneout": (2, "any", "F.zoneout(a, b)", "torch.where(torch.rand_like(a) < 0.5, a, b)"),
    "layer_normalization": (
        3, "any", "F.layer_normalization(a, b[0], c[0])", "f.layer_norm(a, (1024,), b[0], c[0])",
    ),
    "rms_normalization": (2, "any", "F.rms_normalization(a, b[0])", "f.rms_norm(a, (1024,), b[0], 1e-5)"),
    "group_normalization": (
        3, "any", "F.group_normalization(a, 8, b[0], c[0])", "f.group_norm(a, 8, b[0], c[0])",
    ),
    "batch_normalization": (
        3, "any", "F.batch_normalization(a, b[0], c[0])", "f.batch_norm(a, None, None, b[0], c[0], training=True)",
    ),
    "lstm": (2, "any", "F.lstm(a[:, :256], b)[1]", "lstm(a[:, :256], b)"),
    "slstm": (2, "any", "F.slstm(a[:, :128], a[:, 128:256], b[:, :512], b[:, 512:])[1]", "slstm(a, b)"),
    "concat": (2, "any", "F.concat((a, b))", "torch.cat((a, b), 1)"),
    "stack": (2, "any", "F.stack((a, b))", "torch.stack((a, b))"),
    "repeat": (1, "any", "F.repeat(a, 2, 1)", "a.repeat_interleave(2, 1)"),
    "tile": (1, "any", "F.tile(a, (1, 2))", "a.tile((1, 2))"),
    "pad": (1, "any", "F.pad(a, 1, 'constant')", "f.pad(a, (1, 1, 1, 1))"),
    "cast": (1, "any", "F.cast(a, 'float64')", "a.double()"),
    "flip": (1, "any", "F.flip(a, 1)", "a.flip(1)"),
    "transpose_add": (2, "any", "a + b.T", "a + b.T"),
    "get_item": (1, "any", "F.get_item(a, slice(None, None, 2))", "a[::2]"),
    "select_item": (1, "any", "F.select_item(a, t)", "a.gather(1, t[:, None])[:, 0]"),
    "broadcast_to": (1, "any", "F.broadcast_to(a[0], (1024, 1024))", "a[0].expand(1024, 1024)"),
    "pow_4_signed": (1, "any", "a ** 4", "a ** 4"),
    "pow_3_signed": (1, "any", "a ** 3", "a ** 3"),
    "softmax_of_16": (1, "any", "F.softmax(a.reshape(-1, 16))", "f.softmax(a.reshape(-1, 16), 1)"),
    "log_softmax_of_16": (1, "any", "F.log_softmax(a.reshape(-1, 16))", "f.log_softmax(a.reshape(-1, 16), 1)"),
    "label_smoothing": (
        1, "any", "F.softmax_cross_entropy(a, t, label_smoothing=0.1)", "f.cross_entropy(a, t, label_smoothing=0.1)",
    ),
    "soft_targets": (1, "any", "F.softmax_cross_entropy(a, p)", "f.cross_entropy(a, p)"),
    "embed_id": (1, "any", "F.embed_id(t, a)", "f.embedding(t, a)"),
    "scatter_add": (2, "any", "F.scatter_add(a, t, b)", "a.index_add(0, t, b)"),
    "get_rows": (1, "any", "F.get_item(a, t)", "a[t]"),
    "get_columns": (1, "any", "F.get_item(a, (slice(None), t))", "a[:, t]"),
    "concat_rows": (2, "any", "F.concat((a, b), 0)", "torch.cat((a, b), 0)"),
    "stack_last": (2, "any", "F.stack((a, b), 2)", "torch.stack((a, b), 2)"),
    "cast_to_16": (1, "any", "F.cast(a, 'float16')", "a.half()"),
    "sum_inner": (1, "any", "F.sum(a.reshape(64, 128, 128), 1)", "a.reshape(64, 128, 128).sum(1)"),
    "sum_outer_and_last": (1, "any", "F.sum(a.reshape(64, 128, 128), (0, 2))", "a.reshape(64, 128, 128).sum((0, 2))"),
    "cumsum_inner": (1, "any", "F.cumsum(a.reshape(64, 128, 128), 1)", "a.reshape(64, 128, 128).cumsum(1)"),
    "pad_edge": (1, "any", "F.pad(a, 1, 'edge')", "f.pad(a[None], (1, 1, 1, 1), mode='replicate')[0]"),
    "laplace_nll_each": (
        3, "any", "F.laplace_nll(a, b, c, 'no')", "(a - b).abs() * (-c).exp() + c + 0.6931471805599453",
    ),
    "variance": (1, "any", "F.mean((a - F.mean(a)) ** 2)", "a.var(correction=0)"),
    # of images: IMAGES stands for (16, 16, 64, 64), in C order as a program's own arrays are
    "pad_reflect": (
        1, "any", "F.pad(a.reshape(IMAGES), ((0, 0), (0, 0), (1, 1), (1, 1)), 'reflect')",
        "f.pad(a.reshape(IMAGES), (1, 1, 1, 1), mode='reflect')",
    ),
    "group_normalization_images": (
        3, "any", "F.group_normalization(a.reshape(16, 64, 32, 32), 8, b[0, :64], c[0, :64])",
        "f.group_norm(a.reshape(16, 64, 32, 32), 8, b[0, :64], c[0, :64])",
    ),
    "batch_normalization_small": (
        3, "any", "F.batch_normalization(a.reshape(16, 1024, 8, 8), b[0], c[0])",
        "f.batch_norm(a.reshape(16, 1024, 8, 8), None, None, b[0], c[0], training=True)",
    ),
    "fixed_batch_normalization": (
        2, "positive", "F.fixed_batch_normalization(a, b[0], b[1], p[0], p[1])",
        "f.batch_norm(a, p[0], p[1], b[0], b[1])",
    ),
    "local_response_normalization": (
        1, "any", "F.local_response_normalization(a.reshape(IMAGES), 5, 1, 1e-4)",
        "f.local_response_norm(a.reshape(IMAGES), 5, 5e-4, 0.75, 1.0)",
    ),
    "average_pooling_1d": (1, "any", "F.average_pooling_1d(a[None], 2)", "f.avg_pool1d(a[None], 2)"),
    "average_pooling_2d": (
        1, "any", "F.average_pooling_2d(a.reshape(IMAGES), 2)", "f.avg_pool2d(a.reshape(IMAGES), 2)",
    ),
    "average_pooling_3d": (
        1, "any", "F.average_pooling_3d(a.reshape(4, 16, 16, 32, 32), 2)",
        "f.avg_pool3d(a.reshape(4, 16, 16, 32, 32), 2)",
    ),
    "max_pooling_1d": (1, "any", "F.max_pooling_1d(a[None], 2)", "f.max_pool1d(a[None], 2)"),
    "max_pooling_2d": (1, "any", "F.max_pooling_2d(a.reshape(IMAGES), 2)", "f.max_pool2d(a.reshape(IMAGES), 2)"),
    "max_pooling_3d": (
        1, "any", "F.max_pooling_3d(a.reshape(4, 16, 16, 32, 32), 2)", "f.max_pool3d(a.reshape(4, 16, 16, 32, 32), 2)",
    ),
    "global_average_pooling_2d": (
        1, "any", "F.global_average_pooling_2d(a.reshape(64, 256, 8, 8))", "a.reshape(64, 256, 8, 8).mean((2, 3))",
    ),
    "resize_images": (
        1, "any", "F.resize_images(a.reshape(IMAGES), (96, 96))",
        "f.interpolate(a.reshape(IMAGES), size=(96, 96), mode='bilinear', align_corners=True)",
    ),
    "depth2space": (1, "any", "F.depth2space(a.reshape(IMAGES), 2)", "f.pixel_shuffle(a.reshape(IMAGES), 2)"),
    "space2depth": (1, "any", "F.space2depth(a.reshape(IMAGES), 2)", "f.pixel_unshuffle(a.reshape(IMAGES), 2)"),
    "im2col": (
        1, "any", "F.im2col(a[:128].reshape(8, 4, 64, 64), 3, 1, 1)",
        "f.unfold(a[:128].reshape(8, 4, 64, 64), 3, 1, 1)",
    ),
    "spatial_transformer_sampler": (
        2, "inner", "F.spatial_transformer_sampler(a.reshape(IMAGES), b[:128].reshape(16, 2, 64, 64))",
        "f.grid_sample(a.reshape(IMAGES), b[:128].reshape(16, 2, 64, 64).permute(0, 2, 3, 1), align_corners=True)",
    ),
    "as_strided": (
        1, "any", "F.as_strided(a, (1023, 2, 1024), (1024, 1024, 1))",
        "torch.as_strided(a, (1023, 2, 1024), (1024, 1024, 1))",
    ),
    "pad_sequence": (
        2, "any", "F.pad_sequence([a, b[:300]])", "torch.nn.utils.rnn.pad_sequence([a, b[:300]], batch_first=True)",
    ),
    "scaled_dot_product_attention": (
        3, "any", "F.scaled_dot_product_attention(*(v.reshape(8, 16, 128, 64) for v in (a, b, c)))",
        "f.scaled_dot_product_attention(*(v.reshape(8, 16, 128, 64) for v in (a, b, c)))",
    ),
}  # fmt: skip


# Cases whose gradients are views of the one that the caller gives. A leaf of ours owns its gradient, and copies a view
# of memory that the caller keeps; PyTorch's shares that memory. Within a network neither copies: grad() is timed.
VIEWS = {"concat", "concat_rows", "stack", "stack_last"}

# Public functions of the same files that have a gradient and no case, and why.
LEFT_OUT = {
    "no arithmetic of their own: views, copies, and other cases by another name": (
        "broadcast copy diagonal dstack expand_dims flatten fliplr flipud hstack identity moveaxis permutate "
        "reshape rollaxis separate split_axis squeeze sum_to swapaxes transpose vstack"
    ),
    "steps: the gradient is zero": "ceil fix floor sign argmax argmin",
    "PyTorch has none, and what users write instead differs": (
        "binary_cross_entropy discriminative_margin_based_clustering_loss zeta"
    ),
    "masks of one matrix per example, 4 GB at this size": "simplified_dropconnect",
    "products and decompositions of matrices, see products.py": (
        "batch_det batch_inv batch_matmul cholesky det einsum fft ifft inv matmul tensordot"
    ),
    "statistics and sequences, see convnets.py and language_models.py": (
        "batch_renormalization fixed_batch_renormalization tree_lstm"
    ),
}


def operands(count: int, kind: str) -> list[Any]:
    """Arrays of the numbers that a case takes: the same on both sides."""
    import numpy as np

    rng = np.random.default_rng(0)
    bounds = {"any": (-2.0, 2.0), "positive": (0.3, 2.0), "inner": (-0.9, 0.9), "unit": (0.05, 0.95)}[kind]
    return [rng.uniform(*bounds, (ROWS, COLUMNS)).astype(np.float32) for _ in range(count)]


def labels() -> tuple[Any, Any]:
    """Class labels for rows, and a label 0 or 1 for each element."""
    import numpy as np

    rng = np.random.default_rng(1)
    return rng.integers(0, COLUMNS, ROWS), rng.integers(0, 2, (ROWS, COLUMNS)).astype(np.int32)


def shares() -> Any:
    """Probabilities of classes for rows."""
    import numpy as np

    p = np.random.default_rng(2).uniform(0.1, 1.0, (ROWS, COLUMNS)).astype(np.float32)
    return p / p.sum(1, keepdims=True)


def dbrdist_case(name: str) -> Callable[[], Any]:
    """Forward and backward with dbrdist."""
    import numpy as np

    import dbrdist
    import dbrdist.functions as F

    count, kind, expression, _ = CASES[name]
    variables = [dbrdist.Variable(a) for a in operands(count, kind)]
    t, u = labels()
    scope = {"F": F, "t": t, "u": u, "p": shares(), "ones": np.ones((), np.float32), **dict(zip("abc", variables))}
    scope["IMAGES"] = IMAGES
    code = compile(expression, name, "eval")
    y = eval(code, scope)
    gy = np.ones(y.shape, y.dtype)

    def step() -> None:
        for x in variables:
            x.cleargrad()
        dbrdist.backward([eval(code, scope)], [gy])

    return (lambda: dbrdist.grad([eval(code, scope)], variables, [gy])) if name in VIEWS else step


def torch_scope() -> dict[str, Any]:
    """What PyTorch has no single function for, as its users write it."""
    import torch
    from torch.nn import functional as f

    def focal(x: Any, t: Any) -> Any:
        p, loss = torch.sigmoid(x), f.binary_cross_entropy_with_logits(x, t, reduction="none")
        return ((t * 0.25 + (1 - t) * 0.75) * (1 - (p * t + (1 - p) * (1 - t))) ** 2 * loss).mean()

    def contrastive(a: Any, b: Any, y: Any) -> Any:
        squares = (a - b).square().sum(1)
        return (y * squares + (1 - y) * (1 - squares.sqrt()).clamp(min=0).square()).mean() * 0.5

    def triplet(a: Any, b: Any, c: Any) -> Any:
        return ((a - b).square().sum(1) - (a - c).square().sum(1) + 0.2).clamp(min=0).mean()

    def decov(a: Any) -> Any:
        d = a - a.mean(0)
        c = d.T @ d / len(a)
        return (c.square().sum() - c.diagonal().square().sum()) * 0.5

    def covariance(a: Any, b: Any) -> Any:
        return (a - a.mean(0)).T @ (b - b.mean(0)) / len(a)

    def lstm(c: Any, x: Any) -> Any:
        a, i, g, o = x.reshape(len(x), -1, 4).unbind(2)
        return torch.tanh(torch.tanh(a) * torch.sigmoid(i) + c * torch.sigmoid(g)) * torch.sigmoid(o)

    def slstm(a: Any, b: Any) -> Any:
        (a1, i1, f1, o1), (a2, i2, f2, o2) = (x.reshape(len(x), -1, 4).unbind(2) for x in (b[:, :512], b[:, 512:]))
        cells = torch.tanh(a1) * torch.sigmoid(i1) + torch.tanh(a2) * torch.sigmoid(i2)
        cells = cells + a[:, :128] * torch.sigmoid(f1) + a[:, 128:256] * torch.sigmoid(f2)
        return torch.tanh(cells) * torch.sigmoid(o1 + o2)

    return {"torch": torch, "f": f, **{k: v for k, v in locals().items() if callable(v) and k != "f"}}


def torch_case(name: str, is_compiled: bool = False) -> Callable[[], Any]:
    """The same with PyTorch; ``is_compiled``: by ``torch.compile``, which compiles forward and backward at first."""
    import torch

    torch.set_num_threads(1)
    count, kind, _, expression = CASES[name]
    tensors = [torch.from_numpy(a).requires_grad_() for a in operands(count, kind)]
    t, u = (torch.from_numpy(a) for a in labels())
    sign = torch.ones(ROWS, COLUMNS).scatter_(1, t[:, None], -1.0)
    scope = {**torch_scope(), "IMAGES": IMAGES, "t": t, "u": u, "p": torch.from_numpy(shares()), "sign": sign}
    exec(f"def forward({', '.join('abc'[:count])}): return {expression}", scope)
    forward: Any = scope["forward"]
    if is_compiled:
        forward = torch.compile(forward, dynamic=False)
    gy = torch.ones_like(forward(*tensors))

    def step() -> None:
        for x in tensors:
            x.grad = None
        forward(*tensors).backward(gy)

    return (lambda: torch.autograd.grad(forward(*tensors), tensors, gy)) if name in VIEWS else step


def compiled_case(name: str) -> Callable[[], Any]:
    """With ``torch.compile``."""
    return torch_case(name, is_compiled=True)


SIDES = {"dbrdist": dbrdist_case, "torch": torch_case, "compiled": compiled_case}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", required=False, help="interpreter of an environment that has PyTorch")
    parser.add_argument("--compiled", action="store_true", help="also compare with torch.compile, which needs g++")
    parser.add_argument(
        "--compile-only", action="store_true", help="let torch.compile fill its cache, and time nothing"
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="these functions alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.08, help="of each sample")
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor, for a machine with other work")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=list(SIDES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        harness.serve({"function": SIDES[args.worker]})
        return
    if (args.compile_only or args.compiled) and not args.torch_python:
        parser.error("--compiled and --compile-only need --torch-python")
    if args.compile_only:
        fill_cache(args.torch_python, args.only)
        return
    workers = {"dbrdist": harness.Worker(sys.executable, __file__, "dbrdist", installed=harness.is_installed())}
    peers = ["torch", *(["compiled"] if args.compiled else [])] if args.torch_python else []
    workers |= {peer: harness.Worker(args.torch_python, __file__, peer) for peer in peers}
    results: dict[str, Any] = {}
    ratios: dict[str, dict[str, float]] = {peer: {} for peer in peers}
    for name in args.only:
        measured: dict[str, Any] = harness.compare(
            workers, "function", num_rounds=args.rounds, min_seconds=args.seconds, arguments={"name": name},
            is_cpu_time=args.cpu_time,
        )  # fmt: skip
        words = [f"{label} {r['median_seconds'] * 1e3:7.2f} ms" for label, r in measured.items()]
        results[name] = measured
        for peer in peers:
            pairs = zip(measured["dbrdist"]["samples"], measured[peer]["samples"])
            ratio = ratios[peer][name] = statistics.median(a / b for a, b in pairs)
            measured["ratio" if peer == "torch" else f"ratio_to_{peer}"] = ratio
            words.append(f"of {peer} {ratio:5.2f}")
        print(f"{name:<24}", "  ".join(words), flush=True)
    results |= summary(ratios)
    about = {label: w.ask("about")["versions"] for label, w in workers.items()}
    for w in workers.values():
        w.close()
    if args.record:
        settings = {"rows": ROWS, "columns": COLUMNS, "num_rounds": args.rounds, "min_seconds": args.seconds}
        settings["clock"] = "process_time" if args.cpu_time else "perf_counter"
        print(harness.record("elementwise", settings, results, about))


def fill_cache(python: str, names: list[str]) -> None:
    """Compile functions, which torch.compile keeps on disk for later processes."""
    with harness.Worker(python, __file__, "compiled") as worker:
        for name in names:
            start = time.perf_counter()
            try:
                worker.make("function", name=name)
                print(f"{name:<24} {time.perf_counter() - start:6.1f} s", flush=True)
            except RuntimeError as e:
                print(f"{name:<24} {e}", flush=True)


def summary(ratios: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The median for each peer and what lies above the goal for PyTorch eager, printed too."""
    found: dict[str, Any] = {}
    for peer, of_peer in ratios.items():
        end = "" if peer == "torch" else f"_to_{peer}"
        found[f"median_ratio{end}"] = statistics.median(of_peer.values())
        found[f"above_goal{end}"] = {n: r for n, r in of_peer.items() if r > 1.2}
        above = ", ".join(f"{n} {r:.2f}" for n, r in found[f"above_goal{end}"].items()) or "none"
        print(f"median of {peer}: {found[f'median_ratio{end}']:.2f}; above 1.2: {above}")
    return found


if __name__ == "__main__":
    main()
