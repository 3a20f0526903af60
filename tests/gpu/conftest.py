"""Tests that need a GPU. They are not collected by default: ``python -m pytest tests/gpu``."""

from __future__ import annotations

import pytest


def _why_not() -> str | None:
    try:
        import cupy
    except ImportError as e:
        return f"CuPy cannot be imported: {e}"
    return None if cupy.cuda.is_available() else "CuPy finds no GPU"


def pytest_collection_modifyitems(items):
    reason = _why_not()
    if reason is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))
