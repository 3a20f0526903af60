"""Links around normalization."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist import functions as F
from dbrdist.core.array.backend import as_dtype, device_of, full, to_device
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.config import config, get_dtype
from dbrdist.core.array.types import Array
from dbrdist.core.model.link import Link
from dbrdist.core.model.link_hook import thread
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.limits import Sizes
from dbrdist.core.tape.checks import expected, wrong_type
from dbrdist.core.tape.function_node import is_observed
from dbrdist.core.usage.foreign_names import refuse_unknown
from dbrdist.core.usage.mistakes import warn
from dbrdist.functions import normalization as N
from dbrdist.functions.rectifier import relu
from dbrdist.links.initializers import Constant, Initializer, InitialValue, generate_array

if TYPE_CHECKING:
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.core.tape.variable import Operand, Variable


class BatchNormalization(Link):
    """Batch normalization with its scale gamma, shift beta and running statistics (Ioffe and Szegedy 2015).

    In training (``config.train``) a batch is normalized with its own statistics, towards which ``avg_mean`` and
    ``avg_var`` move; otherwise with those. The running variance is unbiased.

    Args:
        size: number of channels, or the shape of the axes that are kept; None takes it from the first batch.
        decay: weight of the past in the running statistics.
        eps: added to the variance.
        dtype: type of parameters and statistics; None for the configured one, float32 where that is mixed.
        use_gamma, use_beta: False leaves the parameter out.
        initial_gamma, initial_beta: initializer, array or number; None for 1 and 0.
        axis: axes to average over; None for all but the one after the first.
        initial_avg_mean, initial_avg_var: what the running statistics start from; None for 0 and 1.

    Example:
        >>> bn = L.BatchNormalization(3)
        >>> bn(np.random.default_rng(0).normal(size=(8, 3)).astype("f")).shape
        (8, 3)
    """

    gamma: Any = None
    beta: Any = None
    ignores_one_value: Any = True  # whether the output says nothing of a batch with one value per channel
    keeps_last: bool = False  # whether the running statistics are those of the last batch: see use_last_batch

    def __init__(
        self, size: Sizes = None, decay: float = 0.9, eps: float = 2e-5, dtype: DTypeLike | None = None,
        use_gamma: bool = True, use_beta: bool = True, initial_gamma: InitialValue = None,
        initial_beta: InitialValue = None, axis: Any = None, initial_avg_mean: InitialValue = None,
        initial_avg_var: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if size is None and axis is None and as_chainer[0]:
            raise RuntimeError(
                "BatchNormalization: expected size or axis, got neither, from which Chainer tells the shape"
            )
        if size is not None and np.ndim(size) > 1:
            raise TypeError(f"BatchNormalization: size: expected an int or a tuple of ints, got {type(size).__name__}")
        self.decay, self.eps = (x.item() if isinstance(x, np.ndarray) else x for x in (decay, eps))
        self.axis = (axis,) if isinstance(axis, int) else axis
        self.dtype = get_dtype(dtype, map_mixed16=np.float32)
        self._initial_avg = self._initializer(initial_avg_mean, 0), self._initializer(initial_avg_var, 1)
        self.N = 0  # batches seen since start_finetuning
        self.register_persistent("N")
        self.avg_mean = self.avg_var = None
        self.register_persistent("avg_mean")
        self.register_persistent("avg_var")
        with self.init_scope():
            if use_gamma:
                self.gamma = Parameter(self._initializer(initial_gamma, 1))
            if use_beta:
                self.beta = Parameter(self._initializer(initial_beta, 0))
        if size is not None:
            self._initialize_params((operator.index(size),) if np.ndim(size) == 0 else tuple(size))

    def _initializer(self, value: Array | None, default: float) -> Initializer:
        """What an argument means: None the default, a number or array a Constant of the link's type."""
        value = default if value is None else value
        return value if callable(value) else Constant(value, self.dtype)

    def _initialize_params(self, shape: tuple[int, ...]) -> None:
        self.avg_mean, self.avg_var = (
            generate_array(initializer, shape, self.xp, self.dtype, self.device) for initializer in self._initial_avg
        )
        for p in (self.gamma, self.beta):
            if p is not None and not p.is_initialized:
                p.initialize(shape)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_highprec_dtype" in state:  # Chainer pickled it
            self.dtype = np.dtype(state["_highprec_dtype"])
            means = state.get("_initial_avg_mean"), state.get("_initial_avg_var")
            self._initial_avg = self._initializer(means[0], 0), self._initializer(means[1], 1)

    def start_finetuning(self) -> None:
        """Forget how many batches the statistics have seen; see ``finetune``."""
        self.N = 0

    def forward(self, x: Operand, *, finetune: bool = False, **removed: Any) -> Any:
        """Normalize ``x``. With ``finetune`` the running statistics become the plain mean over all batches since
        ``start_finetuning``.

        Args:
            x: the input (N, channels, ...), to the same shape.
            finetune: whether the running statistics are a plain mean; default False.
            removed: refused: arguments of Chainer 1, with the ones that replaced them.
        """
        if removed:
            refuse_unknown("BatchNormalization.forward", BatchNormalization.forward, removed)
        return self._normalized(x, finetune)

    def add_relu(self, x: Any, residual: Any) -> Any:
        """``relu(self(x) + residual)``; in training one function, with fewer passes over x, where no hook looks on.

        Args:
            x: the input (N, channels, ...), to the same shape.
            residual: what is added, an array or Variable, as a rule of the shape of x.
        """
        if is_one_pass(self):
            return self._normalized(x, False, residual)
        return relu(self(x) + residual)

    def _normalized(self, x: Any, finetune: bool, *residual: Any) -> Any:
        axis, mean = self.axis, self.avg_mean
        if mean is None:
            averaged = N.default_axis(len(x.shape)) if axis is None else axis
            self._initialize_params(tuple(n for i, n in enumerate(x.shape) if i not in averaged))
            mean = self.avg_mean
        gamma = full(mean.shape, 1, self.dtype, mean) if self.gamma is None else self.gamma
        beta = full(mean.shape, 0, self.dtype, mean) if self.beta is None else self.beta
        if not config.train:  # backward sees the statistics of this call, however they move before it
            return N.fixed_batch_normalization(x, gamma, beta, mean.copy(), self.avg_var.copy(), self.eps, axis)
        if x.size == mean.size and x.size and self.ignores_one_value:
            warn(
                f"{type(self).__name__}: one value per channel in training: its mean is itself, so the output is beta "
                "whatever the input; take larger batches"
            )
        num_batches = self.N + 1 if finetune else self.N
        y = self._of_batch(x, gamma, beta, axis, 1.0 - 1.0 / num_batches if finetune else self.decay, *residual)
        if not config.in_recomputing:
            self.N = num_batches
            if self.keeps_last:
                self._undo_unbiased(x)
        return y

    def _undo_unbiased(self, x: Any) -> None:
        """The variance with which the batch was normalized, which the running one, just replaced by it, is not."""
        num_averaged = x.size // max(self.avg_mean.size, 1)
        if num_averaged > 1:
            self.avg_var *= self.avg_var.dtype.type((num_averaged - 1) / num_averaged)

    def _of_batch(self, x: Operand, gamma: Any, beta: Any, axis: Any, decay: float, *residual: Any) -> Variable:
        """x with the statistics of the batch, towards which the running ones move, once for each batch."""
        mean, var = (None, None) if config.in_recomputing else (self.avg_mean, self.avg_var)
        of_batch = F.residual.batch_normalization_add_relu if residual else N.batch_normalization
        return of_batch(
            x, gamma, beta, *residual, eps=self.eps, running_mean=mean, running_var=var, axis=axis, decay=decay
        )


