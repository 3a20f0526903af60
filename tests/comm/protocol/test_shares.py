"""Tests of dbrdist.comm.protocol.shares."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.data import iterators
from dbrdist.comm.protocol import shares
from dbrdist.comm.protocol.shares import batches_in_words
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.errors import CommunicatorError


def test_one_rank_has_nobody_to_share_with(monkeypatch):
    monkeypatch.setattr(iterators.agree, "same_everywhere", lambda *arguments: None)
    monkeypatch.setattr(shares, "check_examples", lambda *arguments: None)
    shares.check_shares(SimpleNamespace(size=1), SerialIterator([1, 2], 1, rank=0, size=1))
    rows = SimpleNamespace(size=2, gate=SimpleNamespace(allgather_rows=lambda row: np.array([[1], row[:]])))
    shares.check_shares(rows, SerialIterator([1, 2], 2, rank=0, size=2))
    with pytest.raises(CommunicatorError, match=r"got rank=1 on ranks 0, 1; make them with rank=comm\.rank"):
        shares.check_shares(rows, SerialIterator([1, 2], 2, rank=1, size=2))


def test_what_ranks_compare_of_their_iterators(monkeypatch):
    """Those of iterators that are not divided over the ranks say only that they are not."""
    compared, looked = [], []
    monkeypatch.setattr(shares.agree, "same_everywhere", lambda *words: compared.append(words))
    monkeypatch.setattr(shares.agree, "as_lines", "\n".join)
    monkeypatch.setattr(shares, "check_examples", lambda *words: looked.append(words))
    data, rows = [1, 2, 3, 4], np.array([[0], [1]])
    comm = SimpleNamespace(size=2, gate=SimpleNamespace(allgather_rows=lambda row: rows))
    divided = SerialIterator(data, 2, rank=0, size=2)
    shares.check_shares(comm, divided)
    shares.check_shares(comm, SerialIterator(data, 2), "validation")
    shares.check_shares(comm, iter(data), "test", is_moving=False)
    assert compared == [
        (comm, "\n".join(batches_in_words(divided, "training")), "the same training batches"),
        (comm, "validation examples of its own", "the same validation batches"),
        (comm, "test examples of its own", "the same test batches"),
    ]
    assert looked == [(comm, data, "training")]


def test_what_makes_up_the_batches_to_come_line_by_line():
    made = SerialIterator(list(range(10)), 4, seed=7)
    lines = batches_in_words(made, "training")
    order = lines.pop(6)
    assert lines == [
        "10 training examples", "virtual workers None", "batch 4", "last='wrap'", "repeat=True",
        "shuffled by ShuffleOrderSampler with seed 7", "example 0 of epoch 0 next",
    ]  # fmt: skip
    orders = {seed: batches_in_words(SerialIterator(list(range(10)), 4, seed=seed), "training")[6] for seed in (7, 8)}
    assert orders[7] == order != orders[8] and order.startswith("order ")
    for _ in range(3):
        next(made)
    assert batches_in_words(made, "training")[7] == "example 2 of epoch 1 next"
    still = SerialIterator(list(range(9)), 3, shuffle=False, repeat=False)
    assert batches_in_words(still, "test", is_moving=False) == [
        "9 test examples", "virtual workers None", "batch 3", "last='wrap'", "repeat=False", "index order",
    ]  # fmt: skip
