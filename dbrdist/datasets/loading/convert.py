"""From a list of examples to the arrays of a batch, on the device where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array, DeviceSpec
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.types import DType
from dbrdist.datasets.loading.base import Batch


class Converter:
    """Base of converters: callables ``(batch, device)`` that make arrays of a list of examples.

    Example:
        >>> isinstance(dbrdist.dataset.concat_examples, dbrdist.dataset.Converter)
        True
    """

    def __call__(self, batch: Any, device: DeviceSpec | None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(batch, device)")


class _FunctionConverter(Converter):
    """A function as a converter; its device argument may be any specifier and arrives as a Device or None."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"expected a function (batch, device) to convert with, got {function!r}")
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, batch: Any, device: DeviceSpec | None = None, *args: Any, **kwargs: Any) -> Any:
        return self.function(batch, None if device is None else backend.get_device(device), *args, **kwargs)

    def __reduce__(self) -> Any:
        return (_FunctionConverter, (self.function,)) if self is not concat_examples else "concat_examples"


def converter() -> Callable[[Callable[..., Any]], Converter]:
    """Decorator that turns a function ``(batch, device)`` into a :class:`Converter`.

    Example:
        >>> @dbrdist.dataset.converter()
        ... def halves(batch, device):
        ...     return np.stack(batch) / 2
        >>> halves([np.ones(2)], None)
        array([[0.5, 0.5]])
    """
    return _FunctionConverter


def call_converter(converter: Callable[..., Any], batch: Any, device: DeviceSpec | None) -> Array | tuple[Array, ...]:
    """``converter(batch, device)``, as updaters and evaluators call it.

    In a program of Chainer a plain function gets the number of the device, as in Chainer: -1 for the CPU.
    """
    if as_chainer[0] and device is not None and not isinstance(converter, Converter):
        device = -1 if device.xp is np else int(device.name.rpartition(":")[2])
    if not callable(converter):
        raise TypeError(f"converter: expected a function (batch, device), got {type(converter).__name__} {converter!r}")
    return converter(batch, device)


def refuse_losses(where: str, converter: Any, argument: str) -> None:
    """Refuse a loss in the place of a converter, which is the next argument after those that everybody gives."""
    module = str(getattr(converter, "__module__", ""))
    if hasattr(converter, "namedlinks") or module.startswith("dbrdist.functions"):
        name = getattr(converter, "__name__", type(converter).__name__)
        raise TypeError(
            f"{where}: converter: expected a function (batch, device) that makes arrays, got {name}; a loss is given "
            f"as {argument}={name}"
        )


def to_device(device: DeviceSpec | None, x: Array | dict[str, Array]) -> Any:
    """Arrays on a device.

    Args:
        device: where to, such as ``'@cupy:0'`` or ``'@numpy'``; None leaves x as it is.
        x: an array, or tuples, lists and dictionaries of them.

    Example:
        >>> dbrdist.dataset.to_device("@numpy", (np.ones(2), {"t": np.zeros(1)}))
        (array([1., 1.]), {'t': array([0.])})
    """
    return x if device is None else backend.get_device(device).send(x)


def concat_examples_func(batch: Any, device: DeviceSpec | None = None, padding: int | None = None) -> Any:
    """Stack examples along a new first axis: a list of tuples becomes a tuple of arrays.

    Examples may be arrays or numbers, tuples of them, or dictionaries of them; the result is one array, a tuple or a
    dictionary. Images (C, H, W) become a batch (N, C, H, W) that lies channels-last in memory.

    Args:
        batch: a non-empty list of examples, or a :class:`~dbrdist.datasets.Batch` (also an empty one).
        device: where the arrays go; None leaves them where they are.
        padding: a number that fills smaller examples up to the largest (a tuple or dictionary gives one per entry);
            None: examples of different shapes are a ValueError.

    Example:
        >>> dbrdist.dataset.concat_examples([(np.ones(2), 0), (np.zeros(2), 1)])
        (array([[1., 1.],
               [0., 0.]]), array([0, 1]))
        >>> dbrdist.dataset.concat_examples([np.ones(2), np.ones(1)], padding=0)
        array([[1., 1.],
               [1., 0.]])
    """
    if isinstance(batch, Batch):
        return batch.arrays if device is None else batch.to_device(backend.get_device(device))
    if len(batch) == 0:
        raise ValueError("expected at least one example to concatenate, got an empty list")
    if isinstance(batch[0], list) and any(isinstance(e, tuple) for e in batch):
        batch = [tuple(e) if isinstance(e, list) else e for e in batch]
    first = batch[0]
    if first is None:
        raise ValueError("expected examples, got None: does the dataset, or its transform, return the example?")
    if isinstance(first, tuple):
        pads = padding if isinstance(padding, tuple) else (padding,) * len(first)
        _check_alike(batch, tuple, pads)
        return tuple(to_device(device, stack([e[k] for e in batch], pads[k], k)) for k in range(len(first)))
    if isinstance(first, dict):
        fills = padding if isinstance(padding, dict) else dict.fromkeys(first, padding)
        _check_alike(batch, dict, fills)
        return {k: to_device(device, stack([e[k] for e in batch], fills[k], k)) for k in first}
    _check_alike(batch, object, None)
    return to_device(device, stack(batch, padding, None))


