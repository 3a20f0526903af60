"""Tests of dbrdist.cli.output.refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dbrdist.cli import train
from dbrdist.cli.output.refuse import Refused, alike
from dbrdist.comm import create_communicator
from dbrdist.errors import ConfigError
from tests.each import each


@each(case=[(1, 0, []), (1, 1, [5.0]), (2, 0, [0.3]), (2, 1, [5.0, 0.3])])
def test_a_refusal_waits_for_rank_0_and_for_its_words_to_arrive(case):
    size, rank, expected = case
    happened = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.environment, "launched", lambda: (size, rank, ""))
        patch.setattr(train.time, "sleep", happened.append)
        patch.setattr(train, "_complain", happened.append)
        assert train._refuse_before_mpi("wrong", 2) == 2
    assert happened == [*(seconds for seconds in expected if seconds > 1), "wrong", *(s for s in expected if s < 1)]


def test_what_was_printed_goes_out_before_a_complaint(monkeypatch):
    happened = []
    monkeypatch.setattr(train.sys, "stdout", SimpleNamespace(flush=lambda: happened.append("flush")))
    monkeypatch.setattr(train.os, "write", lambda descriptor, data: happened.append((descriptor, data)))
    train._complain("wrong \udcff")
    monkeypatch.undo()
    assert happened == ["flush", (2, b"wrong \\udcff\n")]


@each(**{"error, kind": [(ValueError("v"), Refused), (OSError("o"), Refused), (ConfigError("c"), Refused),
                         (KeyError(5), KeyError), (None, None)]})  # fmt: skip
def test_what_a_user_can_mend_is_said_in_a_sentence(error, kind):
    comm = create_communicator("single")
    if error is None:
        with alike(comm):
            pass
        return
    with pytest.raises(kind) as caught, alike(comm):
        raise error
    assert type(caught.value) is kind and (caught.value is error) == (kind is KeyError)
    if kind is Refused:
        assert str(error) in str(caught.value) and caught.value.__cause__ is error
