"""A batch that ``ConcatWithAsyncTransfer`` has sent stays what it is for as long as the program can use it.

On the stand-in alone, whose vector clocks find each access that no event orders.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest

from dbrdist.dataset import ConcatWithAsyncTransfer


@pytest.fixture(autouse=True)
def needs_clocks(on):
    if on != "stand-in":
        pytest.skip("the stand-in's clocks find what nothing orders")


def batch(k, size=4):
    return [(np.full(5, k, np.float32), np.int32(k)) for _ in range(size)]


def step(arrays):
    """Computes with a batch on the current stream."""
    x, t = arrays
    y = x * 2.0 + 1.0
    return y.sum() + t.sum()


def converted_then_used(convert, device, compute):
    for k in range(8):
        arrays = convert(batch(k), device)
        compute(arrays)


def ahead(num_ahead, keeps=0):
    """Batches are converted ahead of their steps, and used once more ``keeps`` steps later."""

    def run(convert, device, compute):
        waiting, old = [], []
        for k in range(12):
            waiting.append(convert(batch(k, 4 + k % 3), device))
            if len(waiting) > num_ahead:
                arrays = waiting.pop(0)
                compute(arrays)
                old.append(arrays)
                if len(old) > keeps:
                    compute(old.pop(0))
                del arrays

    return run


def views_alone(convert, device, compute):
    rows = None
    for k in range(8):
        x, t = convert(batch(k), device)
        if rows is not None:
            compute(rows)
        rows = x[:2], t[:2]
        del x, t


PATTERNS = {
    "convert, then step": converted_then_used,
    "one ahead": ahead(1),
    "two ahead": ahead(2),
    "four ahead": ahead(4),
    "used again": ahead(1, 1),
    "a replay of three steps": ahead(0, 3),
    "views alone": views_alone,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("stream", ["null", "own", "given"])
def test_no_copy_overwrites_a_batch_in_use(pattern, stream, device, xp):
    own = xp.cuda.Stream(non_blocking=True)
    convert = ConcatWithAsyncTransfer(compute_stream=own if stream == "given" else None)

    def compute(arrays):
        if stream == "null":
            step(arrays)
        else:
            with own:
                step(arrays)

    if stream == "own":
        with own:
            PATTERNS[pattern](convert, device, compute)
    else:
        PATTERNS[pattern](convert, device, compute)


def test_memory_is_used_again(device, xp):
    """Neither does the memory of batches grow from step to step, nor does a copy wait for the step before it."""
    convert, seen = ConcatWithAsyncTransfer(), set()
    for k in range(30):
        arrays = convert(batch(k), device)
        seen.update(id(a.lease.block) for a in arrays)
        step(arrays)
        if k == 9:
            early = len(seen)
    assert len(seen) == early <= 8


def test_a_batch_that_another_thread_drops(device, xp):
    """The events are recorded where the program computes, whoever drops the last reference."""
    import threading

    own, convert, held = xp.cuda.Stream(non_blocking=True), ConcatWithAsyncTransfer(), []
    for k in range(8):
        with own:
            held.append(convert(batch(k), device))
            step(held[0])
        thread = threading.Thread(target=lambda: (held.pop(), gc.collect()))
        thread.start()
        thread.join()