def is_one_pass(bn: Any) -> bool:
    """May a normalization of the batch be one function with what follows: does nobody look on?"""
    if type(bn) is not BatchNormalization or not config.train:
        return False
    return not (bn._hooks or "forward" in bn.__dict__ or thread.hooks or is_observed())


def use_last_batch(link: Link) -> None:
    """Let all batch normalizations of a model evaluate with the mean and variance of their last training batch.

    There are no moving averages then: ``avg_mean`` and ``avg_var`` are those with which the last batch was normalized.
    Average them over the ranks before an evaluation (``comm.extensions.AllreducePersistent``), following Akiba et al.
    2017 (arXiv 1711.04325).

    Args:
        link: the model; its BatchNormalization links are changed in place.

    Example:
        >>> model = models.ResNet20()
        >>> L.use_last_batch(model)
    """
    for part in link.links():
        if isinstance(part, BatchNormalization):
            part.decay, part.keeps_last = 0.0, True


class BatchRenormalization(BatchNormalization):
    """Batch renormalization: batch normalization that follows its running statistics, within bounds (Ioffe 2017).

    Args:
        size: number of channels, or the shape of the axes that are kept.
        rmax, dmax: how far deviation and mean of a batch are corrected towards the running ones; 1 and 0 not at all,
            and a program raises both as it trains.
        decay, eps, dtype, use_gamma, use_beta, initial_gamma, initial_beta, initial_avg_mean, initial_avg_var: as of
            :class:`BatchNormalization`.

    Example:
        >>> L.BatchRenormalization(3)(np.ones((8, 3), np.float32)).shape
        (8, 3)
    """

    def __init__(
        self, size: Sizes, rmax: float = 1, dmax: float = 0, decay: float = 0.9, eps: float = 2e-5,
        dtype: DTypeLike | None = None, use_gamma: bool = True, use_beta: bool = True,
        initial_gamma: InitialValue = None, initial_beta: InitialValue = None, initial_avg_mean: InitialValue = None,
        initial_avg_var: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__(
            size, decay, eps, dtype, use_gamma, use_beta, initial_gamma, initial_beta, None, initial_avg_mean,
            initial_avg_var,
        )  # fmt: skip
        self.rmax, self.dmax = rmax, dmax

    @property
    def ignores_one_value(self) -> bool:
        """Whether there is no correction by which it says something of its mean."""
        return not self.dmax

    def _of_batch(self, x: Any, gamma: Any, beta: Any, axis: Any, decay: float) -> Any:
        return F.whitening.batch_renormalization(
            x,
            gamma,
            beta,
            self.rmax,
            self.dmax,
            self.eps,
            self.avg_mean,
            self.avg_var,
            decay,
            not config.in_recomputing,
        )


class _OfChainer5:
    """Loads statistics that all groups have in common, too."""

    is_loading = True

    def __init__(self, serializer: AbstractSerializer) -> None:
        self._serializer = serializer
        self.strict = getattr(serializer, "strict", True)

    def __call__(self, key: str, value: Any) -> Any:
        saved = self._serializer(key, None) if key.startswith("avg_") else None
        if saved is None or saved.shape != value.shape[1:]:
            return self._serializer(key, value)
        warn(
            f"DecorrelatedBatchNormalization: {key} has no axis of groups, as in files of Chainer 5; all take the same"
        )
        value[...] = to_device(saved, device_of(value))
        return value


class DecorrelatedBatchNormalization(Link):
    """Whitening: channels of mean 0 and variance 1 that are not correlated within their group (Huang et al. 2018).

    In training a batch is whitened with its own statistics, towards which ``avg_mean`` (groups, K) and
    ``avg_projection`` (groups, K, K) move; otherwise with those.

    Args:
        size: number of channels.
        groups: into how many groups of K = size / groups channels they are divided.
        decay: weight of the past in the running statistics.
        eps: added to the variances.
        dtype: type of the running statistics.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(32, 4)).astype("f")
        >>> L.DecorrelatedBatchNormalization(4, groups=2)(x).shape
        (32, 4)
    """

    def __init__(
        self, size: int, groups: int = 16, decay: float = 0.9, eps: float = 2e-5, dtype: DTypeLike = np.float32
    ) -> None:
        super().__init__()
        if groups < 1 or size % groups:
            raise expected("DecorrelatedBatchNormalization", "groups", f"a divisor of size={size}", groups)
        self.groups, self.decay, self.eps = groups, decay, eps
        width, dtype = size // groups, as_dtype(dtype)
        self.avg_mean: Any = np.zeros((groups, width), dtype)
        self.avg_projection: Any = np.tile(np.eye(width, dtype=dtype), (groups, 1, 1))
        self.N = 0  # batches seen since start_finetuning
        for name in ("avg_mean", "avg_projection", "N"):
            self.register_persistent(name)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load by ``serializer``; Chainer 5 saved statistics without an axis of groups."""
        super().serialize(_OfChainer5(serializer) if getattr(serializer, "is_loading", False) else serializer)

    def start_finetuning(self) -> None:
        """Forget how many batches the statistics have seen; see ``finetune``."""
        self.N = 0

    def forward(self, x: Operand, finetune: bool = False) -> Any:
        """Whiten ``x`` (N, C, ...). With ``finetune`` the running statistics become the plain mean over all batches
        since ``start_finetuning``."""
        if not config.train:
            mean, projection = self.avg_mean.copy(), self.avg_projection.copy()
            return F.whitening.fixed_decorrelated_batch_normalization(x, mean, projection, self.groups)
        if config.in_recomputing:
            return F.whitening.decorrelated_batch_normalization(x, groups=self.groups, eps=self.eps)
        num_batches = self.N + 1 if finetune else self.N
        y = F.whitening.decorrelated_batch_normalization(
            x, groups=self.groups, eps=self.eps, running_mean=self.avg_mean, running_projection=self.avg_projection,
            decay=1.0 - 1.0 / num_batches if finetune else self.decay,
        )  # fmt: skip
        self.N = num_batches
        return y


class _Affine(Link):
    """A scale gamma and a shift beta of one shape, which may follow from the first batch."""

    def __init__(self, size: Sizes, initial_gamma: InitialValue, initial_beta: InitialValue) -> None:
        super().__init__()
        dtype = get_dtype(map_mixed16=np.float32)
        with self.init_scope():
            self.gamma = Parameter(Constant(1, dtype) if initial_gamma is None else initial_gamma)
            self.beta = Parameter(Constant(0, dtype) if initial_beta is None else initial_beta)
        if size is not None:
            self._initialize_params(size)

    def _initialize_params(self, size: int) -> None:
        for p in (self.gamma, self.beta):
            if not p.is_initialized:
                p.initialize(size)


class LayerNormalization(_Affine):
    """Layer normalization of the rows of a matrix, with a scale gamma and a shift beta (Ba et al. 2016).

    Args:
        size: length of a row; None takes it from the first batch.
        eps: added to the variance.
        initial_gamma, initial_beta: initializer, array or number; None for 1 and 0.

    Example:
        >>> L.LayerNormalization(2)(np.array([[1.0, 3.0]], np.float32)).array.round(3)
        array([[-1.,  1.]], dtype=float32)
    """

    def __init__(
        self, size: Sizes = None, eps: float = 1e-6, initial_gamma: InitialValue = None,
        initial_beta: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__(size, initial_gamma, initial_beta)
        self.eps = eps.item() if isinstance(eps, np.ndarray) else eps

    def forward(self, x: Any) -> Any:
        """Normalize the rows of ``x`` (N, K)."""
        if not self.gamma.is_initialized:
            self._initialize_params(x.shape[1])
        return F.example_normalization.layer_normalization(x, self.gamma, self.beta, self.eps)


class GroupNormalization(_Affine):
    """Group normalization, with a scale gamma and a shift beta for each channel (Wu and He 2018).

    Args:
        groups: into how many groups the channels are divided.
        size: number of channels; None takes it from the first batch.
        eps: added to the variance.
        initial_gamma, initial_beta: initializer, array or number; None for 1 and 0.

    Example:
        >>> L.GroupNormalization(2, 4)(np.arange(8, dtype="f").reshape(2, 4)).shape
        (2, 4)
    """

    def __init__(
        self, groups: Any, size: int | None = None, eps: float = 1e-5, initial_gamma: InitialValue = None,
        initial_beta: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__(size, initial_gamma, initial_beta)
        self.groups, self.eps = groups, eps

    def forward(self, x: Operand) -> Any:
        """Normalize ``x`` (N, C, ...) in groups of channels."""
        if x.ndim < 2:
            raise expected("group_normalization", "x", "shape (N, C, ...)", x)
        if not isinstance(self.groups, (int, np.integer)):
            raise wrong_type("group_normalization", "groups", "an int", self.groups)
        if not self.gamma.is_initialized:
            self._initialize_params(x.shape[1])
        return F.example_normalization.group_normalization(x, self.groups, self.gamma, self.beta, self.eps)
