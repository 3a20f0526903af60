"""With ``config.cudnn_deterministic`` gradients of repeated indexes are added in one order."""

from __future__ import annotations

import numpy as np
import pytest
from support import put

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, using_config
from dbrdist.core.array import backend
from dbrdist.core.array.ordered_sums import add_in_order
from dbrdist.utils import CooMatrix

INDEXES = {
    "an array": lambda rng: rng.integers(0, 5, 40),
    "of several axes": lambda rng: rng.integers(-5, 5, (4, 9)),
    "one index": lambda rng: np.array([3]),
    "two arrays": lambda rng: (rng.integers(0, 5, 30), rng.integers(0, 4, 30)),
    "an array in a tuple": lambda rng: (rng.integers(0, 5, 30),),
    "an array and a slice": lambda rng: (slice(None), rng.integers(0, 4, 9)),
    "a slice and two arrays": lambda rng: (slice(1, 4), rng.integers(0, 4, 9), rng.integers(0, 3, 9)),
    "none": lambda rng: np.zeros(0, np.int64),
}


@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize("on_device", [True, False])
def test_sums_are_those_of_add_at(name, on_device, device, rng, xp):
    slices = INDEXES[name](rng)
    exact = np.zeros((5, 4, 3))
    x = rng.standard_normal(exact[slices].shape)
    np.add.at(exact, slices, x)
    there = put(device, slices) if on_device and isinstance(slices, np.ndarray) else slices
    y = xp.zeros((5, 4, 3))
    add_in_order(y, there, xp.asarray(x))
    np.testing.assert_allclose(backend.to_cpu(y), exact, 1e-12, 1e-12)


def test_one_value_for_many_places(device, xp):
    y = xp.zeros((3, 2))
    add_in_order(y, np.array([1, 1, 2]), xp.asarray(np.array([1.0, 2.0])))
    assert backend.to_cpu(y).tolist() == [[0, 0], [2, 4], [1, 2]]


def test_no_atomic_sums_with_the_switch(on, device, xp, rng, monkeypatch):
    if on != "stand-in":
        pytest.skip("watches the stand-in")
    import stand_in

    monkeypatch.setattr(stand_in, "SCATTERS", ())  # add.at raises
    ids, embed = put(device, rng.integers(0, 5, 40).astype(np.int32)), L.EmbedID(5, 3).to_device(device)

    def gradient():
        embed.cleargrads()
        F.sum(embed(ids) ** 2).backward()
        x = Variable(put(device, rng.standard_normal((4, 5))))
        F.sum(x[:, np.array([1, 1, 3])]).backward()
        images = Variable(put(device, rng.standard_normal((2, 3, 4, 5))))  # whose gradient is channels-last
        F.sum(images[:, :, np.array([1, 1, 3])]).backward()
        assert backend.to_cpu(images.grad)[0, 0, :, 0].tolist() == [0, 2, 0, 1]
        return backend.to_cpu(embed.W.grad)

    matrix = CooMatrix(*[put(device, np.array(a)) for a in ([1.0, 2.0, 4.0], [0, 0, 1], [1, 1, 0])], (2, 2))
    for f in (gradient, matrix.to_dense):
        with pytest.raises(NotImplementedError, match=r"add\.at"):
            f()
    with using_config("cudnn_deterministic", True):
        assert backend.to_cpu(matrix.to_dense()).tolist() == [[0, 3], [4, 0]]
        assert np.array_equal(gradient(), gradient())
