"""One test class for each combination of parameters."""

from __future__ import annotations

import functools
import itertools
import sys
import types
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dbrdist.testing.bundle import Bundle, classes_of


def product(parameter: Any) -> list[dict[str, Any]]:
    """All combinations: of the values in a dictionary of lists, or of the dictionaries in a list of lists.

    Args:
        parameter: the dictionary, or the list.

    Raises:
        TypeError: it is neither.

    Example:
        >>> dbrdist.testing.product({"x": [1, 2], "y": "a"})
        [{'x': 1, 'y': 'a'}, {'x': 2, 'y': 'a'}]
    """
    if isinstance(parameter, Mapping):
        keys = sorted(parameter)
        return [dict(zip(keys, values)) for values in itertools.product(*(parameter[k] for k in keys))]
    if isinstance(parameter, list) and all(isinstance(p, list) for p in parameter):
        return product_dict(*parameter)
    raise TypeError(f"parameter: expected a dictionary of lists or a list of lists, got {parameter!r}")


def product_dict(*parameters: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All combinations of one dictionary of each list, merged.

    Args:
        parameters: lists of dictionaries.

    Raises:
        TypeError: an entry is no dictionary.

    Example:
        >>> dbrdist.testing.product_dict([{"x": 1}, {"x": 2}], [{"y": 3}])
        [{'x': 1, 'y': 3}, {'x': 2, 'y': 3}]
    """
    together = []
    for chosen in itertools.product(*parameters):
        merged: dict[str, Any] = {}
        for one in chosen:
            if not isinstance(one, Mapping):
                raise TypeError(f"parameters: expected lists of dictionaries, got {one!r} in one")
            merged.update(one)
        together.append(merged)
    return together


def from_pytest_parameterize(names: str | Sequence[str], values: Iterable[Any]) -> list[dict[str, Any]]:
    """Arguments of ``pytest.mark.parametrize`` as a list of dictionaries.

    Args:
        names: the names, separated by commas, or a sequence of names.
        values: a tuple of values for each case, or single values for one name.

    Raises:
        TypeError, ValueError: a case has another number of values than there are names.

    Example:
        >>> dbrdist.testing.from_pytest_parameterize("x,y", [(1, 2), (3, 4)])
        [{'x': 1, 'y': 2}, {'x': 3, 'y': 4}]
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    params = []
    for value in values:
        row = (value,) if len(keys) == 1 and not (isinstance(value, tuple) and len(value) == 1) else tuple(value)
        if len(row) != len(keys):
            raise ValueError(f"values: expected {len(keys)} for {', '.join(keys)}, got {value!r}")
        params.append(dict(zip(keys, row)))
    return params


def parameterize_pytest(names: str | Sequence[str], values: Iterable[int]) -> Callable[[Any], Bundle]:
    """:func:`parameterize` with the arguments of ``pytest.mark.parametrize``.

    Args:
        names: the names, separated by commas, or a sequence of names.
        values: a tuple of values for each case, or single values for one name.

    Example:
        >>> import unittest
        >>> @dbrdist.testing.parameterize_pytest("x", [1, 2])
        ... class TestPositive(unittest.TestCase):
        ...     def test_it(self):
        ...         assert self.x > 0
    """
    return parameterize(*from_pytest_parameterize(names, values))


def parameterize(*params: Mapping[str, Any]) -> Callable[[Any], Bundle]:
    """A decorator of test classes: one class for each dictionary, whose entries are attributes of its instances.

    The classes are put into the module of the test class, named ``TestX_param_0_{x=1}`` and so on. Where a test
    fails, a note tells the parameters. Use it above :func:`inject_backend_tests` and :func:`fix_random`, or below.

    Args:
        params: the dictionaries; :func:`product` makes all combinations.

    Example:
        >>> import unittest
        >>> @dbrdist.testing.parameterize({"x": 1}, {"x": 2})
        ... class TestPositive(unittest.TestCase):
        ...     def test_it(self):
        ...         assert self.x > 0
    """
    for param in params:
        if not isinstance(param, Mapping):
            raise TypeError(f"params: expected dictionaries, got {param!r}; did you forget the * before product()?")

    def decorate(case: Any) -> Bundle:
        made = []
        for base in classes_of(case):
            module = sys.modules[base.__module__]
            if isinstance(case, Bundle):
                module.__dict__.pop(base.__name__, None)
            for number, param in enumerate(params):
                cls = _with_parameters(base, number, param)
                setattr(module, cls.__name__, cls)
                made.append(cls)
        return Bundle(made)

    return decorate


def _with_parameters(base: type, number: int, param: Mapping[str, Any]) -> type:
    members = {k: staticmethod(v) if isinstance(v, types.FunctionType) else v for k, v in param.items()}
    words = ", ".join(f"{k}={_short(v)}" for k, v in sorted(param.items()))
    shown = "\n".join(f"  {k}: {v!r}" for k, v in sorted(param.items()))

    cls = type(f"{base.__name__}_param_{number}_{{{words}}}", (base,), {**members, "__module__": base.__module__})
    for name in list(_tests_of(base)):
        setattr(cls, name, _noted(getattr(base, name), f"test parameters of {base.__name__}.{name}:\n{shown}"))
    return cls


def _short(value: Any) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 32 else text[:29] + "..."


def _tests_of(cls: type) -> Iterator[str]:
    return (name for name in dir(cls) if name.startswith("test") and callable(getattr(cls, name)))


def _noted(test: Callable[..., Any], note: str) -> Callable[..., Any]:
    """The test method, which tells its parameters where it fails."""

    @functools.wraps(test)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            test(self, *args, **kwargs)
        except unittest.SkipTest:
            raise
        except Exception as error:
            error.add_note(note)
            raise

    return noted
