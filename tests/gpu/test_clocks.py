"""The clocks of the stand-in find what nothing orders, and nothing else."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def needs_clocks(on):
    if on != "stand-in":
        pytest.skip("the stand-in has the clocks")


@pytest.fixture
def streams(xp):
    return xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)


def races(work):
    import clocks

    with pytest.raises(clocks.Race, match="nothing orders the two"):
        work()


def test_reading_before_it_is_written(xp, streams):
    first, second = streams
    with first:
        a = xp.ones(3)
    with second:
        races(lambda: a + 1)
        event = xp.cuda.Event()
        event.record(first)
        second.wait_event(event)
        a + 1


def test_overwriting_before_it_is_read(xp, streams):
    first, second = streams
    a = xp.ones(3)
    xp.cuda.get_current_stream().synchronize()
    with first:
        a + 1

    def overwrite():
        with second:
            a[...] = 2

    races(overwrite)
    first.synchronize()
    overwrite()


def test_an_event_covers_what_was_begun_before_it(xp, streams):
    first, second = streams
    with first:
        event = xp.cuda.Event()
        event.record()
        a = xp.ones(3)
    with second:
        second.wait_event(event)
        races(lambda: a + 1)


def test_the_legacy_stream_waits_for_blocking_streams_alone(xp):
    for non_blocking in (False, True):
        with xp.cuda.Stream(non_blocking=non_blocking):
            a = xp.ones(3)
        if non_blocking:
            races(lambda a=a: a + 1)
        else:
            a + 1


def test_memory_comes_back_to_the_stream_that_allocated_it(xp, streams):
    first, second = streams
    with first:
        a = xp.empty(1000)
    block = a.lease.block
    view = a[3:]
    del a
    with first:
        assert xp.empty(1000).lease.block is not block
    del view
    with second:
        assert xp.empty(1000).lease.block is not block
    with first:
        assert xp.empty(1000).lease.block is block


def test_memory_that_another_stream_still_reads(xp, streams):
    first, second = streams
    with first:
        a = xp.ones(1000)
        event = xp.cuda.Event()
        event.record()
    with second:
        second.wait_event(event)
        a + 1
    del a
    with first:
        races(lambda: xp.ones(1000))


def test_peers_read_over_the_bus_and_race(xp, monkeypatch):
    import stand_in

    a = xp.ones(3)
    with xp.cuda.Device(1):
        with pytest.raises(ValueError, match="same as the current device"):
            a + 1
        monkeypatch.setattr(stand_in.peers, "are_there", True)
        monkeypatch.setattr(stand_in.peers, "accesses", 0)
        races(lambda: a + 1)
    xp.cuda.Device(0).synchronize()
    with xp.cuda.Device(1):
        a + 1
    assert stand_in.peers.accesses == 2


def test_an_event_is_recorded_on_its_own_device(xp):
    with xp.cuda.Device(1):
        stream = xp.cuda.Stream(non_blocking=True)
    with pytest.raises(AssertionError, match="another device"):
        xp.cuda.Event().record(stream)
