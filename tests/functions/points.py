"""Calls at which a wrong formula shows: every argument away from its default, ties, bounds, extreme values.

Each entry is a public function with its arguments, floating-point arrays in float64; the expected values come from
``references``. ``KINKS`` adds the gradients that the docstrings promise where a derivative jumps.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dbrdist.utils import CooMatrix


@dataclass(frozen=True)
class Point:
    """One call of ``dbrdist.functions.<name>``."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        inputs = "-".join("x".join(map(str, a.shape)) or "0d" for a in self.args if hasattr(a, "shape"))
        options = ",".join(f"{k}={'array' if isinstance(v, np.ndarray) else v}" for k, v in self.options.items())
        return f"{self.name}-{inputs}-{options}"


def at(name: str, *args: Any, **options: Any) -> Point:
    return Point(name, args, options)


def draw(*shape: int, low: float = -2.0, high: float = 2.0) -> Any:
    """Uniform numbers, the same for the same arguments."""
    seed = zlib.crc32(repr((shape, low, high)).encode())
    return np.random.default_rng(seed).uniform(low, high, shape)


def positive(*shape: int) -> Any:
    return draw(*shape, low=0.3, high=3.0)


# Numbers near zero and as large as float32 bears without overflow of the result itself.
WIDE = np.array([-1e4, -750.0, -90.0, -20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 20.0, 90.0, 750.0, 1e4])
TIES = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
SCORES = np.array([[1000.0, 0.0, -1000.0], [-2000.0, -2000.0, -2000.0], [300.0, 299.0, 301.0]])
IMAGE = draw(2, 4, 6, 5)
LABELS = np.array([0, 2, 1, 4])
SOME_IGNORED = np.array([0, 3, 3, 4])
PIXELS = np.array([[[0, 2], [1, 4]], [[2, 2], [3, 0]]])
CLASS_WEIGHT = np.array([0.5, 2.0, 1.0, 0.0, 3.0])
SHARES = np.array([[0.2, 0.8, 0.0], [1.0, 0.0, 0.0]])


ARITHMETIC = [
    at("absolute", WIDE),
    at("maximum", TIES, TIES.T.copy()),
    at("minimum", TIES, TIES.T.copy()),
    at("clip", WIDE, -1.0, 1.0),
    at("clip", WIDE, None, 1.0),
    at("clip", WIDE, -1.0, None),
    at("clip", WIDE, 2.0, 2.0),
    at("fmod", np.array([5.5, -5.5, 5.5, -5.5, 4.0]), np.array([2.0, 2.0, -2.0, -2.0, 2.0])),
    at("scale", draw(2, 3, 4), draw(2, 3), axis=0),
    at("scale", draw(2, 3, 4), draw(4), axis=2),
    at("bias", draw(2, 3, 4), draw(2), axis=0),
    at("bias", draw(2, 3, 4), draw(4), axis=2),
    at("arctan2", np.array([1.0, 1.0, -1.0, -1.0, 0.0, 0.0]), np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])),
    at("arcsin", np.array([-1.0, -0.5, 0.0, 1.0])),
    at("arccos", np.array([-1.0, -0.5, 0.0, 1.0])),
    at("tanh", WIDE),
    at("arctan", WIDE),
    at("expm1", np.array([-1e4, -1e-6, 0.0, 1e-6, 5.0])),
    at("log1p", np.array([-1e-6, 0.0, 1e-6, 1e4])),
    at("sign", WIDE),
    at("floor", draw(3, 4)),
    at("ceil", draw(3, 4)),
    at("fix", draw(3, 4)),
]

# What NumPy and the standard library lack; functions and rows.
NEEDS_SCIPY = {"erfcx", "erfinv", "erfcinv", "ndtri", "log_ndtr", "hazard", "lgamma", "digamma", "polygamma", "zeta"}
SHARES_OF_ONE = np.array([1e-30, 1e-6, 0.01, 0.3, 0.5, 0.9, 0.99])
GAMMAS = np.array([0.01, 0.3, 1.0, 1.5, 2.0, 7.0, 50.0, 1e3])
SPECIAL = [
    *(at(name, WIDE) for name in ("erf", "erfc", "ndtr", "log_ndtr")),
    *(at(name, draw(3, 4)) for name in ("erf", "erfc", "erfcx", "ndtr", "log_ndtr")),
    at("erfcx", np.array([-5.0, 0.0, 0.5, 5.0, 24.0, 30.0, 1e4])),
    at("log_ndtr", np.array([-200.0, -40.0, -29.0, -10.0, 8.0, 38.0])),
    at("erfinv", np.array([-0.99, -0.5, 0.0, 1e-3, 0.7, 0.99])),
    at("erfcinv", SHARES_OF_ONE),
    at("erfcinv", 1.0 + SHARES_OF_ONE[1:]),
    at("ndtri", SHARES_OF_ONE),
    *(at(name, GAMMAS) for name in ("lgamma", "digamma")),
    *(at(name, np.array([-0.5, -1.25, -3.75])) for name in ("lgamma", "digamma")),
    *(at("polygamma", n, GAMMAS[1:]) for n in (0, 1, 2, 5)),
    at("polygamma", np.array([[0], [3]]), positive(4)),
    *(at("zeta", x, GAMMAS[1:]) for x in (1.5, 2, 6.0)),
    at("zeta", np.array([[2.0], [3.0]]), positive(4)),
]

REDUCTIONS = [
    *(at(name, draw(2, 3, 4), axis=axis, keepdims=True) for name in ("sum", "mean", "average", "max", "min")
      for axis in (1, -1, (0, 2), (0, 1, 2))),
    *(at(name, draw(2, 3, 4), axis=axis) for name in ("sum", "mean", "max", "min", "logsumexp")
      for axis in (0, (2, 0), (-1, 1))),
    at("mean", draw(2, 3, 4), axis=1, weights=positive(3)),
    at("mean", draw(2, 3, 4), axis=-1, weights=positive(4), keepdims=True),
    at("mean", draw(2, 3, 4), weights=positive(2, 3, 4)),
    at("mean", draw(2, 3, 4), axis=(0, 2), weights=positive(2, 3, 4), keepdims=True),
    at("average", draw(2, 3, 4), axis=0, weights=positive(2)),
    at("max", TIES, axis=1),
    at("min", TIES, axis=0),
    *(at(name, x, axis=axis) for name in ("argmax", "argmin") for x in (draw(2, 3, 4), TIES) for axis in (0, 1, -1)),
    at("argmax", TIES),
    at("argmin", TIES),
    at("logsumexp", WIDE),
    at("logsumexp", SCORES, axis=1),
    at("logsumexp", SCORES, axis=0),
]  # fmt: skip

