"""The stand-in has nothing that CuPy lacks. Needs CuPy, but no GPU."""

from __future__ import annotations

import inspect
import re

import pytest
import stand_in

from tests.each import each

pytestmark = pytest.mark.without_device


@pytest.fixture
def cupy(on):
    if on == "stand-in":
        pytest.skip("the stand-in has taken CuPy's place: run it without --on")
    return pytest.importorskip("cupy")


@each(name=[n for n in dir(stand_in.module) if not n.startswith("_")])
def test_functions(name, cupy):
    assert hasattr(cupy, name)


@each(name=(*stand_in.METHODS, *stand_in.ATTRIBUTES, "astype", "get", "set", "item", "dot"))
def test_methods(name, cupy):
    assert hasattr(cupy.ndarray, name)


USED = (
    "absolute", "add", "arccos", "arcsin", "arctan", "arctan2", "arctanh", "ceil", "cos", "cosh", "divide", "equal",
    "exp", "expm1", "floor", "greater", "greater_equal", "isfinite", "less", "less_equal", "log", "log10", "log1p",
    "log2", "maximum", "minimum", "multiply", "negative", "not_equal", "power", "sign", "sin", "sinh", "sqrt", "square",
    "subtract", "tan", "tanh", "trunc",
)  # fmt: skip


@each(name=USED)
def test_types(name, cupy):
    """float16 (e), bfloat16 (E), float32 and float64, each by itself and with a result of its own."""
    types = [t.split("->") for t in getattr(cupy, name).types]
    for letter in "eEfd":
        results = [out for arguments, out in types if set(arguments) == {letter}]
        assert results and results[0] in (letter, "?")


def parameters(signature):
    return [p for p in signature.parameters if p not in ("self", "args", "kwargs")]


@each(name=stand_in.FUNCTIONS)
def test_arguments_of_functions(name, cupy):
    """In CuPy's order, with none that CuPy lacks."""
    function = getattr(cupy, name)
    if isinstance(function, cupy.ufunc) or name == "matmul":
        pytest.skip("a ufunc, which takes out, casting and dtype")
    theirs = parameters(inspect.signature(function))
    assert parameters(stand_in.SIGNATURES[name]) == theirs


@each(name=stand_in.METHODS)
def test_arguments_of_methods(name, cupy):
    first = (getattr(cupy.ndarray, name).__doc__ or "").splitlines()[0]
    found = re.search(r"\(self,? ?(.*)\)", first)
    if found is None:
        pytest.skip(f"CuPy does not say its arguments: {first!r}")
    words = [part.split("=")[0].split()[-1].lstrip("*") for part in found[1].split(",") if part.strip()]
    assert parameters(stand_in.METHOD_SIGNATURES[name]) == words


def test_scatters(cupy):
    """The ufuncs that have ``at``."""
    ufuncs = {n: getattr(cupy, n) for n in dir(cupy) if isinstance(getattr(cupy, n), cupy.ufunc)}
    known = {n for n, ufunc in ufuncs.items() if ufunc._scatter_op}
    assert set(stand_in.SCATTERS) == known