def _check_alike(batch: Any, kind: type, paddings: Any) -> None:
    """Raise unless all examples have the entries of the first one, which then decides nothing."""
    first = batch[0]
    if kind is not dict and len(set(map(type, batch))) == 1 and (kind is object or len(set(map(len, batch))) == 1):
        others: Any = ()  # as nearly always
    elif kind is object:
        others = (e for e in batch if e is None or isinstance(e, (tuple, dict)))
    elif kind is tuple:
        others = (e for e in batch if not isinstance(e, (tuple, list)) or len(e) != len(first))
    else:
        others = (e for e in batch if not isinstance(e, dict) or e.keys() != first.keys())
    for other in others:
        if other is None:
            raise ValueError("expected examples, got None among them: does the dataset return each of its examples?")
        raise ValueError(f"expected examples with the same entries, got {_entries(first)} and {_entries(other)}")
    if kind is not object and (paddings.keys() < first.keys() if kind is dict else len(paddings) != len(first)):
        raise ValueError(f"expected a padding for each entry of {_entries(first)}, got {paddings!r}")


def _entries(example: Any) -> str:
    if isinstance(example, tuple):
        return f"a tuple of {len(example)}"
    return f"a dictionary of {sorted(map(str, example))}" if isinstance(example, dict) else type(example).__name__


concat_examples = converter()(concat_examples_func)


def stack(values: Any, padding: int | None, entry: int | str | None) -> Array:
    """Values along a new first axis, filled up with ``padding`` where that is not None; errors name their ``entry``.

    The type is that to which all values are promoted, as by ``numpy.stack``, whichever comes first.
    """
    if padding is None and not any(backend.is_array(v) for v in {type(v): v for v in values}.values()):
        return _of_numbers(values, entry)
    values = [v if backend.is_array(v) else np.asarray(v) for v in values]
    first, dtype = values[0], _common_type(values, entry)
    shapes = {v.shape for v in values}
    if padding is None:
        if len(shapes) > 1:
            raise ValueError(
                f"expected examples of one shape{_where(entry)}, got {sorted(shapes)}; "
                "bring them to one size first, or give padding= to fill them up"
            )
        out = backend.empty((len(values), *first.shape), dtype, first)
        for i, v in enumerate(values):
            out[i] = v
        return out
    if len({len(s) for s in shapes}) > 1:
        raise ValueError(f"expected examples of one number of axes{_where(entry)} to pad, got {sorted(shapes)}")
    shape = tuple(max(s[axis] for s in shapes) for axis in range(first.ndim))
    out = backend.full((len(values), *shape), _as_padding(padding, dtype, entry), dtype, first)
    for i, v in enumerate(values):
        out[(i, *map(slice, v.shape))] = v
    return out


def _where(entry: int | str | None) -> str:
    return "" if entry is None else f" in entry {entry!r}"


def _of_numbers(values: Any, entry: int | str | None) -> Array:
    """An array of numbers, strings or lists of them."""
    try:
        found = np.asarray(values)
    except ValueError as error:
        hint = "; an example of several arrays must be a tuple" if isinstance(values[0], list) else ""
        raise ValueError(f"examples cannot be stacked{_where(entry)}: {error}{hint}") from error
    if found.dtype.kind in "US" and not _are_texts(values):
        raise ValueError(f"expected examples of one kind{_where(entry)}, got both texts and numbers: {values!r:.60}")
    return found


def _are_texts(values: Any) -> bool:
    return all(_are_texts(v) if isinstance(v, (list, tuple)) else isinstance(v, (str, bytes)) for v in values)


def _common_type(values: list[Array], entry: int | str | None) -> DType:
    """The type to which all arrays are promoted."""
    dtype = values[0].dtype
    if all(v.dtype is dtype for v in values):
        return dtype
    types = sorted({v.dtype for v in values}, key=str)
    try:
        found = np.result_type(*types)
    except TypeError:
        found = None
    if found is None or (found.kind in "USO" and any(t.kind != found.kind for t in types)):
        raise ValueError(
            f"expected examples of types that go together{_where(entry)}, got {' and '.join(map(str, types))}; "
            "bring them to one type first"
        )
    return found


def _as_padding(padding: float, dtype: DType, entry: int | str | None) -> Array:
    """``padding`` as a number of a type that holds it."""
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(padding).astype(dtype)
        is_held = dtype.kind not in "biu" or bool(found == padding)
    except (TypeError, ValueError, OverflowError):
        is_held = False
    if not is_held:
        raise ValueError(f"expected a padding that {dtype} holds{_where(entry)}, got {padding!r}")
    return found
