"""Tests of dbrdist.comm.functions.pair."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.functions import pair
from dbrdist.errors import CommunicatorError
from tests.each import each


def received(of, first):
    node = pair.Recv(SimpleNamespace(rank=0), 1, 3, of)
    return node._checked((first, np.ones(2)))


@each(
    **{
        "of, first, got": [
            (5, np.array([5]), None), (5, np.array([6]), "that of message 6"), (5, np.array([5, 5]), "another message"),
            (5, np.array([5.0]), "another message"), (5, np.array(5), "another message"),
            (1, np.array([1.0]), "another message"), (1, np.array([[1]]), "another message"),
        ]
    }
)  # fmt: skip
def test_a_gradient_is_that_of_its_message(of, first, got):
    if got is None:
        (kept,) = received(of, first)
        assert kept.tolist() == [1, 1]
    else:
        with pytest.raises(CommunicatorError, match=f"tag 3 the gradient of message {of}, got {got}; both ranks"):
            received(of, first)


@each(name=["send", "recv"])
def test_a_rank_sends_nothing_to_itself(name):
    comm = SimpleNamespace(rank=1, size=3)
    words = f"{name}: rank: expected another rank than this one, 1, got 1; the variable is here already"
    with pytest.raises(ValueError) as caught:
        pair.send(np.ones(2), comm, 1) if name == "send" else pair.recv(comm, 1)
    assert str(caught.value) == words
    with pytest.raises(ValueError, match="send: x: expected one or more Variables, got none"):
        pair.send((), comm, 0)
