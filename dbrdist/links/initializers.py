"""Initial values of parameters.

An initializer is called with an array and fills it. Random ones draw from ``core.random`` in the order in which
parameters are initialised: the seed alone decides the values, which are therefore equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.backend import Array, DeviceSpec, as_dtype, device_of, get_device, is_array, to_device
from dbrdist.core.array.config import get_dtype
from dbrdist.core.array.random import next_initializer_generator
from dbrdist.core.array.types import Module
from dbrdist.core.model.parameter import InitialValue as InitialValue
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.names.limits import number
from dbrdist.core.tape.checks import expected, one_of, wrong_shape
from dbrdist.core.usage.mistakes import given_a_class

Factor: TypeAlias = Annotated[float, number]  # of values on both sides of 0, or of a matrix: it may be negative


class Initializer:
    """The base of initializers: a callable that fills an array in place.

    A subclass defines ``__call__(array)``. A plain function of an array is an initializer as well.

    Args:
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.

    Example:
        >>> class Ramp(initializers.Initializer):
        ...     def __call__(self, array):
        ...         array[...] = np.arange(array.size).reshape(array.shape)
        >>> L.Linear(3, 1, initialW=Ramp()).W.array
        array([[0., 1., 2.]], dtype=float32)
    """

    def __init__(self, dtype: DTypeLike | None = None) -> None:
        self.dtype = None if dtype is None else as_dtype(dtype) if dtype not in ("mixed16", "mixedbf16") else dtype

    def __call__(self, array: Array) -> None:
        """Fill the array."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__(array)")


class Constant(Initializer):
    """All elements equal a number, or the elements of an array.

    Args:
        fill_value: the number, or an array in the shape of the parameter.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.

    Raises:
        ValueError: at the call, if the array has another shape than the parameter.

    Example:
        >>> a = np.zeros((2, 2), np.float32)
        >>> initializers.Constant(3)(a)
        >>> a
        array([[3., 3.],
               [3., 3.]], dtype=float32)
    """

    def __init__(self, fill_value: Any, dtype: Any = None) -> None:
        self.fill_value = fill_value
        super().__init__(dtype)

    def __call__(self, array: Array) -> None:
        if is_array(self.fill_value) and self.fill_value.ndim and self.fill_value.shape != array.shape:
            raise wrong_shape("Constant", "fill_value", f"shape {array.shape} to match the parameter", self.fill_value)
        value = self.fill_value
        array[...] = to_device(value, device_of(array)) if is_array(value) else value


class Zero(Constant):
    """Zeros.

    Args:
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.

    Example:
        >>> a = np.zeros((2, 2), np.float32)
        >>> initializers.Zero()(a)
        >>> a
        array([[0., 0.],
               [0., 0.]], dtype=float32)
    """

    fill_value = 0.0  # of those that Chainer pickled, too

    def __init__(self, dtype: DTypeLike | None = None) -> None:
        super().__init__(0.0, dtype)


class One(Constant):
    """Ones.

    Args:
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.

    Example:
        >>> a = np.zeros((2, 2), np.float32)
        >>> initializers.One()(a)
        >>> a
        array([[1., 1.],
               [1., 1.]], dtype=float32)
    """

    fill_value = 1.0  # of those that Chainer pickled, too

    def __init__(self, dtype: DTypeLike | None = None) -> None:
        super().__init__(1.0, dtype)


class NaN(Constant):
    """NaN, for parameters that are loaded later.

    Args:
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.

    Example:
        >>> a = np.zeros((2, 2), np.float32)
        >>> initializers.NaN()(a)
        >>> a
        array([[nan, nan],
               [nan, nan]], dtype=float32)
    """

    fill_value = math.nan  # of those that Chainer pickled, too

    def __init__(self, dtype: DTypeLike | None = None) -> None:
        super().__init__(math.nan, dtype)