PRODUCTS = [
    *(at("matmul", a, b, transa=s, transb=t) for s, a in ((False, draw(2, 3)), (True, draw(3, 2)))
      for t, b in ((False, draw(3, 4)), (True, draw(4, 3)))),
    at("matmul", draw(5, 3, 2), draw(5, 3, 4), transa=True),
    at("matmul", draw(3), draw(4, 3), transa=True, transb=True),
    at("batch_matmul", draw(5, 3, 2), draw(5, 3, 4), transa=True),
    at("batch_matmul", draw(5, 2, 3), draw(5, 4, 3), transb=True),
    at("batch_matmul", draw(5, 3), draw(5, 3, 4), transa=True),
    at("tensordot", draw(2, 3, 4), draw(3, 4, 5)),
    at("tensordot", draw(2, 3, 4), draw(4, 3, 5), axes=1),
    at("tensordot", draw(2, 3), draw(4, 5), axes=0),
    at("tensordot", draw(2, 3, 4), draw(4, 5, 2), axes=((0, 2), (2, 0))),
    at("tensordot", draw(2, 3, 4), draw(5, 3), axes=(1, 1)),
    at("tensordot", draw(2, 3, 4), draw(5, 3), axes=((-2,), (-1,))),
    at("linear", draw(2, 3, 4), draw(5, 4), draw(5), n_batch_axes=2),
    at("linear", draw(2, 3, 2, 2), draw(5, 4), n_batch_axes=2),
    at("embed_id", np.array([[0, 3, 1], [3, 3, 2]]), draw(4, 5), ignore_label=3),
    at("embed_id", np.array([-1, 3, 0]), draw(4, 5), ignore_label=-1),
    at("embed_id", np.array([7, 3, 0]), draw(4, 5), ignore_label=7),
    at("bilinear", draw(2, 3, 2), draw(2, 4), draw(6, 4, 5), V1=draw(6, 5), V2=draw(4, 5), b=draw(5)),
]  # fmt: skip

SHAPES = [
    at("transpose", draw(2, 3, 4), axes=(1, 2, 0)),
    at("transpose", draw(2, 3, 4, 5), axes=(-1, 1, 0, 2)),
    at("moveaxis", draw(2, 3, 4, 5), (0, 2), (3, 1)),
    at("moveaxis", draw(2, 3, 4, 5), -1, 0),
    *(at("rollaxis", draw(2, 3, 4, 5), axis, start=start) for axis in (0, 1, -1) for start in (0, 2, 4, -2)),
    at("expand_dims", draw(2, 3), 1),
    at("squeeze", draw(1, 3, 1, 1), axis=(0, -1)),
    at("squeeze", draw(1, 3, 1, 1), axis=2),
    at("concat", (draw(2, 3), draw(1, 3)), axis=0),
    at("concat", (draw(2, 3, 4), draw(2, 3, 1), draw(2, 3, 2)), axis=-1),
    at("stack", (draw(2, 3), draw(2, 3) + 1), axis=-1),
    at("stack", (draw(2, 3), draw(2, 3) + 1), axis=1),
    at("split_axis", draw(4, 6), 3, 1),
    at("split_axis", draw(4, 6), [1, 1, 4], -1),
    at("split_axis", draw(4, 6), [2, 9], 0),
    at("split_axis", draw(4, 6), 1, 0, force_tuple=False),
    at("split_axis", draw(4, 6), 2, 0, force_tuple=False),
    at("split_axis", draw(4, 6), 1, 0),
    at("separate", draw(2, 3, 4), axis=-1),
    at("select_item", draw(4, 5), LABELS),
    at("permutate", draw(4, 3), np.array([2, 0, 3, 1]), inv=True),
    at("permutate", draw(3, 4), np.array([2, 0, 3, 1]), axis=1),
    at("permutate", draw(2, 3, 4), np.array([2, 0, 3, 1]), axis=-1, inv=True),
    at("flip", draw(2, 3, 4), 1),
    at("where", np.array([True, False, True]), draw(2, 3), np.array(0.5)),
    at("scatter_add", draw(4, 3), np.array([0, 0, 2, 0]), draw(4, 3) + 1),
    at("repeat", draw(2, 3), 2, axis=0),
    at("repeat", draw(2, 3), [1, 0, 3], axis=-1),
    at("repeat", draw(2, 3), [2]),
    at("repeat", draw(2, 3), 0, axis=1),
    at("tile", draw(2, 3), 2),
    at("tile", draw(2, 3), (2, 1, 2)),
    at("pad", draw(2, 3), 2, "constant"),
    at("pad", draw(2, 3), (1, 2), "constant", constant_values=-1.5),
    at("identity", draw(2, 3), draw(3)),
]

