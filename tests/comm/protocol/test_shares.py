"""Tests of dbrdist.comm.protocol.shares."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.data import iterators
from dbrdist.comm.protocol import shares
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
