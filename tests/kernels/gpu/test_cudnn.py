"""What cuDNN's handles do without cuDNN, and which arrays it and own kernels take."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.kernels.gpu import cudnn
from tests.kernels.gpu.gpu_helpers import Fake


def test_handles_of_an_ended_thread_wait_for_the_next(monkeypatch):
    """Also at the end of the program, when the names of modules are gone."""
    idle, handle = cudnn._idle, cudnn.Handle(None)
    monkeypatch.setattr(cudnn, "_idle", None)
    owned = cudnn._Owned({-7: handle})
    del owned
    assert idle.pop(-7) == [handle]


def test_arrays_that_cudnn_takes(monkeypatch):
    monkeypatch.setattr(cudnn.backend, "place_of", lambda a: a.place)
    cudnn.require(Fake(), Fake())
    for arrays, words in (
        ((np.ones(3, "f"),), "other arrays"), ((Fake(size=0),), "other arrays"), ((Fake(), Fake("d")), "other arrays"),
        ((Fake("i"),), "other arrays"), ((Fake(), Fake(place=(1, 0))), "memory of another device"),
        ((Fake(place=None),), "memory of another device"),
    ):  # fmt: skip
        with pytest.raises(cudnn.Unsupported, match=words):
            cudnn.require(*arrays)