ACTIVATIONS = [
    *(at(name, WIDE) for name in (
        "relu", "sigmoid", "softplus", "leaky_relu", "selu", "clipped_relu", "relu6", "hard_sigmoid", "silu", "mish",
        "hardswish", "gelu")),
    at("hardswish", np.array([-3.5, -3.0, -2.9, -1.0, 0.3, 2.9, 3.0, 3.5])),
    at("gelu", draw(3, 4)),
    at("gelu", WIDE, approximate="tanh"),
    at("gelu", draw(3, 4), approximate="tanh"),
    at("hard_sigmoid", np.array([-2.6, -2.5, -2.4, -1.0, 0.3, 2.4, 2.5, 2.6])),
    at("silu", WIDE, beta=0.5),
    at("silu", draw(3, 4), beta=-2.0),
    at("softplus", WIDE, beta=0.25),
    at("softplus", draw(3, 4), beta=3.0),
    at("leaky_relu", draw(3, 4), slope=0.01),
    at("leaky_relu", draw(3, 4), slope=-0.5),
    at("leaky_relu", draw(3, 4), slope=2.0),
    at("leaky_relu", draw(3, 4), slope=1.1),
    at("elu", WIDE, alpha=0.5),
    at("elu", draw(3, 4), alpha=2.0),
    at("selu", draw(3, 4), alpha=1.5, scale=2.0),
    at("selu", draw(3, 4), alpha=1.5),
    at("clipped_relu", WIDE, z=3.0),
    at("prelu", draw(2, 3, 4), draw(3, 4)),
    at("swish", draw(2, 3, 4), positive(3, 4)),
    at("swish", WIDE, np.array(2.0)),
    at("softmax", SCORES),
    at("softmax", draw(2, 3, 4, 5), axis=0),
    at("softmax", draw(2, 3, 4, 5), axis=2),
    at("softmax", draw(2, 3, 4, 5), axis=-1),
    at("log_softmax", SCORES),
    at("log_softmax", draw(2, 3, 4, 5), axis=3),
    at("log_softmax", draw(2, 3, 4, 5), axis=-2),
    at("crelu", draw(2, 3, 4), axis=-1),
    at("crelu", draw(2, 3, 4), axis=0),
    at("maxout", draw(6, 4), 3, axis=0),
    at("maxout", draw(2, 3, 6), 2, axis=-1),
]  # fmt: skip

X, IMAGES = draw(4, 5), draw(2, 5, 2, 2)
LOSSES = [
    *(at("softmax_cross_entropy", X, t, ignore_label=3, **options) for t in (LABELS, SOME_IGNORED)
      for options in (
          {}, {"normalize": False}, {"reduce": "no"}, {"class_weight": CLASS_WEIGHT}, {"label_smoothing": 0.3},
          {"label_smoothing": 0.3, "class_weight": CLASS_WEIGHT, "normalize": False},
          {"label_smoothing": 0.3, "reduce": "no"})),
    at("softmax_cross_entropy", X, SOME_IGNORED, ignore_label=-7),
    at("softmax_cross_entropy", X, np.array([-7, 3, -7, 0]), ignore_label=-7),
    at("softmax_cross_entropy", X, np.array([-1, 3, -1, 0]), normalize=False),
    at("softmax_cross_entropy", X, np.array([255, 3, 255, 0]), ignore_label=255),
    at("softmax_cross_entropy", X, np.full(4, 255), ignore_label=255),
    at("softmax_cross_entropy", X, LABELS, cache_score=False, enable_double_backprop=True),
    at("softmax_cross_entropy", X, LABELS, label_smoothing=1.0),
    at("softmax_cross_entropy", IMAGES, PIXELS, ignore_label=2),
    at("softmax_cross_entropy", IMAGES, PIXELS, ignore_label=2, normalize=False),
    at("softmax_cross_entropy", IMAGES, PIXELS, ignore_label=2, reduce="no", label_smoothing=0.2),
    at("softmax_cross_entropy", IMAGES, PIXELS, class_weight=CLASS_WEIGHT),
    at("softmax_cross_entropy", SCORES, np.array([2, 1, 0])),
    at("softmax_cross_entropy", SCORES, np.array([2, 1, 0]), reduce="no"),
    at("softmax_cross_entropy", SCORES, np.array([2, -1, 0]), class_weight=np.array([1.0, 2.0, 0.5])),
    at("softmax_cross_entropy", draw(2, 3), SHARES),
    at("softmax_cross_entropy", draw(2, 3), SHARES, reduce="no"),
    at("softmax_cross_entropy", draw(2, 3), SHARES, soft_target_loss="kl-divergence"),
    at("softmax_cross_entropy", draw(2, 3), SHARES, soft_target_loss="kl-divergence", reduce="no"),
    *(at("sigmoid_cross_entropy", draw(3, 2), np.array(t), normalize=normalize, reduce=reduce)
      for t in ([[0, 1], [1, 1], [0, 0]], [[0, -1], [-1, 1], [-1, 0]], [[-1, -1]] * 3)
      for normalize in (True, False) for reduce in ("mean", "no")),
    at("sigmoid_cross_entropy", WIDE, np.arange(len(WIDE)) % 2, reduce="no"),
    at("sigmoid_cross_entropy", WIDE, np.arange(len(WIDE)) % 3 - 1, reduce="no"),
    at("huber_loss", draw(3, 4), draw(3, 4) + 0.5, 1.0, reduce="no"),
    at("huber_loss", draw(3, 4), draw(3, 4) + 0.5, 0.25),
    at("huber_loss", np.array([[0.0, 2.0, -2.0, 1.0]]), np.zeros((1, 4)), 2.0, reduce="no"),
    *(at("hinge", draw(4, 5), LABELS, norm=norm, reduce=reduce) for norm in ("L1", "L2") for reduce in ("mean", "no")),
    *(at("bernoulli_nll", positive(2, 3) / 3, draw(2, 3), reduce=reduce) for reduce in ("sum", "mean", "no")),
    at("bernoulli_nll", np.linspace(0, 1, len(WIDE)), WIDE, reduce="no"),
    *(
        at("binary_cross_entropy", draw(4, 5), t, label_smoothing=s, threshold=h, sum_classes=c)
        for t in (LABELS, positive(4, 5) / 3) for s in (0.0, 0.25) for h in (None, 0.2) for c in (False, True)
    ),
    at("binary_cross_entropy", np.stack([WIDE, -WIDE]), np.array([0, 1])),
    *(at("gaussian_nll", draw(2, 3), draw(2, 3) + 1, draw(2, 3), reduce=r) for r in ("sum", "mean", "no")),
    *(at("gaussian_kl_divergence", draw(2, 3), draw(2, 3) + 1, reduce=r) for r in ("sum", "mean", "no")),
    at("mean_squared_error", draw(2, 3, 4, 5), draw(2, 3, 4, 5).T.copy().T + 1),
    at("mean_absolute_error", TIES, TIES.T.copy()),
]  # fmt: skip

