"""Weights divided by their largest singular value."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist import functions as F
from dbrdist.core.array.backend import Array, get_array_module, to_cpu
from dbrdist.core.array.config import config
from dbrdist.core.array.random import next_initializer_generator
from dbrdist.core.array.types import Module
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.repeats import computed_once
from dbrdist.core.tape.variable import Variable, as_array
from dbrdist.link_hooks.weight import WeightHook
from dbrdist.links.convolution import Deconvolution2D
from dbrdist.links.convolution_nd import DeconvolutionND
from dbrdist.links.initializers import Constant


def l2normalize(xp: Module, v: Array, eps: float = 1e-12) -> Array:
    """v / (|v| + eps)."""
    return v / (xp.sqrt((v * v).sum()) + v.dtype.type(eps))


def update_approximate_vectors(
    weight_matrix: Variable, u: Array, n_power_iteration: int = 1, eps: float = 1e-12
) -> tuple[Array, Array]:
    """The first left and right singular vectors (rows,) and (columns,), nearer by some steps of power iteration."""
    W = as_array(weight_matrix)
    xp = get_array_module(W)
    for _ in range(n_power_iteration):
        v = l2normalize(xp, u @ W, eps)
        u = l2normalize(xp, W @ v, eps)
    return u, v


def calculate_max_singular_value(weight_matrix: Variable, u: Array, v: Array) -> Variable:
    """u W v, the largest singular value where u and v are its vectors."""
    return F.sum(F.matmul(u[None], weight_matrix) * v)


class SpectralNormalization(WeightHook):
    """Forward sees W / s with an estimate s of the largest singular value of W (Miyato et al. 2018, arXiv:1802.05957).

    W is a matrix here with a row for each output. In training, each forward brings s nearer by power iteration; its
    vector is kept in the link as ``W_u``, and saved with it.

    Args:
        n_power_iteration: steps of each forward.
        eps: added to norms.
        use_gamma: multiply by a parameter ``gamma`` of the link, initially the largest singular value.
        factor: multiply by this number; None for 1.
        weight_name: the parameter of the link.
        name: of the hook; default ``SpectralNormalization``.

    Example:
        >>> layer = L.Linear(3, 2)
        >>> layer.add_hook(dbrdist.link_hooks.SpectralNormalization())
        Linear(in_size=3, out_size=2, nobias=False)
        >>> layer(np.ones((1, 3), np.float32)).shape
        (1, 2)
    """

    name = "SpectralNormalization"

    def __init__(
        self, n_power_iteration: int = 1, eps: float = 1e-6, use_gamma: bool = False, factor: float | None = None,
        weight_name: str = "W", name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(weight_name, name)
        if n_power_iteration < 1:
            raise expected("SpectralNormalization", "n_power_iteration", "1 or more", n_power_iteration)
        self.n_power_iteration, self.eps = n_power_iteration, eps
        self.use_gamma, self.factor = use_gamma, factor
        self.vector_name = weight_name + "_u"
        self.axis = 0  # of W, for outputs

    def added(self, link: Any) -> None:
        """Make the vector of ``link``, and ``gamma``; where W has no shape yet, at the first forward."""
        super().added(link)
        if isinstance(link, (Deconvolution2D, DeconvolutionND)):
            self.axis = 1
        link.add_persistent(self.vector_name, None)
        if self.use_gamma:
            with link.init_scope():
                link.gamma = Parameter()
        if link.__dict__[self.weight_name].is_initialized:
            self._prepare(link, link.__dict__[self.weight_name])

    def deleted(self, link: Any) -> None:
        """Remove the vector of ``link``, and ``gamma``."""
        delattr(link, self.vector_name)
        if self.use_gamma:
            del link.gamma

    def _prepare(self, link: Any, W: Any) -> None:
        if 0 in W.shape:
            raise expected("SpectralNormalization", self.weight_name, "a weight that has elements", W)
        if getattr(link, self.vector_name) is None:
            u = next_initializer_generator().standard_normal(W.shape[self.axis]).astype(W.dtype)
            setattr(link, self.vector_name, link.device.send(u))
        if self.use_gamma and not link.gamma.is_initialized:
            values = np.linalg.svd(to_cpu(self._matrix(as_array(W))).astype(np.float64), compute_uv=False)
            link.gamma.initializer = Constant(values[0], W.dtype)
            link.gamma.initialize(())

    def _matrix(self, W: Any) -> Any:
        """W with a row for each output."""
        if self.axis:
            W = W.transpose((self.axis, *(i for i in range(W.ndim) if i != self.axis)))
        return W.reshape((W.shape[0], -1))

    def weight(self, link: Any, W: Any) -> Any:
        """The weight ``W`` of ``link``, divided by its largest singular value."""
        self._prepare(link, W)
        matrix, kept = self._matrix(W), getattr(link, self.vector_name)
        u, v = computed_once(lambda: update_approximate_vectors(matrix, kept, self.n_power_iteration, self.eps))
        if config.train and not config.in_recomputing:
            kept[...] = u
        scale = (1.0 if self.factor is None else self.factor) / calculate_max_singular_value(matrix, u, v)
        return W * (link.gamma * scale if self.use_gamma else scale)
