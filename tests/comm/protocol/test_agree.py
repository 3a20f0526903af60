"""Errors that all ranks raise together."""

import re

import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.protocol import agree
from dbrdist.errors import CheckpointError, CommunicatorError
from tests.comm.contract import raises


def fail_on(comm, ranks, error):
    with agree.together(comm):
        if comm.rank in ranks:
            raise error


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_nothing_is_raised_where_no_rank_fails(num_ranks):
    assert run_threads(num_ranks, fail_on, (), ValueError()) == [None] * num_ranks


def test_the_error_of_one_rank_is_raised_on_all_with_its_type():
    def body(comm):
        raises(
            FileNotFoundError,
            "no data (on rank 2 of 3, called at ",
            lambda: fail_on(comm, [2], FileNotFoundError("no data")),
        )
        raises(
            CheckpointError,
            "bad (on ranks 1, 2 of 3, called at ",
            lambda: fail_on(comm, [1, 2], CheckpointError("bad")),
        )
        with pytest.raises(ValueError, match=r"^everywhere$"):
            fail_on(comm, range(3), ValueError("everywhere"))
        comm.barrier()

    run_threads(3, body, timeout_seconds=60)


class OwnError(Exception):
    """A class that other ranks may not be able to import."""


def test_an_error_that_cannot_be_made_elsewhere_becomes_a_communicator_error():
    def body(comm):
        raises(CommunicatorError, "mine (on rank 0 of 2, called at ", lambda: fail_on(comm, [0], OwnError("mine")))
        broken = UnicodeDecodeError("utf-8", b"x", 0, 1, "bad byte")
        raises(CommunicatorError, "UnicodeDecodeError: 'utf-8'", lambda: fail_on(comm, [0], broken))

    run_threads(2, body, timeout_seconds=60)


def test_the_cause_is_kept_on_the_rank_that_failed():
    def body(comm):
        own = ValueError("mine")
        try:
            fail_on(comm, [1], own)
        except ValueError as e:
            return e.__cause__ is own
        raise AssertionError("expected an error")

    assert run_threads(3, body, timeout_seconds=60) == [False, True, False]


def test_on_root():
    def body(comm):
        calls = []
        value = agree.on_root(comm, lambda: calls.append(1) or {"from": comm.rank}, root=1)
        raises(ZeroDivisionError, "by zero", lambda: agree.on_root(comm, lambda: 1 // 0))
        return value, len(calls)

    assert run_threads(3, body, timeout_seconds=60) == [({"from": 1}, 0), ({"from": 1}, 1), ({"from": 1}, 0)]


def test_same_everywhere_says_who_has_what():
    def body(comm):
        agree.same_everywhere(comm, "equal", "the same letter")
        with pytest.raises(CommunicatorError) as info:
            agree.same_everywhere(comm, "ab"[comm.rank == 1], "the same letter")
        return str(info.value)

    (text,) = set(run_threads(3, body))
    start, _, place = text.partition(" (called at ")
    assert start == "expected the same letter on every rank, got a on ranks 0, 2; b on rank 1"
    assert re.fullmatch(r".*test_agree\.py:\d+\)", place)


def test_a_parameter_that_is_missing_or_besides_is_named():
    class Model:
        def __init__(self, names):
            self.names = names

        def namedparams(self):
            class Param:
                array, shape, dtype = 1, (2,), np.dtype("f")

            return [(name, Param) for name in self.names]

    def body(comm, *names):
        with pytest.raises(CommunicatorError) as info:
            agree.check_params(comm, list(Model(names[comm.rank]).namedparams()))
        return str(info.value)

    for theirs, text in [("/a /b", "rank 1: /b (2,) float32 besides"), ("", "rank 1: no /a (2,) float32")]:
        texts = run_threads(2, body, ["/a"], theirs.split())
        assert texts[0] == texts[1]
        assert f"{text} (called at " in texts[0]