PAIRED = np.array([1, 0, 0, 1])
NEAR = X + draw(4, 5, low=-0.3, high=0.3)
EMBEDDINGS = [
    *(at("contrastive", X, NEAR, PAIRED, margin=margin, reduce=reduce)
      for margin in (0.25, 2) for reduce in ("mean", "no")),
    at("contrastive", X, X.copy(), PAIRED, reduce="no"),
    at("contrastive", X, NEAR, PAIRED.astype(bool)),
    *(at("triplet", X, NEAR, X[::-1].copy(), margin=margin, reduce=reduce)
      for margin in (0.2, 50.0) for reduce in ("mean", "no")),
    *(at("cross_covariance", X + 30.0, draw(4, 3), reduce=reduce) for reduce in ("half_squared_sum", "no")),
    *(at("decov", X + 3.0, reduce=reduce) for reduce in ("half_squared_sum", "no")),
    *(at("laplace_nll", draw(2, 3), draw(2, 3) + 1, draw(2, 3), reduce=r) for r in ("sum", "mean", "no")),
    *(at("sigmoid_focal_loss", draw(3, 2), np.array([[0, -1], [-1, 1], [1, 0]]), reduce=reduce, **options)
      for reduce in ("mean", "sum", "no")
      for options in ({}, {"alpha": None}, {"alpha": 0.9, "gamma": 0.0}, {"gamma": 0.5}, {"gamma": 5.0})),
    at("sigmoid_focal_loss", WIDE, np.arange(len(WIDE)) % 2, reduce="no"),
    at("sigmoid_focal_loss", WIDE, 1 - np.arange(len(WIDE)) % 2, gamma=0.5, reduce="no"),
    at("sigmoid_focal_loss", draw(3), np.full(3, -1)),
]  # fmt: skip

MEASURES = [
    at("accuracy", TIES, np.array([1, 1, 0])),
    at("accuracy", X, LABELS, ignore_label=4),
    at("accuracy", X, np.full(4, 2), ignore_label=2),
    at("accuracy", IMAGES, PIXELS),
    at("accuracy", IMAGES, PIXELS, ignore_label=2),
    at("accuracy", X, LABELS[:, None]),
    at("binary_accuracy", np.array([0.0, -0.0, 1e-6, -1e-6, 3.0, 2.0]), np.array([1, 1, 0, 0, -1, 1])),
    at("binary_accuracy", draw(2, 3), np.full((2, 3), -1)),
    *(at("top_k_accuracy", draw(4, 5), LABELS, k=k) for k in (1, 2, 3, 5, 9)),
    at("top_k_accuracy", np.array([[1.0, 1.0, 1.0], [2.0, 1.0, 2.0]]), np.array([1, 2]), k=2),
    at("top_k_accuracy", draw(4, 5), positive(4, 5), k=2),
    at("r2_score", draw(5, 2), draw(5, 2) + 0.5, multioutput="raw_values"),
    at("r2_score", draw(5, 2), draw(5, 2) + 0.5),
    at("r2_score", draw(3, 2), np.array([[1.0, 0.0], [1.0, 2.0], [1.0, 4.0]]), multioutput="raw_values"),
]

CHANCE = [
    at("dropout", draw(2, 3), mask=draw(2, 3) + 1, return_mask=True),
    at("rrelu", draw(2, 3), l=0.0, u=0.9, r=draw(2, 3, low=0.0, high=0.9), return_r=True),
    at("gaussian", draw(2, 3), draw(2, 3) + 1, eps=draw(2, 3) - 1, return_eps=True),
]