class Identity(Initializer):
    """``scale`` times the unit matrix.

    Args:
        scale: the elements on the diagonal.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.

    Raises:
        ValueError: at the call, if the parameter is no square matrix.

    Example:
        >>> a = np.zeros((2, 2), np.float32)
        >>> initializers.Identity(2)(a)
        >>> a
        array([[2., 0.],
               [0., 2.]], dtype=float32)
    """

    def __init__(self, scale: Factor = 1.0, dtype: DTypeLike | None = None) -> None:
        self.scale = scale
        super().__init__(dtype)

    def __call__(self, array: Array) -> None:
        if array.ndim != 2 or array.shape[0] != array.shape[1]:
            raise expected("Identity", "array", "a square matrix", array)
        array[...] = np.eye(len(array)) * self.scale


class _Random(Initializer):
    """A scale and an optional generator ``rng``; by default the run's own stream is drawn from."""

    def __init__(self, scale: Factor, dtype: DTypeLike | None = None, rng: Any = None) -> None:
        self.scale = scale
        self.rng = rng
        super().__init__(dtype)

    def deviation(self, shape: tuple[int, ...]) -> float:
        """The standard deviation, or the half width of the interval, for a parameter of this ``shape``."""
        return self.scale

    def generator(self) -> Any:
        """The source of this parameter's numbers."""
        if self.rng is None:
            return next_initializer_generator()
        return _Legacy(self.rng) if isinstance(self.rng, np.random.RandomState) else self.rng


class _Legacy:
    """NumPy's old generator with the methods of the new one: it draws in float64."""

    def __init__(self, rng: np.random.RandomState) -> None:
        self.rng = rng

    def random(self, shape: tuple[int, ...], dtype: DTypeLike = np.float64) -> Array:
        return np.asarray(self.rng.random_sample(shape)).astype(dtype)

    def standard_normal(self, shape: tuple[int, ...], dtype: DTypeLike = np.float64) -> Array:
        return np.asarray(self.rng.standard_normal(shape)).astype(dtype)


def _draw_type(array: Array) -> DTypeLike:
    return np.float64 if array.dtype == np.float64 else np.float32


class Normal(_Random):
    """Normally distributed with mean 0.

    Args:
        scale: the standard deviation.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.
        rng: a generator of NumPy to draw from; None draws from the run's own stream (``dbrdist.random.set_seed``).

    Example:
        >>> a = np.zeros((400, 100), np.float32)
        >>> initializers.Normal(0.1)(a)
        >>> round(float(a.std()), 3)
        0.1
    """

    def __init__(self, scale: float = 0.05, dtype: DTypeLike | None = None, rng: Any = None) -> None:
        super().__init__(scale, dtype, rng)

    def __call__(self, array: Array) -> None:
        deviation = self.deviation(array.shape)
        dtype = _draw_type(array)
        array[...] = self.generator().standard_normal(array.shape, dtype) * dtype(deviation)


class LeCunNormal(Normal):
    """Normal with the standard deviation ``scale * sqrt(1 / fan_in)`` (LeCun et al. 1998, "Efficient BackProp").

    It is the default of links. fan_in is the number of inputs of an output.

    Args:
        scale: factor of the standard deviation.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.
        rng: a generator of NumPy to draw from; None draws from the run's own stream (``dbrdist.random.set_seed``).

    Example:
        >>> a = np.zeros((400, 100), np.float32)
        >>> initializers.LeCunNormal()(a)
        >>> round(float(a.std()), 3)
        0.1
    """

    def __init__(self, scale: float = 1.0, dtype: DTypeLike | None = None, rng: Any = None) -> None:
        super().__init__(scale, dtype, rng)

    def deviation(self, shape: tuple[int, ...]) -> float:
        return self.scale * math.sqrt(1 / max(get_fans(shape)[0], 1))


