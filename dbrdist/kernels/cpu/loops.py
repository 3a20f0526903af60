"""The provider ``loops``: update rules and some elementwise functions in one pass over memory, in own C.

The loops, in ``vector_loops.h``, run on OpenMP's threads. The provider serves float32 and float64 where dbrdist is
compiled. Elsewhere NumPy's formulas, which take several passes over pieces that stay in cache, give the same bits. What
needs an exponential is served in float32 alone, and differs from NumPy's by a few units in the last place. Special
functions are computed in double, and are SciPy's for the rare numbers that their loops leave out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.scipy_parts import special_function
from dbrdist.core.array.types import DType, HostArray
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.cpu.onednn_finite import memory_row
from dbrdist.kernels.reference import numpy_, numpy_softmax

if TYPE_CHECKING:
    from collections.abc import Hashable

try:
    from dbrdist.kernels.cpu import vector_loops as _found
except ImportError:  # not compiled
    _found = None

Plan = Callable[..., Any]
Before = tuple[tuple[str, tuple[float, ...], list[tuple[int, int]] | None], ...]

_PLACES: dict[str, int] = {} if _found is None else _found.PLACES
_OF_FLOAT_ALONE: set[str] = set() if _found is None else _found.OF_FLOAT_ALONE
_REAL = np.dtype(np.float32), np.dtype(np.float64)
_FEW = 1 << 13  # elements of an array up to which the call costs as much as it saves

_ERF_SLOPE, _NORMAL_HEIGHT = 2 / math.sqrt(math.pi), 1 / math.sqrt(2 * math.pi)


class CompiledLoop(NamedTuple):
    """How a loop computes a row.

    Args:
        name: of the loop.
        operands: the names of the row's arrays that it takes, in order.
        numbers: what it takes of the row's numbers; None for others than it is meant for.
        beyond: computes the elements that the loop leaves out, for which it gives NaN; None if there are none.
        num_out: how many arrays it writes, the gradients of as many operands; then the result is a tuple.
    """

    name: str
    operands: tuple[str, ...]
    numbers: Callable[..., tuple[float, ...] | None] = lambda *numbers: numbers
    beyond: Callable[..., HostArray] | None = None
    num_out: int = 1


def _scipy(name: str) -> Callable[..., HostArray]:
    """A function of SciPy, which is loaded at the first call."""
    return lambda *xs: special_function(name, "numpy")(*xs)


def _when(holds: bool, *numbers: float) -> tuple[float, ...] | None:
    return numbers if holds else None


# By the name of a row; by that name and the place of an operand, for the gradient of that operand; by that name and
# "each", for those of all operands at once. Of several loops, the first that is meant for the numbers.
TABLE: dict[Any, CompiledLoop | tuple[CompiledLoop, ...]] = {
    "hard_sigmoid": CompiledLoop("hard_sigmoid", ("x",)),
    ("hard_sigmoid", 0): CompiledLoop("hard_sigmoid_gradient", ("x", "gy")),
    "huber": CompiledLoop("huber", ("x", "t"), lambda delta: _when(delta >= 0, delta)),
    ("huber", 0): CompiledLoop("huber_gradient", ("x", "t", "gy"), lambda delta: _when(delta >= 0, delta)),
    "distance": CompiledLoop("distance", ("a", "b")),
    ("distance", 0): CompiledLoop("distance_gradient", ("a", "b", "gy")),
    ("absolute", 0): CompiledLoop("absolute_gradient", ("self", "gy")),
    ("clipped_relu", 0): CompiledLoop("clipped_gradient", ("x", "gy")),
    ("relu6", 0): CompiledLoop("clipped_gradient", ("x", "gy"), lambda: (6.0,)),
    "leaky_relu": CompiledLoop("leaky_relu", ("x",), lambda slope: _when(0 <= slope <= 1, slope)),
    ("leaky_relu", 0): CompiledLoop("leaky_relu_gradient", ("x", "gy")),
    "hardswish": CompiledLoop("hardswish", ("x",)),
    ("hardswish", 0): CompiledLoop("hardswish_gradient", ("x", "gy")),
    "sigmoid": CompiledLoop("sigmoid", ("x",)),
    ("sigmoid", 0): CompiledLoop("sigmoid_gradient", ("y", "gy")),
    "silu": CompiledLoop("silu", ("x",)),
    ("silu", 0): CompiledLoop("silu_gradient", ("x", "gy")),
    "softplus": CompiledLoop("softplus", ("x",), lambda beta: _when(beta > 0, beta)),
    ("softplus", 0): CompiledLoop("softplus_gradient", ("x", "gy")),
    "bernoulli": CompiledLoop("bernoulli", ("p", "x")),
    ("bernoulli", 1): CompiledLoop("bernoulli_gradient", ("p", "x", "gy")),
    "elu": CompiledLoop("elu", ("x",), lambda alpha: (alpha, 1.0)),
    ("elu", 0): CompiledLoop("elu_gradient", ("x", "gy"), lambda alpha: (alpha, 1.0)),
    "selu": CompiledLoop("elu", ("x",)),
    ("selu", 0): CompiledLoop("elu_gradient", ("x", "gy")),
    "gelu": CompiledLoop("gelu", ("x",)),
    ("gelu", 0): CompiledLoop("gelu_gradient", ("x", "gy")),
    "ndtr": CompiledLoop("ndtr", ("x",)),
    ("ndtr", 0): CompiledLoop("bell_gradient", ("x", "gy"), lambda: (0.5, _NORMAL_HEIGHT)),
    "erf": CompiledLoop("erf", ("x",)),
    ("erf", 0): CompiledLoop("bell_gradient", ("x", "gy"), lambda: (1.0, _ERF_SLOPE)),
    "erfc": CompiledLoop("erfc", ("x",)),
    ("erfc", 0): CompiledLoop("bell_gradient", ("x", "gy"), lambda: (1.0, -_ERF_SLOPE)),
    "erfinv": CompiledLoop("erfinv", ("x",), beyond=_scipy("erfinv")),
    ("erfinv", 0): CompiledLoop("rising_bell_gradient", ("y", "gy"), lambda: (1.0, 1 / _ERF_SLOPE)),
    "erfcinv": CompiledLoop("normal_quantile", ("x",), lambda: (0.5, -1.0), _scipy("erfcinv")),
    ("erfcinv", 0): CompiledLoop("rising_bell_gradient", ("y", "gy"), lambda: (1.0, -1 / _ERF_SLOPE)),
    "ndtri": CompiledLoop("normal_quantile", ("x",), lambda: (1.0, math.sqrt(2)), _scipy("ndtri")),
    ("ndtri", 0): CompiledLoop("rising_bell_gradient", ("y", "gy"), lambda: (0.5, 1 / _NORMAL_HEIGHT)),
    "erfcx": CompiledLoop("erfcx", ("x",)),
    "log_ndtr": CompiledLoop("log_ndtr", ("x",)),
    ("log_ndtr", 0): CompiledLoop("log_ndtr_gradient", ("x", "gy")),
    "lgamma": CompiledLoop("lgamma_of_positive", ("x",), beyond=_scipy("gammaln")),
    ("lgamma", 0): CompiledLoop("digamma_product", ("x", "gy"), beyond=lambda x, gy: gy * _scipy("digamma")(x)),
    "digamma": CompiledLoop("digamma", ("x",), beyond=_scipy("digamma")),
    ("digamma", 0): CompiledLoop("trigamma_product", ("x", "gy"), beyond=lambda x, gy: gy * _scipy("zeta")(2, x)),
    "pow_number": (
        CompiledLoop("square", ("x",), lambda c: _when(c == 2)),
        CompiledLoop("root", ("x",), lambda c: _when(c == 0.5)),
    ),
    ("pow_number", 0): (
        CompiledLoop("reciprocal_gradient", ("x", "gy"), lambda c: _when(c == -1)),
        CompiledLoop("root_gradient", ("x", "gy"), lambda c: _when(c == 0.5)),
        CompiledLoop("square_gradient", ("x", "gy"), lambda c: _when(c == 2)),
    ),
    "linear_interpolate": CompiledLoop("interpolated", ("p", "x", "y")),
    ("linear_interpolate", "each"): CompiledLoop("interpolated_gradients", ("p", "x", "y", "gy"), num_out=3),
    ("weighted_mean", "each"): CompiledLoop("weighted_mean_gradients", ("x", "w", "y", "share"), num_out=2),
    "normal_loss": CompiledLoop("gaussian_nll", ("x", "mean", "ln_var")),
    ("normal_loss", "each"): CompiledLoop("gaussian_nll_gradients", ("x", "mean", "ln_var", "gy"), num_out=3),
    "laplace_loss": CompiledLoop("laplace_nll", ("x", "loc", "ln_scale")),
    ("laplace_loss", "each"): CompiledLoop("laplace_nll_gradients", ("x", "loc", "ln_scale", "gy"), num_out=3),
    "focal": CompiledLoop("focal_loss", ("x", "t")),
    ("focal", 0): CompiledLoop("focal_loss_gradient", ("x", "t", "gy")),
    "box_muller": CompiledLoop("box_muller", ("radius_bits", "angle_bits")),
    "fmod": CompiledLoop("fmod", ("a", "b"), beyond=np.fmod),
    "remainder": CompiledLoop("remainder", ("a", "b"), beyond=np.remainder),
}


def _loop(name: str, *arrays: HostArray) -> Callable[..., bool]:
    """A function of arrays like these and numbers; Unsupported where no loop takes them."""
    dtype = arrays[0].dtype
    is_served = name in _PLACES and dtype in (_REAL[:1] if name in _OF_FLOAT_ALONE else _REAL)
    if not is_served or any(type(a) is not np.ndarray or a.dtype != dtype for a in arrays):
        raise onednn.Unsupported("no compiled loop, or none for these types")
    return functools.partial(_found.run, _PLACES[name], dtype.itemsize == 8)


def runner(name: str, *arrays: HostArray) -> Callable[..., bool]:
    """What runs a loop over arrays like these; Unsupported where there is none."""
    return _loop(name, *arrays)


def _elementwise_loop(name: str, *arrays: HostArray) -> tuple[Callable[..., bool], Any]:
    """As :func:`_loop`, of large arrays that lie alike, and what allocates another such array."""
    first = arrays[0]
    are_images = first.ndim == 4 and backend.lies_as_images(first)
    lies_well = backend.is_channels_last if are_images else _is_in_c_order
    is_large = first.size >= _FEW and lies_well(first)
    if not is_large or any(a.shape != first.shape or not (lies_well(a) or _is_repeated(a)) for a in arrays):
        raise onednn.Unsupported("small arrays, or layouts that differ")
    new = (backend.allocator if are_images else backend.plain_allocator)(first.shape, first.dtype)
    return _loop(name, *arrays), new


def _is_in_c_order(a: HostArray) -> bool:
    return bool(a.flags.c_contiguous)


def _is_repeated(a: HostArray) -> bool:
    """Whether an array is a broadcast view, such as the gradients that sums hand on; of images, of one value."""
    return not any(a.strides) or (a.ndim < 4 and 0 in a.strides)


def _as_operand(a: HostArray) -> HostArray:
    """As a loop takes it: in a row, but for a broadcast view."""
    return a if 0 in a.strides and not a.flags.c_contiguous else memory_row(a)


def _plan_update(rule: str, arrays: tuple[HostArray, ...], numbers: tuple[float, ...], before: Before = ()) -> Plan:
    """See dispatch.update."""
    run = _loop("amsgrad" if rule == "adam" and len(arrays) == 5 else rule, *arrays)
    if any(name not in _PLACES for name, _, _ in before):
        raise onednn.Unsupported("no compiled loop")
    places = [_PLACES[name] for name, _, _ in before]

    def update(rule: str, arrays: tuple[HostArray, ...], numbers: tuple[float, ...], before: Before = ()) -> bool:
        if not before:
            return run(arrays, numbers)
        return run(arrays, numbers, tuple([(place, *rest) for place, (_, *rest) in zip(places, before)]))

    return update


def _chosen_loop(
    key: Any, names: tuple[str, ...], numbers: tuple[float, ...]
) -> tuple[CompiledLoop, tuple[float, ...]]:
    """The loop for a row, and the numbers that it takes; Unsupported where there is none."""
    found = TABLE.get(key, ())
    for loop in found if type(found) is tuple else (found,):
        if names == loop.operands and all(type(v) in (int, float) and isfinite(v) for v in numbers):
            values = loop.numbers(*numbers)
            if values is not None:
                return loop, values
    raise onednn.Unsupported("a row, or its numbers")


def _plan_row(key: Any, names: tuple[str, ...], arrays: tuple[HostArray, ...], numbers: tuple[float, ...]) -> Plan:
    loop, values = _chosen_loop(key, names, numbers)
    run, new = _elementwise_loop(loop.name, *arrays)
    beyond = loop.beyond
    if loop.num_out > 1:
        return _plan_each(run, new, loop.num_out, values)

    def row(
        key: Hashable, names: tuple[str, ...], arrays: tuple[HostArray, ...], numbers: tuple[float, ...],
    ) -> HostArray | None:  # fmt: skip
        y = new()
        rows = memory_row(y), *map(_as_operand, arrays)
        if not run(rows, values):
            return None
        if beyond is not None and math.isnan(rows[0].max()):
            _complete(beyond, *rows)
        return y

    return row


def _plan_each(run: Callable[..., bool], new: Callable[[], HostArray], num_out: int, values: tuple[float, ...]) -> Plan:
    """Of a loop that writes the gradients of all operands."""

    def gradients(
        key: Hashable, names: tuple[str, ...], arrays: tuple[HostArray, ...], numbers: tuple[float, ...],
    ) -> tuple[HostArray, ...] | None:  # fmt: skip
        made = tuple([new() for _ in range(num_out)])
        return made if run((*map(memory_row, made), *map(_as_operand, arrays)), values) else None

    return gradients


def _complete(beyond: Callable[..., HostArray], y: HostArray, *xs: HostArray) -> None:
    """Compute what a loop has left out of y. Whatever else lies in the arrays changes no bit of it."""
    left_out = np.isnan(y)
    y[left_out] = beyond(*[x[left_out] for x in xs])


def _plan_relu_forward(x: HostArray) -> Plan:
    run, new = _elementwise_loop("relu_forward", x)

    def relu_forward(x: HostArray) -> HostArray:
        y = new()
        return y if run((memory_row(y), memory_row(x)), ()) else numpy_.relu_forward(x)

    return relu_forward


def _plan_relu_of_sum_over(a: HostArray, b: HostArray) -> Plan:
    """See host_dispatch.relu_of_sum_over."""
    run, _ = _elementwise_loop("relu_of_sum_over", a, b)
    return lambda a, b: run((memory_row(a), memory_row(b)), ())


def _plan_relu_of_sum_marked(a: HostArray, b: HostArray) -> Plan:
    """See host_dispatch.relu_of_sum_marked."""
    _elementwise_loop("relu_of_sum_over", a, b)  # raises where layouts differ
    run, new = _loop("relu_of_sum_marked", a, b), backend.allocator((a.size // numpy_.MARKS,), a.dtype)

    def relu_of_sum_marked(a: HostArray, b: HostArray) -> HostArray:
        marks = new()
        done = run((memory_row(a), marks, memory_row(b)), (numpy_.MARKS,))
        return marks if done else numpy_.relu_of_sum_marked(a, b)

    return relu_of_sum_marked


def _plan_relu_backward_marked(marks: HostArray, gy: HostArray, other: HostArray | None, is_ours: bool) -> Plan:
    """See host_dispatch.relu_backward_marked."""
    gradients = (gy,) if other is None else (gy, other)
    _, new = _elementwise_loop("relu_backward", *gradients)
    name = "relu_backward_marked" if other is None else "relu_backward_of_sum_marked"
    run = _loop(f"{name}_over" if is_ours else name, marks, *gradients)

    def relu_backward_marked(marks: HostArray, gy: HostArray, other: HostArray | None, is_ours: bool) -> HostArray:
        gx = gy if is_ours else new()
        rows = [memory_row(g) for g in ((gy,) if other is None else (gy, other))]
        done = run((memory_row(gx), marks, *rows[1 if is_ours else 0 :]), (numpy_.MARKS,))
        return gx if done else numpy_.relu_backward_marked(marks, gy, other, is_ours)

    return relu_backward_marked


def _plan_relu_backward(y: HostArray, gy: HostArray) -> Plan:
    run, new = _elementwise_loop("relu_backward", y, gy)

    def relu_backward(y: HostArray, gy: HostArray) -> HostArray:
        gx = new()
        done = run((memory_row(gx), memory_row(y), memory_row(gy)), ())
        return gx if done else numpy_.relu_backward(y, gy)

    return relu_backward


def _plan_relu_backward_over(y: HostArray, gy: HostArray) -> Plan:
    run, _ = _elementwise_loop("relu_backward_over", gy, y)

    def relu_backward_over(y: HostArray, gy: HostArray) -> HostArray:
        done = run((memory_row(gy), memory_row(y)), ())
        return gy if done else numpy_.relu_backward(y, gy)

    return relu_backward_over


def _plan_relu_backward_of_sum(y: HostArray, a: HostArray, b: HostArray, out: HostArray | None = None) -> Plan:
    """See numpy_.relu_backward_of_sum; ``out`` is a, b or new."""
    run, new = _elementwise_loop("relu_backward_of_sum", y, a, b)
    over = _loop("relu_backward_of_sum_over", y, a, b)

    def relu_backward_of_sum(y: HostArray, a: HostArray, b: HostArray, out: HostArray | None = None) -> HostArray:
        rows = [memory_row(v) for v in (y, a, b)]
        if out is None:
            gx = new()
            done = run((memory_row(gx), *rows), ())
        else:
            gx, (of_y, of_a, of_b) = out, rows
            done = over((of_a, of_y, of_b) if out is a else (of_b, of_y, of_a), ()) if out is a or out is b else False
        return gx if done else numpy_.relu_backward_of_sum(y, a, b, out)

    return relu_backward_of_sum


def _plan_softmax(name: str, reference: Callable[..., HostArray]) -> Callable[..., Plan]:
    """Rows that lie densely: the last axis in C order, or the channels of images."""

    def plan(*arguments: Any) -> Plan:
        *arrays, axis = arguments
        x = arrays[0]
        is_image = x.ndim == 4 and backend.lies_as_images(x)
        if axis != (1 if is_image else x.ndim - 1):
            raise onednn.Unsupported("another axis")
        run, new = _elementwise_loop(name, *arrays)
        numbers = (x.shape[axis],)

        def softmax(*arguments: Any) -> HostArray:
            y, xs = new(), arguments[:-1]
            done = run((memory_row(y), *map(memory_row, xs)), numbers)
            return y if done else reference(*arguments)

        return softmax

    return plan


def _plan_of_rows(name: str, arrays: tuple[HostArray, ...], numbers: tuple[Any, ...]) -> Plan:
    """See host_dispatch.of_rows."""
    kinds = "" if _found is None else _found.ROWS.get(name, "")
    num_out, length = len(kinds) - len(arrays), numbers[0]
    if num_out < 1 or length < 1 or any(type(a) is not np.ndarray or not _is_in_c_order(a) for a in arrays):
        raise onednn.Unsupported("no compiled loop, or other arrays than those in C order")
    run, dtype = _loop(name, *arrays), arrays[0].dtype
    of_row = {kind: _of_row(kind, *numbers) for kind in kinds}
    count = max(a.size // of_row[kind] for kind, a in zip(kinds[num_out:], arrays))
    sizes = [of_row[kind] * (1 if kind in "cmsiv" else count) for kind in kinds[:num_out]]
    new = [backend.plain_allocator((size,), dtype) for size in sizes]

    def of_rows(
        name: str, arrays: tuple[HostArray, ...], numbers: tuple[int, ...],
    ) -> tuple[HostArray, ...] | None:  # fmt: skip
        made = tuple([allocate() for allocate in new])
        return made if run((*made, *arrays), numbers) else None

    return of_rows


def runs(name: str) -> bool:
    """Whether there is such a loop here: none is where dbrdist is not compiled, or the processor lacks instructions."""
    return name in _PLACES


def rows_of(name: str, arrays: tuple[HostArray, ...], numbers: tuple[float, ...]) -> tuple[HostArray, ...] | None:
    """What a loop over rows makes of arrays, without a plan that is kept; None where it is not for them."""
    made: tuple[HostArray, ...] | None = _plan_of_rows(name, arrays, numbers)(name, arrays, numbers)
    return made


def _of_row(kind: str, n: int, columns: int = 0, plane: int = 1, *_: float) -> int:
    """The elements of an array for a row of n, by the letters of vector_loops.ROWS."""
    if kind in "vmgb":
        return columns
    of_plane = n // max(plane, 1)
    return {
        "r": 1, "p": 32, "t": 2 * n, "c": n * columns, "i": n * columns, "k": of_plane, "q": 4 * of_plane,
        "s": columns * plane,
    }.get(kind, n)  # fmt: skip


def _plan_sum_of(terms: tuple[HostArray, ...], out: HostArray) -> Plan:
    """See host_dispatch.sum_of: up to four terms in a pass, then three more."""
    if out.size < _FEW or any(a.ndim != 1 or a.shape != out.shape for a in terms):
        raise onednn.Unsupported("small arrays, or several sizes")
    runs = {n: (_loop(f"sum_of_{n}", out, *terms), _loop(f"sum_of_{n}_over", out, *terms)) for n in (2, 3, 4)}

    def sum_of(terms: tuple[HostArray, ...], out: HostArray) -> bool:
        first, rest = terms[:4], terms[4:]
        to, over = runs[len(first)]
        if not (over(first, ()) if first[0] is out else to((out, *first), ())):
            return False
        for i in range(0, len(rest), 3):
            some = rest[i : i + 3]
            if not runs[1 + len(some)][1]((out, *some), ()):
                for term in some:
                    np.add(out, term, out=out)
        return True

    return sum_of


def _plan_repeat(a: HostArray, values: HostArray) -> Plan:
    """See host_dispatch.repeat: of one value for each row of a matrix."""
    if a.ndim != 2 or values.strides[1] or a.dtype != np.float32 or not _is_in_c_order(a):
        raise onednn.Unsupported("other repetitions, or types")
    fill, numbers = _loop("fill_rows", a, values), (a.shape[1],)
    return lambda a, values: fill((a, np.ascontiguousarray(values[:, 0])), numbers)


def _plan_pick_rows(rows: HostArray, numbers: HostArray, picked: HostArray, adds: bool) -> Plan:
    """See host_dispatch.pick_rows."""
    is_served = _found is not None and rows.dtype == picked.dtype and rows.dtype in _REAL and rows.size > 0
    if not is_served or numbers.dtype != np.intp:
        raise onednn.Unsupported("no compiled loop, or none for these types")
    return _found.pick_rows  # type: ignore[no-any-return]


def _plan_filter_rows(*arrays: HostArray) -> Plan:
    """See host_dispatch.filter_rows."""
    if _found is None or [a.dtype for a in arrays] != [np.uint8, np.intp, np.intp, np.float32, np.uint8]:
        raise onednn.Unsupported("no compiled loop, or none for these types")
    return _found.filter_rows  # type: ignore[no-any-return]


def _plan_by_table(x: HostArray, entries: HostArray) -> Plan:
    """See device_dispatch.by_table."""
    is_served = _found is not None and (x.dtype, entries.dtype) == (np.uint8, np.float32) and x.ndim == 4 and x.size > 0
    if not is_served:
        raise onednn.Unsupported("no compiled loop, or none for these types")

    def by_table(x: HostArray, entries: HostArray) -> HostArray | None:
        out = np.empty(x.shape, np.float32)
        return out.transpose(0, 3, 1, 2) if _found.by_table(x, entries, out) else None

    return by_table


def _plan_convert(x: HostArray, dtype: DType) -> Plan:
    """See host_dispatch.convert."""
    kind = None if _found is None else _found.CONVERSIONS.get(_letter(x.dtype) + _letter(dtype))
    are_images = x.ndim == 4 and backend.lies_as_images(x)
    if kind is None or not (backend.is_channels_last(x) if are_images else _is_in_c_order(x)):
        raise onednn.Unsupported("no compiled loop, or none for this layout")
    new = (backend.allocator if are_images else backend.plain_allocator)(x.shape, dtype)

    def convert(x: HostArray, dtype: DType) -> HostArray | None:
        y = new()
        return y if _found.convert_elements(kind, memory_row(y), memory_row(x)) else None

    return convert


def _letter(dtype: DType) -> str:
    """As in conversion_loops.h; of other types something else."""
    return "E" if dtype.name == "bfloat16" else dtype.char if dtype.isnative and dtype.char in "efd" else "?"


def _plan_philox(words: HostArray, counter: HostArray, key: HostArray) -> Plan:
    """See host_dispatch.philox."""
    if _found is None:
        raise onednn.Unsupported("no compiled loop")
    return _found.philox  # type: ignore[no-any-return]


ROWS = {
    "filter_rows": _plan_filter_rows,
    "by_table": _plan_by_table,
    "convert": _plan_convert,
    "philox": _plan_philox,
    "pick_rows": _plan_pick_rows,
    "repeat": _plan_repeat,
    "sum_of": _plan_sum_of,
    "update": _plan_update,
    "row": _plan_row,
    "of_rows": _plan_of_rows,
    "softmax": _plan_softmax("softmax", numpy_softmax.softmax),
    "softmax_backward": _plan_softmax("softmax_backward", numpy_softmax.softmax_backward),
    "log_softmax": _plan_softmax("log_softmax", numpy_softmax.log_softmax),
    "log_softmax_backward": _plan_softmax("log_softmax_backward", numpy_softmax.log_softmax_backward),
    "relu_forward": _plan_relu_forward,
    "relu_of_sum_over": _plan_relu_of_sum_over,
    "relu_of_sum_marked": _plan_relu_of_sum_marked,
    "relu_backward_marked": _plan_relu_backward_marked,
    "relu_backward": _plan_relu_backward,
    "relu_backward_over": _plan_relu_backward_over,
    "relu_backward_of_sum": _plan_relu_backward_of_sum,
}
