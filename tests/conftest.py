"""What all tests share."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import random


def array_modules() -> list:
    """NumPy, and CuPy where there is a GPU."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception:  # not installed, no driver, no device: each with an error class of its own
        return [np]
    return [np, cupy]


@pytest.fixture(autouse=True)
def fresh_chance():
    """Each test starts from seed 0 with nothing drawn yet, whichever tests ran before it."""
    random.set_state((0,) * len(random.get_state()))


@pytest.fixture(params=array_modules(), ids=lambda m: m.__name__)
def xp(request):
    """The array module: the same test runs on NumPy and, where there is a GPU, on CuPy."""
    return request.param