class GlorotNormal(Normal):
    """Normal with the standard deviation ``scale * sqrt(2 / (fan_in + fan_out))`` (Glorot and Bengio 2010).

    Args:
        scale: factor of the standard deviation.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.
        rng: a generator of NumPy to draw from; None draws from the run's own stream (``dbrdist.random.set_seed``).

    Example:
        >>> a = np.zeros((400, 100), np.float32)
        >>> initializers.GlorotNormal()(a)
        >>> round(float(a.std()), 3)
        0.063
    """

    def __init__(self, scale: float = 1.0, dtype: DTypeLike | None = None, rng: Any = None) -> None:
        super().__init__(scale, dtype, rng)

    def deviation(self, shape: tuple[int, ...]) -> float:
        return self.scale * math.sqrt(2 / max(sum(get_fans(shape)), 1))


class HeNormal(Normal):
    """Normal with the standard deviation ``scale * sqrt(2 / fan)`` (He et al. 2015), for networks with ReLU.

    Args:
        scale: factor of the standard deviation.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.
        fan_option: ``'fan_in'`` counts the inputs of an output, ``'fan_out'`` the outputs of an input.
        rng: a generator of NumPy to draw from; None draws from the run's own stream (``dbrdist.random.set_seed``).

    Raises:
        ValueError: ``fan_option`` is neither of the two.

    Example:
        >>> a = np.zeros((400, 100), np.float32)
        >>> initializers.HeNormal()(a)
        >>> round(float(a.std()), 3)
        0.142
    """

    def __init__(
        self, scale: float = 1.0, dtype: DTypeLike | None = None, fan_option: str = "fan_in",
        rng: np.random.RandomState | None = None,
    ) -> None:  # fmt: skip
        one_of("HeNormal", "fan_option", ("fan_in", "fan_out"), fan_option)
        self.fan_option = fan_option
        super().__init__(scale, dtype, rng)

    def deviation(self, shape: tuple[int, ...]) -> float:
        return self.scale * math.sqrt(2 / max(get_fans(shape)[self.fan_option == "fan_out"], 1))


class Uniform(_Random):
    """Uniform in [-scale, scale).

    Args:
        scale: half the width of the interval.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.
        rng: a generator of NumPy to draw from; None draws from the run's own stream (``dbrdist.random.set_seed``).

    Example:
        >>> a = np.zeros((400, 100), np.float32)
        >>> initializers.Uniform(0.5)(a)
        >>> round(float(a.max()), 2)
        0.5
    """

    def __init__(
        self, scale: Factor = 0.05, dtype: DTypeLike | None = None, rng: np.random.RandomState | None = None,
    ) -> None:  # fmt: skip
        super().__init__(scale, dtype, rng)

    def __call__(self, array: Array) -> None:
        width = self.deviation(array.shape)
        dtype = _draw_type(array)
        array[...] = (self.generator().random(array.shape, dtype) * dtype(2) - dtype(1)) * dtype(width)


class LeCunUniform(Uniform):
    """Uniform with half the width ``scale * sqrt(3 / fan_in)`` (LeCun et al. 1998).

    Args:
        scale: factor of the width.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.
        rng: a generator of NumPy to draw from; None draws from the run's own stream (``dbrdist.random.set_seed``).

    Example:
        >>> a = np.zeros((400, 100), np.float32)
        >>> initializers.LeCunUniform()(a)
        >>> round(float(a.max()), 2)
        0.17
    """

    def __init__(self, scale: Factor = 1.0, dtype: DTypeLike | None = None, rng: Any = None) -> None:
        super().__init__(scale, dtype, rng)

    def deviation(self, shape: tuple[int, ...]) -> float:
        return self.scale * math.sqrt(3 / max(get_fans(shape)[0], 1))


class GlorotUniform(Uniform):
    """Uniform with half the width ``scale * sqrt(6 / (fan_in + fan_out))`` (Glorot and Bengio 2010).

    Args:
        scale: factor of the width.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.
        rng: a generator of NumPy to draw from; None draws from the run's own stream (``dbrdist.random.set_seed``).

    Example:
        >>> a = np.zeros((400, 100), np.float32)
        >>> initializers.GlorotUniform()(a)
        >>> round(float(a.max()), 2)
        0.11
    """

    def __init__(
        self, scale: Factor = 1.0, dtype: DTypeLike | None = None, rng: np.random.RandomState | None = None,
    ) -> None:  # fmt: skip
        super().__init__(scale, dtype, rng)

    def deviation(self, shape: tuple[int, ...]) -> float:
        return self.scale * math.sqrt(6 / max(sum(get_fans(shape)), 1))


