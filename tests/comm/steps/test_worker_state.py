"""Tests of dbrdist.comm.steps.worker_state."""

import numpy as np

from dbrdist.comm import create_communicator
from dbrdist.comm.steps import worker_state
from dbrdist.links import Linear


def test_statistics_of_a_network_are_one_vector():
    """Arrays and numbers, each in its own type and shape; what is no number stays as it is."""
    link = Linear(2, 1, nobias=True)
    values = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.array([1, 2]), "c": 3, "d": 0.5, "e": np.int8(4),
              "f": True, "g": "text", "h": np.array([True]), "i": np.array(["x"]), "j": np.float32(2.5)}  # fmt: skip
    for name, value in values.items():
        setattr(link, name, value)
        link.register_persistent(name)
    one = worker_state.Statistics(link)
    one.begin()
    numbers = [*range(6), 1, 2, 3, 0.5, 4, 2.5]
    assert one.read().tolist() == numbers and one.read().dtype == np.float64
    assert one.nothing().tolist() == [0] * len(numbers)
    one.write(np.array(numbers) * 2 + 0.3)
    assert link.a.dtype == "f4" and link.a.shape == (2, 3)
    np.testing.assert_allclose(link.a.reshape(-1), np.arange(6) * 2 + 0.3, rtol=1e-6)
    assert link.b.tolist() == [2, 4] and (link.c, type(link.c)) == (6, int) and (link.d, type(link.d)) == (1.3, float)
    assert (link.e, type(link.e)) == (8, np.int8) and type(link.j) is np.float32 and abs(link.j - 5.3) < 1e-6
    assert (link.f, link.g, link.h.tolist(), link.i.tolist()) == (True, "text", [True], ["x"])
    one.restore()
    assert one.read().tolist() == numbers and (link.c, link.d) == (3, 0.5)


def test_only_numbers_of_what_virtual_workers_report_are_averaged():
    values = worker_state.Values(create_communicator("single"), 1)
    values.begin()
    values.add(
        {"loss": np.float32(0.5), "word": "on", "none": None, "many": np.ones(2), "day": np.datetime64("now")}, 4
    )
    assert values.has_new and values.average(None, True) == {"loss": 0.5}
