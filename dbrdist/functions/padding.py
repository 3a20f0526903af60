"""Frames around arrays: of a constant, or of the arrays' own elements."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.array_operations import are_images
from dbrdist.core.array.backend import Array, channels_last, empty_as, full_as, get_array_module, zeros_as
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_variable


class Pad(FunctionNode):
    """y = x within a frame of one value; gx = the part of gy within the frame"""

    def __init__(self, widths: list[tuple[int, int]], value: Any) -> None:
        self.widths = widths
        self.value = value

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x = xs[0]
        if not np.isscalar(self.value):
            y = get_array_module(x).pad(x, self.widths, constant_values=self.value)
            return (channels_last(y) if are_images(x) else y,)
        y = full_as(x, tuple(a + n + b for n, (a, b) in zip(x.shape, self.widths)), x.dtype, self.value)
        y[self._inside(x.shape)] = x
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (ops.getitem(gys[0], self._inside(self.inputs[0].shape)),)

    def _inside(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for n, (a, _) in zip(shape, self.widths))


_REPEATING = ("edge", "reflect", "symmetric", "wrap")


class ChainerPad(FunctionNode):
    """y = ``numpy.pad`` of x in any mode; gx = the part of gy within the frame, which Chainer takes for constant"""

    def __init__(self, widths: list[tuple[int, int]], mode: str, keywords: dict[str, Any]) -> None:
        self.widths, self.mode, self.keywords = widths, mode, keywords

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        y = get_array_module(xs[0]).pad(xs[0], self.widths, mode=self.mode, **self.keywords)
        return (channels_last(y) if are_images(xs[0]) else y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        inside = tuple(slice(a, a + n) for n, (a, _) in zip(self.inputs[0].shape, self.widths))
        return (ops.getitem(gys[0], inside),)


def _runs(places: Sequence[int]) -> list[tuple[int, slice]]:
    """Runs of consecutive places, upward or downward: where each begins among the given ones, and a slice for it."""
    runs, i = [], 0
    while i < len(places):
        step = places[i + 1] - places[i] if i + 1 < len(places) else 1
        step = step if step in (1, -1) else 1
        j = i + 1
        while j < len(places) and places[j] - places[j - 1] == step:
            j += 1
        end = places[j - 1] + step
        runs.append((i, slice(places[i], None if end < 0 else end, step)))
        i = j
    return runs


class _Frame:
    """What lies around an axis of n elements: pairs of a stretch of the frame and the elements that it repeats."""

    def __init__(self, n: int, width: tuple[int, int], mode: str) -> None:
        places: Any = np.pad(np.arange(n), width, mode=mode)  # type: ignore[call-overload]
        before = width[0]
        self.places = places
        self.inside = slice(before, before + n)
        self.before = self._stretches(places[:before].tolist(), 0)
        self.after = self._stretches(places[before + n :].tolist(), before + n)

    @staticmethod
    def _stretches(places: list[int], start: int) -> list[tuple[slice, slice]]:
        """Of places that lie from ``start`` on."""
        runs = _runs(places)
        ends = [i for i, _ in runs[1:]] + [len(places)]
        return [(slice(start + i, start + end), run) for (i, run), end in zip(runs, ends)]


class PadWithElements(FunctionNode):
    """y = x within a frame of its own elements, one axis after the other; gx = the sum of gy over the places of each"""

    is_linear = gives_new = True

    def __init__(self, frames: dict[int, _Frame]) -> None:
        self.frames = frames  # by axis, in order

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x = xs[0]
        y = empty_as(
            x, tuple([len(self.frames[i].places) if i in self.frames else n for i, n in enumerate(x.shape)]), x.dtype
        )
        parts = [self.frames[i].inside if i in self.frames else slice(None) for i in range(x.ndim)]
        y[tuple(parts)] = x
        for axis, frame in self.frames.items():
            parts[axis] = slice(None)
            for stretch, run in (*frame.before, *frame.after):
                lead, rest = parts[:axis], parts[axis + 1 :]
                y[(*lead, stretch, *rest)] = y[(*lead, _moved(run, frame.inside.start), *rest)]
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(FoldedFrame(self.frames), gys[0]),)


class FoldedFrame(FunctionNode):
    """The transpose of PadWithElements: each stretch of a frame is added to the elements that it repeats"""

    is_linear = gives_new = True

    def __init__(self, frames: dict[int, _Frame]) -> None:
        self.frames = frames

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        gy = xs[0]
        y = gy
        for axis, frame in reversed(self.frames.items()):
            lead = (slice(None),) * axis
            inner = y[(*lead, frame.inside)]
            if y is gy:
                inner = empty_as(gy, inner.shape, gy.dtype)
                inner[...] = gy[(*lead, frame.inside)]
            # in the order of the places, from the first on: what lies before, the element itself, what lies behind
            if len(frame.before) > 1:
                sums = zeros_as(inner, inner.shape, inner.dtype)
                for stretch, run in frame.before:
                    sums[(*lead, run)] += y[(*lead, stretch)]
                inner += sums
            for stretch, run in (*frame.before[: len(frame.before) == 1], *frame.after):
                inner[(*lead, run)] += y[(*lead, stretch)]
            y = inner
        dense = empty_as(gy, y.shape, gy.dtype)
        if y.strides != dense.strides:
            dense[...] = y
            y = dense
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(PadWithElements(self.frames), gys[0]),)


def _moved(run: slice, start: int) -> slice:
    """A run of places within an array that begins before them."""
    stop = start - 1 if run.stop is None else run.stop + start
    return slice(run.start + start, None if stop < 0 else stop, run.step)


def pad(x: Operand, pad_width: int | tuple[tuple[int, ...], ...], mode: str, **keywords: Any) -> Variable:
    """x within a frame of a constant, or of its own elements.

    Args:
        x: array or Variable, any shape.
        pad_width: how many elements to add: a number, a pair (before, after), or a pair for each axis.
        mode: 'constant', or 'edge', 'reflect', 'symmetric' or 'wrap', which repeat elements of x as :func:`numpy.pad`
            does; NumPy's other modes are not supported.
        keywords: ``constant_values``, as in :func:`numpy.pad`: a number (default 0), a pair (before, after), or a pair
            for each axis.

    Raises:
        ValueError: another mode, or widths that do not fit the axes of x.

    Example:
        >>> F.pad(np.array([1.0, 2.0]), (1, 2), "constant").array
        array([0., 1., 2., 0., 0.])
        >>> F.pad(np.array([1.0, 2.0, 3.0]), (1, 2), "reflect").array
        array([2., 1., 2., 3., 2., 1.])
    """
    x = as_variable(x)
    is_other = as_chainer[0] and mode != "constant"
    value = keywords.pop("constant_values", 0) if mode == "constant" else 0
    if not is_other and (keywords or mode not in ("constant", *_REPEATING)):
        modes = ", ".join(map(repr, _REPEATING))
        raise expected("pad", "mode", f"'constant' with constant_values, or {modes}", f"{mode!r}, {keywords or value}")
    try:
        widths = [(operator.index(a), operator.index(b)) for a, b in np.broadcast_to(pad_width, (x.ndim, 2))]
    except ValueError:
        raise expected("pad", "pad_width", f"a number, a pair or {x.ndim} pairs", repr(pad_width)) from None
    if is_other:
        return ChainerPad(widths, mode, keywords).apply((x,))[0]
    if mode != "constant":
        frames = {i: _Frame(x.shape[i], width, mode) for i, width in enumerate(widths) if any(width)}
        return PadWithElements(frames).apply((x,))[0] if frames else x
    return Pad(widths, value).apply((x,))[0]
