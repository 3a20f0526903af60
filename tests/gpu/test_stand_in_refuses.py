"""What CuPy refuses, and what it does otherwise than NumPy: the stand-in does so too. Runs on the stand-in alone."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def xp(on):
    if on != "stand-in":
        pytest.skip("tests the stand-in: run it with --on stand-in")
    import stand_in

    return stand_in.module


REFUSED = {
    "where": lambda xp, x: np.add(x, x, where=x > 0),
    "initial": lambda xp, x: xp.sum(x, initial=1.0),
    "keyword of a method": lambda xp, x: x.sum(where=x > 0),
    "mode": lambda xp, x: x.take(xp.asarray([0]), mode="clip"),
    "too many": lambda xp, x: x.fill(1.0, 2.0),
    "order of zeros_like": lambda xp, x: xp.zeros_like(x, device="cpu"),
    "NumPy's array": lambda xp, x: x + np.ones(3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_arguments_are_refused(xp, name):
    with pytest.raises(TypeError):
        REFUSED[name](xp, xp.asarray([1.0, 2.0, 3.0]))


def test_at_is_that_of_the_function(xp):
    x, places = xp.asarray([1.0, 5.0, 3.0]), xp.asarray([0, 0, 2])
    np.maximum.at(x, places, xp.asarray([9.0, 6.0, 1.0]))
    assert x.tolist() == [9, 5, 3]
    np.add.at(x, places, 1.0)
    assert x.tolist() == [11, 5, 4]
    for ufunc in (np.multiply, np.power, np.divide):
        with pytest.raises(NotImplementedError):
            ufunc.at(x, places, 2.0)


def test_reductions_of_ufuncs(xp):
    x = xp.asarray([2.0, 5.0])
    assert float(np.add.reduce(x)) == 7
    assert float(np.multiply.reduce(x)) == 10
    for ufunc in (np.maximum, np.subtract, np.logaddexp):
        with pytest.raises(NotImplementedError):
            ufunc.reduce(x)


def test_flags_cannot_be_set(xp):
    x = xp.ones((2, 3))
    assert (x.flags.c_contiguous, x.T.flags.c_contiguous) == (True, False)
    with pytest.raises(AttributeError):
        x.flags.writeable = False


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8"])
def test_fresh_memory_shows(xp, dtype):
    for a in (xp.empty((2, 3), dtype), xp.empty_like(xp.ones(4, dtype))):
        worst = np.iinfo(dtype).max if np.dtype(dtype).kind in "iu" else np.nan
        np.testing.assert_array_equal(a.get(), worst)


def test_indices_wrap_around(xp):
    x = xp.arange(12).reshape(3, 4)
    assert x[xp.asarray([0, 3, -4])].get()[:, 0].tolist() == [0, 0, 8]
    assert x[..., xp.asarray([4, 5])].get()[0].tolist() == [0, 1]
    assert x[None, xp.asarray([5]), xp.asarray([6])].get().tolist() == [[10]]
    assert x[x > 9].get().tolist() == [10, 11]
    assert x.take(xp.asarray([12, 13])).get().tolist() == [0, 1]
    x[xp.asarray([4])] = 0
    assert x.get()[1].tolist() == [0] * 4
    with pytest.raises(IndexError):
        x[3]  # a number is looked at on the host


MASKED = {
    "read": lambda xp, x, mask: x[mask],
    "a number into all axes": lambda xp, x, mask: x.__setitem__(mask, 0),
    "a number into the first axis": lambda xp, x, mask: x.__setitem__(mask[:, 0], 0),
    "an array": lambda xp, x, mask: x.__setitem__(mask, xp.zeros(())),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_as_an_index_waits(xp, name, no_waits):
    """For the number of its elements, whatever is written; a mask of ``copyto`` does not."""
    x = xp.ones((3, 2))
    with pytest.raises(RuntimeError, match="waits"), no_waits():
        MASKED[name](xp, x, x > 0)
    with no_waits():
        xp.copyto(x, 0, where=x > 0)
    assert not x.get().any()


def test_arrays_know_their_device(xp):
    here = xp.ones(3)
    xp.cuda.Device(0).synchronize()
    with xp.cuda.Device(1):
        there = xp.ones(3)
        assert xp.cuda.Device().id == 1
        for mixed in (lambda: here + there, lambda: there + here, lambda: there.dot(here), lambda: xp.sum(here)):
            with pytest.raises(ValueError, match="Array device must be same as the current device"):
                mixed()
        moved = here.copy()
        assert (here.device.id, there[1:].T.device.id, moved.device.id) == (0, 1, 1)
        assert float((moved + there).sum()) == 6
    assert xp.cuda.Device().id == 0
    with pytest.raises(ValueError):
        there * 2.0
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        xp.cuda.Device(2)
