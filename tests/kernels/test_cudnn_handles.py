"""What cuDNN's handles do without cuDNN, and which arrays it and own kernels take."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.kernels import cuda_source, cudnn


def test_handles_of_an_ended_thread_wait_for_the_next(monkeypatch):
    """Also at the end of the program, when the names of modules are gone."""
    idle, handle = cudnn._idle, cudnn.Handle(None)
    monkeypatch.setattr(cudnn, "_idle", None)
    owned = cudnn._Owned({-7: handle})
    del owned
    assert idle.pop(-7) == [handle]


class Fake:
    """As much of an array of CuPy as is asked for."""

    __module__ = "cupy._core"

    def __init__(self, dtype="f", size=3, place=(1, 1)):
        self.dtype, self.size, self.place = np.dtype(dtype), size, place


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


def test_arrays_that_own_kernels_take(monkeypatch):
    monkeypatch.setattr(cuda_source.backend, "place_of", lambda a: a.place)
    cuda_source.require(Fake(), None, Fake("d"), Fake("e"))
    for arrays, words in (
        ((np.ones(3, "f"),), "other arrays"), ((Fake(), Fake(size=0)), "other arrays"), ((Fake("i"),), "other arrays"),
        ((None, Fake(place=(1, 0))), "memory of another device"), ((Fake(place=None),), "memory of another device"),
    ):  # fmt: skip
        with pytest.raises(cuda_source.Unsupported, match=words):
            cuda_source.require(*arrays)
