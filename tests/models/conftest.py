"""What tests of models share."""

import numpy as np
import pytest

import dbrdist.functions as F


@pytest.fixture
def dropped(monkeypatch):
    """Dropout's ratios in the order of calls; in its place x is multiplied by 2 + ratio."""
    ratios = []

    def dropout(x, ratio=0.5, **options):
        ratios.append(ratio)
        return x * np.float32(2 + ratio)

    monkeypatch.setattr(F, "dropout", dropout)
    return ratios