CONVOLUTION = [
    *(at("convolution_2d", IMAGE, draw(6, 4 // options.get("groups", 1), 3, 2), **options) for options in (
        {"b": draw(6)}, {"stride": (2, 1)}, {"pad": (0, 2)}, {"dilate": (1, 2)}, {"groups": 2, "b": draw(6)},
        {"stride": 2, "cover_all": True}, {"stride": (1, 3), "pad": (2, 1), "dilate": (2, 1), "groups": 2},
        {"stride": 3, "pad": 1, "cover_all": True, "b": draw(6)})),
    *(at("deconvolution_2d", draw(2, 4, 3, 4), draw(4, 6 // options.get("groups", 1), 3, 2), **options) for options in (
        {"b": draw(6)}, {"stride": (2, 1)}, {"pad": (1, 0)}, {"dilate": (1, 2)}, {"groups": 2, "b": draw(6)},
        {"stride": 2, "outsize": (8, 8)}, {"stride": 2, "outsize": (8, 9)},
        {"stride": (3, 1), "pad": (1, 2), "dilate": (2, 1), "groups": 2})),
    *(at("max_pooling_2d", IMAGE, ksize, **options) for ksize in (2, (3, 2)) for options in (
        {}, {"stride": 1}, {"stride": (1, 3), "pad": (1, 0)}, {"cover_all": False},
        {"pad": (1, 0), "return_indices": True}, {"stride": 2, "cover_all": False, "return_indices": True})),
    at("max_pooling_2d", np.zeros((1, 1, 5, 5)), 3, 2, 1, return_indices=True),
    at("max_pooling_2d", -1 - positive(1, 2, 5, 5), 3, 2, 1),
    *(at("average_pooling_2d", IMAGE, ksize, **options) for ksize in (2, (3, 2)) for options in (
        {}, {"stride": 1}, {"stride": (1, 3)}, {"stride": 2, "pad": (1, 0)})),
    at("global_average_pooling_2d", draw(3, 2, 4, 7)),
]  # fmt: skip

NORMALIZATION = [
    at("batch_normalization", IMAGE, draw(4), draw(4) + 1, eps=0.5),
    at("batch_normalization", draw(5, 3), draw(5), draw(5) + 1, axis=1),
    at("batch_normalization", draw(2, 3, 4), draw(3, 4), draw(3, 4) + 1),
    at("batch_normalization", draw(2, 3, 4), draw(3), draw(3) + 1, axis=(0, 2)),
    at("batch_normalization", 30.0 + draw(6, 3), positive(3), draw(3)),
    *(at("batch_normalization", IMAGE, draw(4), draw(4) + 1, running_mean=draw(4), running_var=positive(4), **options)
      for options in ({}, {"decay": 0.25})),
    at("fixed_batch_normalization", IMAGE, draw(4), draw(4) + 1, draw(4) - 1, positive(4), eps=0.5),
    at("fixed_batch_normalization", draw(5, 3), draw(5), draw(5) + 1, draw(5) - 1, positive(5), axis=1),
    at("layer_normalization", draw(5, 7), draw(7), draw(7) + 1),
    at("layer_normalization", 30.0 + draw(5, 7), draw(7), draw(7) + 1, eps=0.5),
    *(at("group_normalization", IMAGE, groups, draw(4), draw(4) + 1) for groups in (1, 2, 4)),
    at("group_normalization", draw(3, 6), 3, draw(6), draw(6) + 1, eps=0.5),
]  # fmt: skip

SQUARE = np.array([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0], [-1.0, 0.5, 1.5]])
DEFINITE = SQUARE @ SQUARE.T
ALGEBRA = [
    at("einsum", "ij,jk->ik", draw(2, 3), draw(3, 4)),
    at("einsum", "bA,aB", draw(2, 3), draw(4, 5)),
    at("einsum", "i...i,...->...i", draw(3, 2, 3), draw(2)),
    at("einsum", "...,...", draw(3, 1), draw(2)),
    at("einsum", "...b,a...", draw(2, 3), draw(4, 2)),
    at("einsum", " i j , j -> i ", draw(2, 3), draw(3)),
    at("einsum", draw(2, 3), (3, 1), draw(3, 2), (1, 0)),
    at("det", SQUARE),
    at("det", np.zeros((2, 2))),
    at("batch_det", np.stack((SQUARE, SQUARE.T + 1))),
    at("inv", SQUARE),
    at("batch_inv", np.stack((SQUARE, SQUARE.T + 1))),
    at("cholesky", DEFINITE),
    at("cholesky", np.tril(DEFINITE)),
    at("fft", (draw(3, 7), draw(3, 7) + 1)),
    at("ifft", (draw(3, 7), draw(3, 7) + 1)),
    *(at(name, x, axis=axis) for name in ("cumsum", "cumprod") for x in (draw(2, 3, 4), TIES) for axis in (0, 1, -1)),
    *(at("prod", draw(2, 3, 4), axis=axis, keepdims=k) for axis in (1, (0, 2), (-1, 0, 1)) for k in (True, False)),
    at("prod", TIES),
    at("diagonal", draw(3, 4), 1),
    at("diagonal", draw(3, 4), 9),
    at("diagonal", draw(3, 4, 2, 3), offset=-1, axis1=-1, axis2=0),
    at("pad_sequence", (draw(3, 2), draw(1, 2)), length=4, padding=-1.5),
    at("pad_sequence", (draw(0, 2), draw(0, 2))),
    at("transpose_sequence", (draw(3, 2), draw(3, 2) + 1, draw(1, 2))),
]  # fmt: skip

PICTURES = [
    at("depth2space", draw(1, 12, 2, 3), 2),
    at("depth2space", draw(1, 9, 2, 3), 3),
    at("space2depth", draw(2, 3, 4, 6), 2),
    at("space2depth", draw(2, 1, 4, 6), 2),
    at("im2col", IMAGE, (3, 2), stride=(1, 2), pad=(0, 1), cover_all=True, dilate=(2, 1)),
    at("im2col", IMAGE, 2, stride=3, cover_all=False),
    at("im2col", IMAGE, 2, stride=3, cover_all=True),
    *(at("resize_images", IMAGE, shape, mode=mode, align_corners=align)
      for shape in ((6, 5), (11, 3), (1, 1), (4, 13)) for mode, align in (
          ("bilinear", True), ("bilinear", False), ("nearest", True))),
    at("spatial_transformer_grid", draw(2, 2, 3), (3, 4)),
    at("spatial_transformer_grid", draw(2, 2, 3), (1, 1)),
    at("spatial_transformer_sampler", IMAGE, draw(2, 2, 3, 4, low=-1.5, high=1.5)),
    at("spatial_transformer_sampler", IMAGE, 50.0 * draw(2, 2, 3, 4)),
    at("spatial_transformer_sampler", IMAGE, np.ones((2, 2, 1, 1))),
    at("spatial_transformer_sampler", IMAGE, -np.ones((2, 2, 1, 1))),
    at("normalize", draw(2, 3, 4), eps=0.5, axis=(0, 2)),
    at("normalize", draw(2, 3, 4), axis=-1),
    at("normalize", np.zeros((2, 3))),
    at("local_response_normalization", IMAGE, n=3, k=1.5, alpha=0.3, beta=0.5),
    at("local_response_normalization", 100 * IMAGE, n=20),
    at("local_response_normalization", draw(2, 3), n=4, alpha=1.0),
]  # fmt: skip

BY_CLASS = [
    *(
        at(name, X, LABELS, **options)
        for name in ("classification_summary", "precision", "recall", "f1_score")
        for options in ({}, {"label_num": 6}, {"ignore_label": 4}, {"ignore_label": 255})
    ),
    at("classification_summary", X, LABELS, beta=2.0),
    at("f1_score", TIES, np.array([1, 1, 0])),
    at("classification_summary", IMAGES, PIXELS, beta=0.5),
    at("recall", np.eye(3), np.array([0, 2, 1])),
]

MASK = (np.arange(24) * 5 % 7 > 2).reshape(2, 4, 3)
MASKED = [
    at("zoneout", draw(2, 3), draw(2, 3) + 1, ratio=1.0),
    at("zoneout", draw(2, 3), draw(2, 3) + 1, ratio=0.0),
    *(at("simplified_dropconnect", draw(2, 3), draw(4, 3), **options) for options in (
        {"mask": MASK}, {"mask": MASK, "b": draw(4), "ratio": 0.2}, {"mask": MASK, "ratio": 0.2, "train": False},
        {"mask": MASK[0], "use_batchwise_mask": False, "b": draw(4)})),
    at("simplified_dropconnect", draw(2, 3, 1), draw(4, 3), mask=MASK),
]  # fmt: skip


def sequences(name: str, num_weights: int, layers: int = 2, both: bool = False, **options: Any) -> Point:
    """Layers over three steps with 3, 2 and 1 examples of 4 elements; 2 units."""
    directions = 2 if both else 1
    num = layers * directions
    states = [draw(num, 3, 2) + 0.1 * k for k in range(2 if num_weights == 8 else 1)]
    ws = tuple(
        tuple(
            draw(2, (4 if k < directions else 2 * directions) if j < num_weights // 2 else 2) + 0.1 * j - 0.3 * k
            for j in range(num_weights)
        )
        for k in range(num)
    )
    bs = tuple(tuple(draw(2) * 0.3 * (j - 2) + 0.1 * k for j in range(num_weights)) for k in range(num))
    return at(name, layers, 0.0, *states, ws, bs, (draw(3, 4), draw(2, 4), draw(1, 4)), **options)


RECURRENT = [
    at("lstm", draw(3, 2), draw(2, 8)),
    at("lstm", draw(2, 1, 3), 20.0 * draw(2, 4, 3)),
    at("slstm", draw(2, 3), draw(2, 3) + 1, draw(2, 12), draw(2, 12) - 1),
    at("tree_lstm", draw(2, 3), draw(2, 3) + 1, draw(2, 15)),
    sequences("n_step_lstm", 8), sequences("n_step_bilstm", 8, both=True),
    sequences("n_step_gru", 6), sequences("n_step_bigru", 6, both=True),
    sequences("n_step_rnn", 2), sequences("n_step_birnn", 2, both=True),
    sequences("n_step_rnn", 2, activation="relu"), sequences("n_step_birnn", 2, both=True, activation="relu"),
]  # fmt: skip

VOLUME = draw(2, 4, 5, 4, 3)
TAGS = [np.array([1, 0, 2]), np.array([2, 2]), np.array([0])]
CHAINS = (draw(3, 3), draw(2, 3), draw(1, 3))
SPEECH = tuple(draw(3, 4) + 0.3 * t for t in range(5))
SPOKEN = np.array([[1, 2], [2, 2], [3, 0]])
WORDS, NOISE = np.array([1, -1, 0]), np.array([[0, 2], [3, 3], [1, 4]])
CHOSEN = np.concatenate([WORDS[:, None], NOISE], axis=1)
WINDOWS = [
    *(at(name, VOLUME, draw(2, 2, 2, 3, 2), draw(2), (2, 1, 3), (1, 2, 0), cover, (2, 1, 1), 2)
      for name in ("convolution_nd", "convolution_3d") for cover in (False, True)),
    at("convolution_nd", draw(2, 2, 3, 2, 2, 3), draw(2, 2, 2, 2, 1, 2)),
    at("convolution_1d", draw(2, 4, 7), draw(6, 2, 3), draw(6), 2, 3, True, 2, 2),
    at("convolution_1d", draw(2, 4, 7), draw(6, 4, 3), stride=3, pad=1),
    at("dilated_convolution_2d", IMAGE, draw(2, IMAGE.shape[1], 2, 2), draw(2), (2, 1), (1, 0), (2, 1), True),
    at("depthwise_convolution_2d", IMAGE, draw(3, IMAGE.shape[1], 2, 2), draw(3 * IMAGE.shape[1]), (2, 1), (1, 0)),
    *(at(name, draw(2, 4, 2, 3, 2), draw(4, 2, 2, 2, 3), draw(4), (2, 1, 2), (1, 0, 1), size, (1, 2, 1), 2)
      for name in ("deconvolution_nd", "deconvolution_3d") for size in (None, (3, 5, 4))),
    at("deconvolution_1d", draw(2, 4, 3), draw(4, 2, 3), draw(4), 2, 1, 6, 1, 2),
    at("deconvolution_1d", draw(2, 4, 3), draw(4, 2, 3), dilate=2),
    *(at(name, VOLUME, (3, 2, 2), (2, 1, 2), (1, 0, 0), cover, True)
      for name in ("max_pooling_nd", "max_pooling_3d") for cover in (False, True)),
    at("max_pooling_nd", np.zeros((1, 1, 3, 3, 3)), 2, 1, return_indices=True),
    at("max_pooling_1d", draw(2, 3, 7), 3, 2, 1, False, True),
    at("max_pooling_1d", draw(2, 3, 8), 3, cover_all=True),
    *(at(name, VOLUME, (3, 2, 2), (2, 1, 2), (1, 0, 1), value)
      for name in ("average_pooling_nd", "average_pooling_3d") for value in (0, None)),
    at("average_pooling_1d", draw(2, 3, 7), 3, 2, 1, None),
    at("average_pooling_1d", draw(2, 3, 7), 3, 2, 1, 0),
    *(at(name, draw(1, 2, 3, 2, 2), (3, 2, 2), (2, 1, 2), (1, 0, 1), size, cover)
      for name in ("unpooling_nd", "unpooling_3d")
      for size, cover in ((None, False), (None, True), ((5, 3, 2), True), ((6, 3, 3), False))),
    at("unpooling_2d", draw(2, 3, 2, 3), (3, 2), 2, (1, 0), (3, 6), True),
    at("unpooling_2d", draw(2, 3, 2, 3), 2, cover_all=False),
    at("unpooling_1d", draw(2, 3, 4), 3, 2, 1, 7, True),
    at("unpooling_1d", draw(2, 3, 4), 3, 2, 1, None, False),
    at("upsampling_2d", draw(1, 2, 2, 2), np.array([[[[1, 3], [0, 5]], [[4, 2], [3, 1]]]]), (2, 3), (2, 2), (0, 1),
       (4, 3), True),
    at("upsampling_2d", draw(1, 1, 2, 2), np.array([[[[1, 3], [0, 2]]]]), 2, cover_all=False),
    at("spatial_pyramid_pooling_2d", draw(2, 3, 7, 8), 3),
    at("spatial_pyramid_pooling_2d", draw(2, 3, 4, 4), 2, pooling="max"),
]  # fmt: skip
VOCABULARY = [
    *(at("crf1d", draw(3, 3) - 1, CHAINS, tuple(TAGS), reduce=reduce) for reduce in ("mean", "no")),
    at("argmax_crf1d", draw(3, 3) - 1, CHAINS),
    at("argmax_crf1d", np.zeros((3, 3)), (draw(2, 3), draw(2, 3))),
    *(at("connectionist_temporal_classification", SPEECH, SPOKEN, 0, reduce=reduce, label_length=np.array([2, 2, 1]))
      for reduce in ("mean", "no")),
    at("connectionist_temporal_classification", SPEECH, SPOKEN[:, :1], 0, np.array([3, 5, 2]), np.array([1, 0, 1]),
       reduce="no"),
    at("connectionist_temporal_classification", SPEECH, SPOKEN[:, :2] % 3, 3, np.array([5, 4, 5]), reduce="no"),
    at("negative_sampling", draw(3, 4), WORDS, draw(5, 4), None, 2, samples=CHOSEN, reduce="no", return_samples=True),
    at("negative_sampling", draw(3, 4), WORDS, draw(5, 4), None, 2, samples=CHOSEN),
    *(at("black_out", draw(3, 4), abs(WORDS), draw(5, 4), NOISE, reduce=reduce) for reduce in ("mean", "no")),
]  # fmt: skip

BOXES = np.array([[0.5, 1.0, 4.5, 5.5], [1.5, 0.5, 6.0, 3.0], [-3.0, -2.5, 9.0, 12.0], [2.0, 3.0, 1.0, 2.0]])
WHERE = np.array([1, 0, 1, 0])
OBJECTS = np.array([[[1, 2, 0], [1, 2, 2]], [[3, 1, 7], [3, -1, 1]]])
OFFSETS = draw(2, 8, 3, 6, low=-4.0, high=4.0)
REGIONS = [
    *(at(name, IMAGE, BOXES, WHERE, size, scale)
      for name in ("roi_average_pooling_2d", "roi_max_pooling_2d", "roi_average_align_2d", "roi_max_align_2d")
      for size in (1, (4, 3), 9) for scale in (1, 0.5, 3.0)),
    *(at(name, IMAGE, BOXES, WHERE, (2, 3), 0.9, ratio)
      for name in ("roi_average_align_2d", "roi_max_align_2d") for ratio in (1, (3, 2), (None, 1))),
    *(at(name, np.zeros((2, 1, 3, 3)), np.array([[20.0, 20.0, 30.0, 30.0]]), np.array([1]), 2, 1.0)
      for name in ("roi_average_pooling_2d", "roi_max_pooling_2d", "roi_average_align_2d", "roi_max_align_2d")),
    *(at("roi_pooling_2d", IMAGE, np.concatenate([WHERE[:, None], BOXES], 1), 2, 4, scale) for scale in (1, 0.6)),
    *(at("local_convolution_2d", IMAGE, draw(2, 2, 4, 4, 3, 2), b, (3, 1)) for b in (None, draw(2, 2, 4))),
    at("local_convolution_2d", draw(1, 1, 2, 2), draw(3, 1, 1, 1, 2, 2)),
    *(at("deformable_convolution_2d_sampler", draw(2, 3, 4, 3), OFFSETS, draw(2, 3, 2, 2), b, (2, 1), (1, 2))
      for b in (None, draw(2))),
    at("deformable_convolution_2d_sampler", draw(1, 1, 1, 1), np.zeros((1, 2, 1, 1)), draw(3, 1, 1, 1)),
    *(at("shift", draw(2, 11, 3, 4), k, d) for k in (1, (3, 1), 3) for d in (1, 2, (-1, 9))),
    at("shift", draw(2, 9, 3, 4)),
    at("as_strided", draw(4, 3), (3, 3), (-1, 4), 2),
    at("as_strided", draw(4, 3).T, (2, 3), (3, 2)),
    at("as_strided", draw(4), (), ()),
    at("as_strided", draw(0), (0, 3), (9, 9)),
    at("gumbel_softmax", draw(3, 5)),
    at("gumbel_softmax", draw(3, 5), 2.0, 0),
    *(at("discriminative_margin_based_clustering_loss", draw(2, 4, 2, 3), OBJECTS, 0.5, 3.0, num, norm, 2.0, 0.5, 3.0)
      for num in (3, 9) for norm in (1, 2)),
    at("discriminative_margin_based_clustering_loss", draw(2, 4, 2, 3), np.zeros((2, 2, 3), int), 0.5, 3.0, 4),
    at("discriminative_margin_based_clustering_loss", draw(1, 4, 2, 3), np.ones((1, 2, 3), int), 0.5, 3.0, 1),
]  # fmt: skip

COO = CooMatrix(draw(5), np.array([2, 0, 1, 0, 2]), np.array([0, 3, 2, 3, 1]), (3, 4))
WHITENING = [
    *(at("batch_renormalization", draw(6, 3), draw(3), draw(3) + 1, rmax, dmax, 0.1, draw(3), positive(3))
      for rmax, dmax in ((1, 0), (1.2, 0.3), (100.0, 100.0))),
    at("batch_renormalization", draw(5, 3, 4), draw(3, 4), draw(3, 4) + 1, 3, 5, 0.5, running_mean=draw(3, 4),
       running_var=positive(3, 4), decay=0.25, update_statistics=True),
    at("fixed_batch_renormalization", IMAGE, draw(4), draw(4) + 1, draw(4) - 1, positive(4), 0.5),
    at("decorrelated_batch_normalization", draw(40, 32)),
    at("decorrelated_batch_normalization", draw(1, 4), groups=2, eps=0.5),
    at("decorrelated_batch_normalization", IMAGE, groups=1, eps=0.5),
    *(at("decorrelated_batch_normalization", IMAGE, groups=2, running_mean=draw(2, 2), **options,
         running_projection=draw(2, 2, 2)) for options in ({}, {"decay": 0.25})),
    at("fixed_decorrelated_batch_normalization", draw(5, 32), draw(16, 2), draw(16, 2, 2)),
    at("fixed_decorrelated_batch_normalization", IMAGE, draw(2, 2), draw(2, 2, 2), groups=2),
    at("sparse_matmul", COO, draw(4, 2)),
    at("sparse_matmul", COO, draw(2, 3), True, True),
    at("sparse_matmul", draw(2, 3), COO),
    at("sparse_matmul", draw(4, 2), COO, True, True),
    at("forget", lambda a, b: a * b + a, draw(3, 2), draw(3, 2) + 1),
]  # fmt: skip

SEES = np.arange(12).reshape(4, 3) * 5 % 7 > 2
ATTENTION = [
    *(at("scaled_dot_product_attention", 9 * draw(2, 4, 5), draw(2, 3, 5), draw(2, 3, 2), mask, 0.0, causal, scale)
      for mask in (None, SEES, draw(4, 3), SEES[:1]) for causal in (True, False) for scale in (None, 2.0)),
    at("scaled_dot_product_attention", draw(2, 3), draw(1, 3), draw(1, 3), np.zeros((2, 1), bool)),
    *(at("multi_head_attention", draw(2, 4, 6), draw(2, 3, 6), draw(2, 3, 9), 3, mask, 0.0, causal)
      for mask in (None, SEES, np.stack([SEES, ~SEES])) for causal in (True, False)),
    *(at("rms_normalization", scale * draw(3, 4), draw(4), eps) for scale in (1.0, 1e-3, 1e3) for eps in (1e-6, 0.5)),
]  # fmt: skip

POINTS = [
    *REGIONS, *WHITENING, *ATTENTION,
    *ALGEBRA, *PICTURES, *BY_CLASS, *MASKED, *RECURRENT, *WINDOWS, *VOCABULARY,
    *ARITHMETIC, *SPECIAL, *REDUCTIONS, *PRODUCTS, *SHAPES, *ACTIVATIONS, *LOSSES, *EMBEDDINGS, *MEASURES, *CHANCE,
    *CONVOLUTION, *NORMALIZATION,
]  # fmt: skip

# Where the derivative jumps: function, inputs, gradients that ones bring to them (None: takes no gradient).
_AT_2 = np.array([-2.0, 2.0, 0.0, 3.0])
KINKS = [
    ("maximum", (_AT_2, _AT_2.copy()), {}, ([1, 1, 1, 1], [0, 0, 0, 0])),
    ("minimum", (_AT_2, _AT_2.copy()), {}, ([1, 1, 1, 1], [0, 0, 0, 0])),
    ("clip", (_AT_2, -2.0, 2.0), {}, ([1, 1, 1, 0],)),
    ("clip", (_AT_2, None, 2.0), {}, ([1, 1, 1, 0],)),
    ("clip", (_AT_2, 2.0, None), {}, ([0, 1, 0, 1],)),
    ("absolute", (_AT_2,), {}, ([-1, 1, 0, 1],)),
    ("relu", (_AT_2,), {}, ([0, 1, 0, 1],)),
    ("leaky_relu", (_AT_2,), {"slope": 0.5}, ([0.5, 1, 1, 1],)),
    ("prelu", (_AT_2[None], np.full(4, 0.5)), {}, ([[0.5, 1, 1, 1]], [-2, 0, 0, 0])),
    ("elu", (_AT_2,), {"alpha": 3.0}, ([3 * np.exp(-2.0), 1, 1, 1],)),
    ("clipped_relu", (_AT_2, 2.0), {}, ([0, 0, 0, 0],)),
    ("clipped_relu", (_AT_2, 2.5), {}, ([0, 1, 0, 0],)),
    ("hardswish", (np.array([-4.0, -3.0, 3.0, 4.0]),), {}, ([0, 0, 1, 1],)),
    ("laplace_nll", (_AT_2, np.zeros(4), np.zeros(4)), {}, ([-1, 1, 0, 1], [1, -1, 0, -1], [-1, -1, 1, -2])),
    (
        "contrastive",  # equal rows; a margin that is just kept
        (np.array([[1.0, 2.0], [3.0, 0.0]]), np.array([[1.0, 2.0], [0.0, 4.0]]), np.array([0, 0]), 5.0, "no"),
        {},
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]]),
    ),
    ("triplet", (np.zeros((1, 2)), np.ones((1, 2)), np.full((1, 2), 2.0), 6.0), {}, ([[0, 0]], [[0, 0]], [[0, 0]])),
    ("max", (TIES,), {"axis": 1}, ([[1, 1, 0], [0, 1, 1], [1, 1, 1]],)),
    ("min", (TIES,), {"axis": 1}, ([[0, 0, 1], [1, 0, 0], [1, 1, 1]],)),
    ("huber_loss", (_AT_2, np.zeros(4), 2.0, "no"), {}, ([-2, 2, 0, 2], [2, -2, 0, -2])),
    ("normalize", (np.zeros((1, 3)), 0.25), {}, ([[4, 4, 4]],)),
    ("prod", (np.array([2.0, 0.0, 3.0]),), {}, ([0, 6, 0],)),
    ("prod", (np.array([2.0, 0.0, 0.0]),), {}, ([0, 0, 0],)),
    ("cumprod", (np.array([2.0, 0.0, 3.0]),), {}, ([1, 8, 0],)),
    ("cholesky", (np.array([[4.0, 99.0], [2.0, 2.0]]),), {}, ([[0.25, 0], [0, 0.5]],)),
    ("max_pooling_2d", (np.zeros((1, 1, 2, 2)), 2), {}, ([[[[1, 0], [0, 0]]]],)),
    ("mean_absolute_error", (np.array([1.0, 2.0]), np.array([1.0, 0.0])), {}, ([0, 0.5], [0, -0.5])),
]
