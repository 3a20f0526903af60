"""Gradients compared with differences of the function itself, along random directions.

The slope of ``sum(gy * func(x + s d))`` in s at 0 must equal ``sum(gx * d)`` for the gradient that backward computes.
Run it in float64 (``dtype=numpy.float64``): in narrower types rounding hides mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.core.array.backend import Array, as_dtype, copy, get_array_module, is_floating, to_cpu
from dbrdist.core.array.config import using_config
from dbrdist.core.tape import backprop
from dbrdist.core.tape.checks import wrong_shape
from dbrdist.core.tape.variable import Variable, as_array

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from dbrdist.core.tape.variable import Operand


class NondifferentiableError(Exception):
    """The function has a kink or a jump within the steps of the difference."""


class NothingToCheck(ValueError, RuntimeError):
    """No input or parameter is left whose gradient could be checked."""


def assert_allclose(x: Any, y: Any, atol: float = 1e-5, rtol: float = 1e-4, verbose: bool = True) -> None:
    """Raise an AssertionError unless |x - y| <= atol + rtol |y| everywhere.

    Args:
        x, y: arrays of any device, Variables or numbers.
        atol: the absolute tolerance.
        rtol: the tolerance relative to y.
        verbose: list the elements that differ.

    Example:
        >>> dbrdist.gradient_check.assert_allclose(np.array([1.0]), np.array([1.00001]))
    """
    arrays: list[Any] = [np.asarray(to_cpu(as_array(v))) for v in (x, y)]
    a, b = (v.astype(np.float64) if v.dtype.itemsize == 2 else v for v in arrays)
    np.testing.assert_allclose(a, b, atol=atol, rtol=rtol, verbose=verbose)


OutputArrays = list[Any]  # of one evaluation; None for an output whose gradient is None
Given: TypeAlias = "Operand | Sequence[Operand | None] | None"  # one array or several


def _slope(evaluate: Callable[[float], OutputArrays], gys: OutputArrays, eps: float, kinks: Kinks | None) -> float:
    """The derivative of ``sum(gy * y)`` at 0, from four points within ``eps``; the error is of order eps^4."""
    f = {k: evaluate(k * eps / 2) for k in (-2, -1, 1, 2)}
    if kinks is not None:
        kinks.look([f[-2], f[-1], evaluate(0.0), f[1], f[2]], eps)
    total = 0.0
    for i, gy in enumerate(gys):
        if gy is not None:
            total += float(((8 * (f[1][i] - f[-1][i]) - (f[2][i] - f[-2][i])) * gy).sum())
    return total / (6 * eps)


class Kinks:
    """Looks for a kink or a jump within the steps of a difference, in each element of each output."""

    def __init__(self, atol: float, rtol: float) -> None:
        self.atol = atol
        self.rtol = rtol

    def look(self, points: list[OutputArrays], eps: float) -> None:
        """Raise NondifferentiableError where five points in equal steps lie beside any parabola.

        What they have of third and fourth order is measured by the orthogonal polynomials over five points; an element
        that is finite at some of the points alone is a jump, one that is finite at none counts as smooth.
        """
        for output, ys in enumerate(zip(*points, strict=True)):
            if ys[0] is None or not ys[0].size:
                continue
            y = np.stack(ys)
            is_finite = np.isfinite(y)
            jumps = is_finite.any(0) & ~is_finite.all(0)
            y = np.where(is_finite.all(0), y, 0.0)
            third = np.tensordot([-1.0, 2.0, 0.0, -2.0, 1.0], y, 1) ** 2 / 10
            fourth = np.tensordot([1.0, -4.0, 6.0, -4.0, 1.0], y, 1) ** 2 / 70
            spread = np.ptp(y, axis=0)
            rounding = 1e-13 * np.abs(y).max(0)
            is_off = np.sqrt((third + fourth) / 5) > self.atol + rounding + self.rtol * spread
            if jumps.any() or (is_off & (spread > 0)).any():
                raise NondifferentiableError(
                    f"output {output} has a kink or a jump within {eps:g} of the point of the check; choose inputs "
                    "away from kinks and jumps"
                )


def numerical_grad(
    f: Callable[[], Sequence[Operand]],
    inputs: Sequence[Array],
    grad_outputs: Sequence[Array | None],
    eps: float = 1e-3,
    detect_nondifferentiable: bool = False,
    diff_atol: float = 0,
    diff_rtol: float = 1e-2,
    center_outputs: Sequence[Array] | None = None,
) -> tuple[Array, ...]:
    """The gradient of ``sum(gy * y)`` by each element of the inputs, from differences.

    Args:
        f: a function without arguments that computes the outputs from ``inputs``, which are changed in place meanwhile.
        inputs: arrays on one device.
        grad_outputs: the weights gy of the outputs; None leaves an output out.
        eps: the step of the differences.
        detect_nondifferentiable: raise NondifferentiableError at a kink.
        diff_atol, diff_rtol: how far a function may bend within a step before that counts as a kink.
        center_outputs: accepted for compatibility with Chainer, without effect.

    Returns:
        A tuple of arrays in the shapes of the inputs.

    Example:
        >>> x = np.array([3.0])
        >>> dbrdist.gradient_check.numerical_grad(lambda: (x * x,), (x,), (np.ones(1),))[0].round(3)
        array([6.])
    """
    if not eps > 0:
        raise wrong_shape("numerical_grad", "eps", "a number above 0", repr(eps))
    kinks = Kinks(diff_atol, diff_rtol) if detect_nondifferentiable else None
    return tuple(_numerical_grad_of(f, x, grad_outputs, eps, kinks) for x in inputs)


def _numerical_grad_of(
    f: Callable[[], Sequence[Operand]], x: Array, gys: Sequence[Operand | None], eps: float, kinks: Kinks | None
) -> Array:
    gx = get_array_module(x).zeros_like(x)
    wide = [None if gy is None else _float64(gy) for gy in gys]
    for i in np.ndindex(x.shape):
        original = x[i].copy()

        def evaluate(step: float, i: tuple[int, ...] = i, original: Array = original) -> OutputArrays:
            x[i] = original + step
            ys = _wide(f(), gys)
            x[i] = original
            return ys

        gx[i] = _slope(evaluate, wide, eps, kinks)
    return gx


def _wide(ys: Sequence[Operand], gys: Sequence[Operand | None]) -> OutputArrays:
    """OutputArrays as new arrays of float64, those that have a gradient."""
    return [None if gy is None else _float64(y) for y, gy in zip(ys, gys, strict=True)]


def _float64(y: Operand) -> Array:
    return np.array(to_cpu(as_array(y)), np.float64)


def _weighted_sum(ys: Sequence[Array], gys: Sequence[Array]) -> float:
    """sum(gy * y) in float64."""
    total = 0.0
    for y, gy in zip(ys, gys, strict=True):
        if gy is not None:
            total += float((_float64(y) * _float64(gy)).sum())
    return total


def _listed(xs: Given) -> list[Any]:
    return list(xs) if isinstance(xs, (tuple, list)) else [] if xs is None else [xs]


def _cast(x: Array, dtype: DTypeLike | None) -> Array:
    if x is None or not is_floating(x.dtype):
        return x
    return copy(x if dtype is None else x.astype(as_dtype(dtype)))


class _Problem:
    """A function with its point: the variables, the parameters, and a random direction over those that are checked."""

    def __init__(
        self,
        func: Callable[..., Variable | Sequence[Variable]],
        x_data: Given,
        params: Given,
        no_grads: Sequence[bool] | None,
        dtype: DTypeLike | None,
    ) -> None:
        self.func = func
        xs = _listed(x_data)
        skip = [False] * len(xs) if no_grads is None else list(no_grads)
        self.xs = [Variable(_cast(x, dtype)) for x in xs]
        self.params = _listed(params)
        if any(p.array is None for p in self.params):  # those that take their shape from the first input
            with using_config("enable_backprop", False):
                func(*self.xs)
        if dtype is not None:
            for p in self.params:
                p.array = _cast(p.array, dtype)
        self.checked = [x for x, no in zip(self.xs, skip, strict=True) if not no and is_floating(x.dtype)] + self.params
        if not self.checked:
            raise NothingToCheck("expected at least one floating-point input or parameter to check, got none")
        rng = np.random.default_rng(0)
        self.directions = [self._direction(rng, v.array) for v in self.checked]

    def _direction(self, rng: np.random.Generator, a: Array) -> Array:
        d = rng.uniform(0.5, 1.0, a.shape) * rng.choice([-1.0, 1.0], a.shape)
        return get_array_module(a).asarray(d)

    def outputs(self) -> list[Variable]:
        """The outputs at the current point, as Variables."""
        return [y if isinstance(y, Variable) else Variable(y) for y in _listed(self.func(*self.xs))]

    @contextmanager
    def moved(self, step: float) -> Iterator[None]:
        """Within the block the point is shifted along the direction."""
        originals = [v.array for v in self.checked]
        try:
            for v, a, d in zip(self.checked, originals, self.directions):
                v.array = get_array_module(a).asarray(a + step * d, a.dtype)
            yield
        finally:
            for v, a in zip(self.checked, originals):
                v.array = a

    def slope(self, gys: Sequence[Array | None], eps: float, kinks: Kinks | None) -> float:
        """The numerical slope of ``sum(gy * y)`` along the direction."""

        def at(step: float) -> OutputArrays:
            with self.moved(step):
                return _wide(self.outputs(), gys)

        return _slope(at, [None if gy is None else _float64(gy) for gy in gys], eps, kinks)

    def projected(self, grads: Sequence[Array | None]) -> float:
        """sum(gx * d) over what is checked; a gradient that is None counts as zero."""
        return _weighted_sum(
            [d for d, g in zip(self.directions, grads) if g is not None], [g for g in grads if g is not None]
        )


def _compare(order: str, computed: float, numerical: float, atol: float, rtol: float, problem: _Problem) -> None:
    if not abs(computed - numerical) <= atol + rtol * abs(numerical):
        shapes = [f"{v.shape} {v.dtype}" for v in problem.checked]
        raise AssertionError(
            f"{order} backward: expected a slope of {numerical!r} along a random direction, as differences show, "
            f"got {computed!r}; inputs and parameters: {', '.join(shapes)}"
        )


def _seeds(ys: Sequence[Variable], y_grad: Given, dtype: DTypeLike | None) -> list[Array]:
    gys = [_cast(g, dtype) for g in _listed(y_grad)]
    if not gys:
        if len(ys) != 1 or ys[0].shape != ():
            raise ValueError(f"y_grad: expected a gradient for each of {len(ys)} outputs, got None")
        return [get_array_module(ys[0]).ones_like(ys[0].array)]
    if len(gys) != len(ys):
        raise ValueError(f"y_grad: expected {len(ys)} gradients, one for each output, got {len(gys)}")
    return gys


def check_backward(
    func: Callable[..., Variable | Sequence[Variable]],
    x_data: Given,
    y_grad: Given,
    params: Given = (),
    eps: float = 1e-3,
    atol: float = 1e-5,
    rtol: float = 1e-4,
    no_grads: Sequence[bool] | None = None,
    dtype: DTypeLike | None = None,
    detect_nondifferentiable: bool = False,
) -> None:
    """AssertionError unless the gradients of ``func`` at ``x_data`` agree with differences.

    Args:
        func: takes Variables, one for each array in ``x_data``; returns a Variable or several.
        x_data: an array or several. Arrays of integers get no gradient.
        y_grad: the gradient of each output (None where an output is not used); None for a single number.
        params: parameters that ``func`` uses.
        eps: the step of the differences.
        atol, rtol: tolerance of the slope.
        no_grads: True for each input to leave out.
        dtype: float type to which everything is cast; ``numpy.float64`` unless ``func`` does not support it.
        detect_nondifferentiable: raise NondifferentiableError at kinks.

    Example:
        >>> dbrdist.gradient_check.check_backward(F.sin, np.array([0.5]), np.array([1.0]), dtype=np.float64)
    """
    _check(_Problem(func, x_data, params, no_grads, dtype), y_grad, eps, atol, rtol, dtype, detect_nondifferentiable)


def check_backward_with_params(
    func: Callable[..., Variable | tuple[Variable, ...]],
    x_data: Given,
    y_grad: Given,
    params: Sequence[Array] = (),
    eps: float = 1e-3,
    atol: float = 1e-5,
    rtol: float = 1e-4,
    no_grads: Sequence[bool] | None = None,
    dtype: DTypeLike | None = None,
    detect_nondifferentiable: bool = False,
) -> None:
    """:func:`check_backward` for functions that do not hold their parameters themselves.

    Args:
        func: ``func(xs, params)`` of two tuples of Variables.
        x_data: an array or a tuple of arrays, the inputs.
        y_grad: gradients of the outputs, an array or a tuple of arrays; None is one for an output of one element.
        params: arrays, whose gradients are checked as those of the inputs.
        eps: the step of the differences.
        atol, rtol: absolute and relative tolerance.
        no_grads: True for each input that takes no gradient; None for none of them.
        dtype: the type in which inputs and parameters are used, such as ``np.float64``; None keeps theirs.
        detect_nondifferentiable: raise NondifferentiableError at a kink instead of comparing.

    Raises:
        AssertionError: gradients and differences do not agree.

    Example:
        >>> check = dbrdist.gradient_check.check_backward_with_params
        >>> check(lambda xs, ps: xs[0] * ps[0], np.ones(2), np.ones(2), [np.full(2, 3.0)], dtype=np.float64)
    """
    xs, ps = _listed(x_data), _listed(params)
    skip = [False] * len(xs) if no_grads is None else list(no_grads)

    def of_all(*args: Variable) -> Variable | tuple[Variable, ...]:
        inputs = args[: len(xs)]
        return func(inputs, args[len(xs) :])

    problem = _Problem(of_all, (*xs, *ps), (), [*skip, *(False for _ in ps)], dtype)
    _check(problem, y_grad, eps, atol, rtol, dtype, detect_nondifferentiable)


def _check(
    problem: _Problem,
    y_grad: Given,
    eps: float,
    atol: float,
    rtol: float,
    dtype: DTypeLike | None,
    detect_nondifferentiable: bool,
) -> None:
    ys = problem.outputs()
    gys = _seeds(ys, y_grad, dtype)
    for v in problem.xs + problem.params:
        v.cleargrad()
    used = [(y, g) for y, g in zip(ys, gys) if g is not None]
    backprop.backward([y for y, _ in used], [g for _, g in used])
    computed = problem.projected([v.grad for v in problem.checked])
    kinks = Kinks(0, 1e-2) if detect_nondifferentiable else None
    with using_config("enable_backprop", False):
        numerical = problem.slope(gys, eps, kinks)
    _compare("first-order", computed, numerical, atol, rtol, problem)


def check_double_backward(
    func: Callable[..., Variable | tuple[Variable, ...]],
    x_data: Given,
    y_grad: Given,
    x_grad_grad: Given,
    params: Given = (),
    params_grad_grad: Given = (),
    eps: float = 1e-3,
    atol: float = 1e-4,
    rtol: float = 1e-3,
    no_grads: Sequence[bool] | None = None,
    dtype: DTypeLike | None = None,
    detect_nondifferentiable: bool = False,
) -> None:
    """Raise an AssertionError unless the gradients of the gradients of a function agree with differences.

    The first-order gradients, as functions of inputs, parameters and ``y_grad``, are checked by :func:`check_backward`.

    Args:
        func: a function of Variables that returns a Variable or a tuple of them.
        x_data: an array or a tuple of arrays, the inputs.
        y_grad: gradients of the outputs, an array or a tuple of arrays.
        x_grad_grad: gradients that arrive at the first-order gradients, one for each input that takes a gradient.
        params: Parameters that ``func`` uses, a single one or a tuple.
        params_grad_grad: gradients that arrive at the gradients of ``params``.
        eps: the step of the differences.
        atol, rtol: absolute and relative tolerance.
        no_grads: True for each input that takes no gradient; None for none of them.
        dtype: the type in which everything is computed, such as ``np.float64``; None keeps that of the inputs.
        detect_nondifferentiable: raise NondifferentiableError at a kink instead of comparing.

    Raises:
        AssertionError: gradients and differences do not agree.

    Example:
        >>> check = dbrdist.gradient_check.check_double_backward
        >>> check(lambda x: x * x * x, np.array([1.0, 2.0]), np.ones(2), np.ones(2), dtype=np.float64)
    """
    xs, gys, params = _listed(x_data), _listed(y_grad), _listed(params)
    skip = [False] * len(xs) if no_grads is None else list(no_grads)
    wanted = [i for i, (x, no) in enumerate(zip(xs, skip, strict=True)) if not no and is_floating(x.dtype)]
    ggs = [g for i, g in enumerate(_listed(x_grad_grad)) if len(_listed(x_grad_grad)) == len(wanted) or i in wanted]
    seeds = [g for g in gys if g is not None]

    def first_order(*args: Variable) -> tuple[Variable, ...]:
        inputs, grads = args[: len(xs)], iter(args[len(xs) :])
        with using_config("enable_backprop", True):
            ys = _listed(func(*inputs))
            pairs = [(y, next(grads)) for y, g in zip(ys, gys, strict=True) if g is not None]
            gxs = backprop.grad(
                [y for y, _ in pairs],
                [inputs[i] for i in wanted] + params,
                [g for _, g in pairs],
                enable_double_backprop=True,
            )
        targets = [inputs[i] for i in wanted] + params
        return tuple(g if g is not None else Variable(v.xp.zeros_like(v.array)) for g, v in zip(gxs, targets))

    check_backward(
        first_order,
        (*xs, *seeds),
        (*ggs, *_listed(params_grad_grad)),
        params,
        eps,
        atol,
        rtol,
        [*skip, *(False for _ in seeds)],
        dtype,
        detect_nondifferentiable,
    )
