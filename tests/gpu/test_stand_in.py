"""The stand-in has nothing that CuPy lacks. Needs CuPy, but no GPU."""

from __future__ import annotations

import pytest
import stand_in

pytestmark = pytest.mark.without_device


@pytest.fixture
def cupy(on):
    if on == "stand-in":
        pytest.skip("the stand-in has taken CuPy's place: run it without --on")
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("name", [n for n in dir(stand_in.module) if not n.startswith("_")])
def test_functions(name, cupy):
    assert hasattr(cupy, name)


@pytest.mark.parametrize("name", (*stand_in.METHODS, *stand_in.ATTRIBUTES, "astype", "get", "set", "item", "dot"))
def test_methods(name, cupy):
    assert hasattr(cupy.ndarray, name)


USED = (
    "absolute", "add", "arccos", "arcsin", "arctan", "arctan2", "arctanh", "ceil", "cos", "cosh", "divide", "equal",
    "exp", "expm1", "floor", "greater", "greater_equal", "isfinite", "less", "less_equal", "log", "log10", "log1p",
    "log2", "maximum", "minimum", "multiply", "negative", "not_equal", "power", "sign", "sin", "sinh", "sqrt", "square",
    "subtract", "tan", "tanh", "trunc",
)  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_types(name, cupy):
    """float16 (e), bfloat16 (E), float32 and float64, each by itself and with a result of its own."""
    types = [t.split("->") for t in getattr(cupy, name).types]
    for letter in "eEfd":
        results = [out for arguments, out in types if set(arguments) == {letter}]
        assert results and results[0] in (letter, "?")
