"""Tests of dbrdist.comm.gradients.communication_thread."""

import threading
from types import SimpleNamespace

import pytest

from dbrdist.comm.gradients.communication_thread import Courier
from tests.comm import jobs

OVERLAP = jobs.PROGRAMS / "overlap.py"


@pytest.mark.mpiexec
@pytest.mark.parametrize("how", ["leave", "extra"])
def test_a_thread_that_has_nothing_to_do_keeps_nobody_waiting(how):
    """The watch proves that the rank is stuck although its other thread lives."""
    outcome = jobs.run(2, OVERLAP, how, limit_seconds=40)
    assert outcome.code == 1, outcome.text
    assert "has left, but" in outcome.text
    assert {"leave": "in recv with tag 0", "extra": "in update"}[how] in outcome.text


def test_a_courier_does_jobs_in_order_and_leaves_out_what_follows_an_error():
    resting, done = set(), []
    comm = SimpleNamespace(gate=SimpleNamespace(record=SimpleNamespace(resting=resting)))
    one = Courier(comm)
    one.close()  # before it has begun
    one.wait()
    go_on, me = threading.Event(), threading.get_ident()

    def slow(given):
        assert go_on.wait(20)
        done.append((given is comm, threading.get_ident() in resting, me in resting))

    one.put(slow)
    threading.Timer(0.02, go_on.set).start()
    one.wait()
    assert done == [(True, False, True)] and me not in resting
    done.clear()
    for k in range(5):
        one.put(lambda given, k=k: done.append(k) if k != 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.wait()
    assert done == [0, 1] and me not in resting
    one.put(lambda given: done.append("again"))
    one.wait()
    assert done[-1] == "again"
    one.close()
    assert not one._thread.is_alive()