class HeUniform(Uniform):
    """Uniform with half the width ``scale * sqrt(6 / fan_in)`` (He et al. 2015).

    Args:
        scale: factor of the width.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.
        rng: a generator of NumPy to draw from; None draws from the run's own stream (``dbrdist.random.set_seed``).

    Example:
        >>> a = np.zeros((400, 100), np.float32)
        >>> initializers.HeUniform()(a)
        >>> round(float(a.max()), 2)
        0.24
    """

    def __init__(self, scale: Factor = 1.0, dtype: DTypeLike | None = None, rng: Any = None) -> None:
        super().__init__(scale, dtype, rng)

    def deviation(self, shape: tuple[int, ...]) -> float:
        return self.scale * math.sqrt(6 / max(get_fans(shape)[0], 1))


class Orthogonal(_Random):
    """``scale`` times orthonormal rows or columns (Saxe et al. 2013); axes from the second on count as columns.

    Args:
        scale: the length of each row or column.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.
        mode: ``'embedding'`` needs at least as many rows as columns, ``'projection'`` at most as many, ``'basis'`` the
            same number; ``'auto'`` fills any shape.
        rng: a generator of NumPy to draw from; None draws from the run's own stream (``dbrdist.random.set_seed``).

    Raises:
        ValueError: ``mode`` is unknown, or at the call, if the parameter has no shape that it can fill.

    Example:
        >>> a = np.zeros((2, 2))
        >>> initializers.Orthogonal(1.0)(a)
        >>> (a @ a.T).round(6) + 0.0
        array([[1., 0.],
               [0., 1.]])
    """

    def __init__(
        self, scale: Factor = 1.1, dtype: DTypeLike | None = None, mode: str = "auto",
        rng: np.random.Generator | np.random.RandomState | None = None,
    ) -> None:  # fmt: skip
        one_of("Orthogonal", "mode", ("auto", "embedding", "projection", "basis"), mode)
        self.mode = mode
        super().__init__(scale, dtype, rng)

    def __call__(self, array: Array) -> None:
        rows = array.shape[0] if array.ndim else 1
        columns = math.prod(array.shape[1:])
        fits = {"embedding": rows >= columns, "projection": rows <= columns, "basis": rows == columns, "auto": True}
        if not fits[self.mode]:
            raise expected("Orthogonal", "array", f"a shape that mode {self.mode!r} can fill", array)
        tall = self.generator().standard_normal((max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(tall)
        q *= np.sign(np.diagonal(r))  # makes the distribution uniform (Mezzadri 2007)
        array[...] = ((q if rows >= columns else q.T) * self.scale).reshape(array.shape)


class _Interpolation(Initializer):
    """Filters (C, C or 1, k, ..., k) that interpolate linearly within each channel."""

    def __init__(self, interpolation: str = "linear", dtype: DTypeLike | None = None) -> None:
        one_of(type(self).__name__, "interpolation", ("linear",), interpolation)
        self.interpolation = interpolation
        super().__init__(dtype)

    def window(self, size: int) -> Array:
        """The ``size`` weights along one axis: a triangle of height 1."""
        factor = (size + 1) // 2
        return 1 - np.abs(np.arange(size) - (size - 1) / 2) / factor

    def __call__(self, array: Array) -> None:
        channels, others = array.shape[:2] if array.ndim > 2 else (0, 0)
        if others not in (channels, 1) or len(set(array.shape[2:])) != 1:
            raise expected(type(self).__name__, "array", "shape (C, C or 1, k, ..., k)", array)
        weights = np.ones(())
        for _ in array.shape[2:]:
            weights = np.multiply.outer(weights, self.window(array.shape[2]))
        array[...] = 0
        array[np.arange(channels), np.arange(channels) if others == channels else 0] = weights


class UpsamplingDeconvFilter(_Interpolation):
    """Filters of a deconvolution that enlarges images by ``stride = (ksize + 1) // 2`` (Long et al. 2015).

    For weights (C, C, k, ..., k), or (C, 1, k, ..., k) with groups.

    Args:
        interpolation: ``'linear'``.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.

    Raises:
        ValueError: another interpolation, or at the call, a parameter of another shape.

    Example:
        >>> a = np.zeros((1, 1, 3, 3))
        >>> initializers.UpsamplingDeconvFilter()(a)
        >>> a[0, 0]
        array([[0.25, 0.5 , 0.25],
               [0.5 , 1.  , 0.5 ],
               [0.25, 0.5 , 0.25]])
    """


class DownsamplingConvFilter(_Interpolation):
    """Filters of a convolution that shrinks images by ``stride = (ksize + 1) // 2`` (Long et al. 2015).

    As :class:`UpsamplingDeconvFilter`, with weights that add up to 1.

    Args:
        interpolation: ``'linear'``.
        dtype: the type of the parameter, such as ``np.float32`` or ``'mixed16'``; None takes ``config.dtype``.

    Raises:
        ValueError: another interpolation, or at the call, a parameter of another shape.

    Example:
        >>> a = np.zeros((1, 1, 3, 3))
        >>> initializers.DownsamplingConvFilter()(a)
        >>> a[0, 0]
        array([[0.0625, 0.125 , 0.0625],
               [0.125 , 0.25  , 0.125 ],
               [0.0625, 0.125 , 0.0625]])
    """

    def window(self, size: int) -> Array:
        """The ``size`` weights along one axis, with sum 1."""
        weights = super().window(size)
        return weights / weights.sum()


def get_fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """(fan_in, fan_out) of a weight: (out, in) of a matrix; a filter's (out, in, ...) times its further axes."""
    if len(shape) < 2:
        raise expected("get_fans", "shape", "at least two axes (out, in, ...)", str(shape))
    receptive_field = math.prod(shape[2:])
    return shape[1] * receptive_field, shape[0] * receptive_field


def get_initializer(initializer: InitialValue, default: Initializer | None = None) -> Initializer:
    """What a link's argument means: None the default (LeCunNormal), a number or array a Constant, else as it is."""
    if initializer is None:
        return LeCunNormal() if default is None else default
    if isinstance(initializer, type):
        raise given_a_class("initializer", initializer, "an initializer, a number or an array")
    if isinstance(initializer, str):
        raise TypeError(f"initializer: expected an initializer, a number or an array, got the text {initializer!r}")
    if callable(initializer):
        return initializer
    return Constant(initializer)


def generate_array(
    initializer: InitialValue, shape: int | Sequence[int], xp: Module, dtype: Any = None,
    device: DeviceSpec | None = None,
) -> Array:  # fmt: skip
    """A new array filled by an initializer.

    Args:
        initializer: a callable that fills an array; its ``dtype``, if it has one, must agree with ``dtype``.
        shape: the shape of the array.
        xp: ``numpy`` or ``cupy``, where no device is given.
        dtype: the type; None takes the initializer's, or else ``config.dtype``.
        device: where the array is made, such as ``'@cupy:0'``; None follows ``xp``.

    Raises:
        ValueError: ``dtype`` differs from the initializer's own.

    Example:
        >>> initializers.generate_array(initializers.One(), (2,), np)
        array([1., 1.], dtype=float32)
    """
    own = getattr(initializer, "dtype", None)
    if dtype is not None and own is not None and get_dtype(dtype) != get_dtype(own):
        raise expected("generate_array", "dtype", f"the initializer's {own}", str(dtype))
    array = np.empty(shape, get_dtype(dtype if own is None else own))
    initializer(array)
    if device is None:
        device = "@numpy" if xp is np else "@cupy"
    return to_device(array, get_device(device))


explain_constructors(globals())
