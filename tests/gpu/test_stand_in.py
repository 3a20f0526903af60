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
