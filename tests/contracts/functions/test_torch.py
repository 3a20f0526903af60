"""Every operation that PyTorch has too, forward and backward, against PyTorch.

PyTorch is no dependency: where it is missing the comparisons are skipped, unless DBRDIST_REQUIRE_TORCH is set.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

from dbrdist import Variable, backward
from tests.functions.cases import CASES, ids_of, labels, mask, probabilities, weights_of_classes

try:
    import torch
    import torch.nn.functional as T
except ImportError:
    if os.environ.get("DBRDIST_REQUIRE_TORCH"):
        raise
    pytest.skip("PyTorch is not installed", allow_module_level=True)


pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:oneDNN is not available")]


class _AsVariable:
    """Shape, type and array module of a tensor, for the helpers of ``cases.py``."""

    xp = np

    def __init__(self, x):
        self.shape = tuple(x.shape)
        self.dtype = x.detach().numpy().dtype


def given(helper, x, *args):
    """What a helper of ``cases.py`` gives for x, as a tensor; labels as PyTorch wants them."""
    a = helper(_AsVariable(x), *args)
    return torch.from_numpy(a.astype(np.int64) if a.dtype.kind == "i" else a)


def cross_entropy(x, ignored=False, **options):
    return T.cross_entropy(x, given(labels, x, None, ignored), ignore_index=-1, **options)


def weighted_cross_entropy(x):
    """PyTorch divides by the sum of weights, Chainer by the number of labels."""
    weight = given(weights_of_classes, x)
    return cross_entropy(x, weight=weight, reduction="sum") / (x.numel() / x.shape[1])


def dropped(x):
    return x * (torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape) % 2 * 2.0)


def aligned(x, y, axis=1):
    return y.reshape((1,) * axis + tuple(y.shape) + (1,) * (x.ndim - axis - y.ndim))


def pair_of(z):
    return z.real, z.imag


def windows(x, ksize, dilation, padding, stride, out):
    return T.unfold(x, ksize, dilation, padding, stride).reshape(len(x), -1, *out)


def response_norm(x):
    """PyTorch wants an axis after the channels, and divides alpha by n."""
    return T.local_response_norm(x[..., None], 5, 5e-4, 0.75, 2.0)[..., 0] if x.numel() else x * 1.0


def shuffled(x, r):
    """PyTorch has a channel's r r parts side by side, Chainer has each part of all channels."""
    n, c, h, w = x.shape
    return T.pixel_shuffle(x.reshape(n, r * r, c // r**2, h, w).transpose(1, 2).reshape(n, c, h, w), r)


def unshuffled(x, r):
    n, c, h, w = x.shape
    y = T.pixel_unshuffle(x, r)
    return y.reshape(n, c, r * r, h // r, w // r).transpose(1, 2).reshape(y.shape)


PEERS = {
    "cumsum": lambda x: x.reshape(-1).cumsum(0),
    "cumsum_axis": lambda x: x.cumsum(-1),
    "cumsum_channels": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.reshape(-1).cumprod(0),
    "cumprod_axis": lambda x: x.cumprod(1),
    "prod": torch.prod,
    "prod_axis": lambda x: x.prod(-1),
    "batch_l2_norm_squared": lambda x: (x**2).reshape(len(x), math.prod(x.shape[1:])).sum(1),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "einsum_three": lambda a, b, c: torch.einsum("ij,ik,jkl->il", a, b, c),
    "einsum_trace": lambda a: torch.einsum("ii", a),
    "einsum_diagonals": lambda a, b: torch.einsum("iji,jj->ij", a, b),
    "einsum_threefold": lambda a: torch.einsum("jijj->ji", a),
    "einsum_sums": lambda a, b: torch.einsum("ijk,l->j", a, b),
    "einsum_ellipsis": lambda a, b: torch.einsum("...ij,...jk->...ik", a, b),
    "det": torch.linalg.det,
    "batch_det": torch.linalg.det,
    "inv": torch.linalg.inv,
    "batch_inv": torch.linalg.inv,
    "cholesky": lambda a: torch.linalg.cholesky(a + a.mT),
    "fft": lambda a, b: pair_of(torch.fft.fft(torch.complex(a, b))),
    "ifft": lambda a, b: pair_of(torch.fft.ifft(torch.complex(a, b))),
    "diagonal": torch.diagonal,
    "diagonal_below": lambda x: torch.diagonal(x, -1, 2, 0),
    "diagonal_of_images": lambda x: torch.diagonal(x, 1, 2, 3),
    "pad_sequence": lambda *xs: torch.nn.utils.rnn.pad_sequence(xs, batch_first=True),
    "scaled_dot_product_attention": T.scaled_dot_product_attention,
    "scaled_dot_product_attention_biased": T.scaled_dot_product_attention,
    "scaled_dot_product_attention_causal": lambda *xs: T.scaled_dot_product_attention(*xs, is_causal=True),
    "rms_normalization": lambda x, g: T.rms_norm(x, g.shape, g, 1e-6),
    "as_strided": lambda x: torch.as_strided(x, (3, 2), (1, 2)),
    "depth2space": lambda x: shuffled(x, 2),
    "space2depth": lambda x: unshuffled(x, 2),
    "im2col": lambda x: windows(x, 3, 1, 1, 2, (3, 3)),
    "resize_images": lambda x: T.interpolate(x, (7, 9), mode="bilinear", align_corners=True),
    "resize_images_less": lambda x: T.interpolate(x, (3, 2), mode="bilinear", align_corners=True),
    "resize_images_edges": lambda x: T.interpolate(x, (7, 3), mode="bilinear", align_corners=False),
    "resize_images_nearest": lambda x: T.interpolate(x, (6, 3), mode="nearest"),
    "spatial_transformer_grid": lambda t: T.affine_grid(t, (2, 1, 3, 4), align_corners=True).permute(0, 3, 1, 2),
    "spatial_transformer_sampler": lambda x, g: T.grid_sample(x, g.permute(0, 2, 3, 1), align_corners=True),
    "normalize": lambda x: x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-5),
    "local_response_normalization": response_norm,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "pow_constant": lambda a: a**3,
    "pow_fraction": lambda a: a**-1.5,
    "rpow": lambda a: 2.5**a,
    "number_arithmetic": lambda a: (2.0 - a) * 3.0 + 1.0 / (a + 3.0),
    "neg": lambda a: -a,
    "absolute": torch.abs,
    "add_many": lambda a, b, c: a + b + c,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clip": lambda x: torch.clamp(x, -0.9, 1.2),
    "clip_below": lambda x: torch.clamp(x, min=-0.9),
    "fmod": torch.fmod,
    "squared_difference": lambda a, b: (a - b) ** 2,
    "linear_interpolate": lambda p, x, y: torch.lerp(y, x, p),
    "scale": lambda x, y: x * aligned(x, y),
    "bias": lambda x, y: x + aligned(x, y),
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "arcsin": torch.arcsin,
    "arccos": torch.arccos,
    "arctan": torch.arctan,
    "arctan2": torch.arctan2,
    "arctanh": torch.arctanh,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "log10": torch.log10,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "square": torch.square,
    "sum": torch.sum,
    "sum_axis": lambda x: x.sum(1),
    "sum_axes": lambda x: x.sum((0, -1), keepdim=True),
    "mean": torch.mean,
    "mean_axis": lambda x: x.mean(1),
    "mean_keepdims": lambda x: x.mean((0, 1), keepdim=True),
    "average": torch.mean,
    "max": torch.amax,
    "max_axis": lambda x: x.amax(1),
    "max_axes": lambda x: x.amax((0, -1), keepdim=True),
    "min": torch.amin,
    "min_axis": lambda x: x.amin(-1),
    "logsumexp": lambda x: torch.logsumexp(x, tuple(range(x.ndim))),
    "logsumexp_axis": lambda x: torch.logsumexp(x, 1),
    "matmul": torch.matmul,
    "matmul_transposed": lambda a, b: a.mT @ b.mT,
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "tensordot_axes": lambda a, b: torch.tensordot(a, b, ([1, 0], [0, 2])),
    "linear": T.linear,
    "linear_without_bias": T.linear,
    "linear_flattens": lambda x, W, b: T.linear(x.flatten(1), W, b),
    "linear_batch_axes": T.linear,
    "embed_id": lambda W: T.embedding(torch.tensor([[0, 2], [2, 1]]), W),
    "reshape": lambda x: x.reshape(-1),
    "reshape_to_4d": lambda x: x.reshape(2, 3, 2, 1),
    "transpose": lambda x: x.permute(tuple(reversed(range(x.ndim)))),
    "transpose_axes": lambda x: x.permute(-1, 0, 1),
    "swapaxes": lambda x: x.swapaxes(0, -1),
    "moveaxis": lambda x: x.moveaxis((0, 1), (-1, 0)),
    "expand_dims": lambda x: x.unsqueeze(-1),
    "squeeze": torch.squeeze,
    "flatten": lambda x: x.reshape(-1),
    "broadcast": torch.broadcast_tensors,
    "broadcast_to": lambda x: x.broadcast_to(2, 3, 4),
    "sum_to": lambda x: x.sum_to_size(1, 4),
    "concat": lambda *xs: torch.cat(xs, 1),
    "concat_axis": lambda *xs: torch.cat(xs, -1),
    "stack": lambda *xs: torch.stack(xs, 1),
    "vstack": lambda *xs: torch.vstack(xs),
    "hstack": lambda *xs: torch.hstack(xs),
    "dstack": lambda *xs: torch.dstack(xs),
    "split_axis": lambda x: x.tensor_split(2, 1),
    "split_axis_one_used": lambda x: x[:, 1:3],
    "separate": lambda x: x.unbind(1),
    "get_item": lambda x: x[1:, ::2],
    "get_item_number": lambda x: x[1],
    "get_item_newaxis": lambda x: x[..., None, -1],
    "get_item_arrays": lambda x: x[[0, 1, 1], [2, 0, 0]],
    "get_item_mask": lambda x: x[given(mask, x)],
    "flip": lambda x: x.flip(-1),
    "flipud": torch.flipud,
    "fliplr": torch.fliplr,
    "where": lambda a, b: torch.where(given(mask, a), a, b),
    "where_broadcast": lambda a, b: torch.where(given(mask, a), a, b),
    "repeat": lambda x: x.reshape(-1).repeat_interleave(3),
    "repeat_axis": lambda x: x.repeat_interleave(2, 1),
    "tile": lambda x: x.tile(2, 1, 3),
    "pad": lambda x: T.pad(x, (0, 1, 1, 2), value=3),
    "pad_4d": lambda x: T.pad(x, (1,) * 8),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda x: torch.softmax(x, 1),
    "softmax_axis": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, 1),
    "log_softmax_axis": lambda x: torch.log_softmax(x, 0),
    "softplus": T.softplus,
    "softplus_beta": lambda x: T.softplus(x, 2.5),
    "leaky_relu": lambda x: T.leaky_relu(x, 0.2),
    "prelu": lambda x, W: T.prelu(x, W.reshape(-1)),
    "elu": T.elu,
    "selu": T.selu,
    "clipped_relu": lambda x: T.hardtanh(x, 0.0, 1.0),
    "relu6": T.relu6,
    "crelu": lambda x: torch.relu(torch.cat((x, -x), 1)),
    "swish": lambda x, b: x * torch.sigmoid(x * aligned(x, b)),
    "silu": T.silu,
    "silu_beta": lambda x: x * torch.sigmoid(x * 2.5),
    "mish": T.mish,
    "hardswish": T.hardswish,
    "gelu": T.gelu,
    "gelu_by_tanh": lambda x: T.gelu(x, approximate="tanh"),
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "ndtr": torch.special.ndtr,
    "ndtri": torch.special.ndtri,
    "log_ndtr": torch.special.log_ndtr,
    "lgamma": torch.lgamma,
    # not digamma: PyTorch's gradient of it errs by 5e-10 in float64; test_references.py compares polygamma
    "polygamma": lambda x: torch.polygamma(2, x),
    "triplet": lambda a, p, n: torch.relu(((a - p) ** 2 - (a - n) ** 2).sum(1) + 0.2).mean(),
    "softmax_cross_entropy": cross_entropy,
    "softmax_cross_entropy_ignore": lambda x: cross_entropy(x, True),
    "softmax_cross_entropy_unnormalized": lambda x: cross_entropy(x, True, reduction="sum") / x.shape[0],
    "softmax_cross_entropy_each": lambda x: cross_entropy(x, reduction="none"),
    "softmax_cross_entropy_weighted": weighted_cross_entropy,
    "softmax_cross_entropy_smooth": lambda x: cross_entropy(x, label_smoothing=0.1),
    "softmax_cross_entropy_soft": lambda x: (
        T.cross_entropy(x, given(probabilities, x), reduction="sum") * x.shape[1] / x.numel()
    ),
    "mean_squared_error": T.mse_loss,
    "mean_absolute_error": T.l1_loss,
    "squared_error": lambda a, b: T.mse_loss(a, b, reduction="none"),
    "absolute_error": lambda a, b: T.l1_loss(a, b, reduction="none"),
    "huber_loss": lambda x, t: T.huber_loss(x, t, reduction="none", delta=0.6).sum(1),
    "hinge_squared": lambda x: torch.relu(1 - (2.0 * T.one_hot(given(labels, x), x.shape[1]) - 1) * x) ** 2,
    "bernoulli_nll": lambda x, y: T.binary_cross_entropy_with_logits(y, x),
    "binary_cross_entropy": lambda x: T.binary_cross_entropy_with_logits(
        x, T.one_hot(given(labels, x), x.shape[1]).to(x.dtype)
    ),
    "dropout": dropped,
    "identity": lambda x: x.view_as(x),
    "convolution_2d": T.conv2d,
    "convolution_2d_strided": lambda x, W, b: T.conv2d(x, W, b, 2, 1),
    "convolution_2d_dilated": lambda x, W: T.conv2d(x, W, padding=2, dilation=(2, 1)),
    "convolution_2d_grouped": lambda x, W: T.conv2d(x, W, groups=2),
    "deconvolution_2d": lambda x, W, b: T.conv_transpose2d(x, W, b, 2, 1),
    "max_pooling_2d": lambda x: T.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max_pooling_2d_inside": lambda x: T.max_pool2d(x, 2),
    "global_average_pooling_2d": lambda x: T.adaptive_avg_pool2d(x, 1)[:, :, 0, 0],
    "average_pooling_2d": lambda x: T.avg_pool2d(x, 3, 2, 1),
    "batch_normalization": lambda x, g, b: T.batch_norm(x, None, None, g, b, True, eps=2e-5),
    "layer_normalization": lambda x, g, b: T.layer_norm(x, x.shape[1:], g, b, 1e-5),
    "group_normalization": lambda x, g, b: T.group_norm(x, 2, g, b, 1e-5),
    "fixed_batch_normalization": lambda x, g, b, m, v: (
        (x - aligned(x, m)) / torch.sqrt(aligned(x, v) + 2e-5) * aligned(x, g) + aligned(x, b)
    ),
}
# Of nothing the mean loss is 0 here, so that a rank without samples adds nothing, and NaN there.
ROWS = [
    (case, shapes)
    for case in CASES
    if case.name in PEERS
    for shapes in case.shapes
    if not (case.name in ("mean_squared_error", "triplet") and 0 in shapes[0])
    and not (case.name in ("im2col", "resize_images", "fft", "depth2space") and 0 in shapes[0])  # refused there
]
IDS = ids_of(ROWS)


def test_each_peer_has_its_row():
    assert set(PEERS) <= {case.name for case in CASES}


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 2e-5)])
@pytest.mark.parametrize("case, shapes", ROWS, ids=IDS)
def test_forward_and_backward(case, shapes, dtype, tolerance):
    arrays = case.inputs(shapes, dtype)
    ours = [Variable(a.copy()) for a in arrays]
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    ys, ts = listed(case.function(*ours)), listed(PEERS[case.name](*theirs))
    gys = [np.asarray(np.arange(y.size).reshape(y.shape) % 5 - 1.5, dtype) for y in ys]
    backward(ys, gys)
    torch.autograd.backward(ts, [torch.from_numpy(g) for g in gys])
    for y, t in zip(ys, ts, strict=True):
        assert y.shape == tuple(t.shape)
        np.testing.assert_allclose(y.array, t.detach().numpy(), rtol=tolerance, atol=tolerance)
    for x, t in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x.grad, t.grad.numpy(), rtol=tolerance, atol=tolerance)


def listed(ys):
    return list(ys) if isinstance(ys, (tuple, list)) else [ys]
