"""Tests of dbrdist.comm.links.chain_list."""

import numpy as np
import pytest

import dbrdist.links as L
from dbrdist.comm import create_communicator
from dbrdist.comm.links import MultiNodeChainList, chain_list
from dbrdist.core.tape.variable import Variable
from tests.comm.comm_helpers import SIZE, said


def test_inputs_are_cut_nearly_evenly():
    x, t = np.arange(7), list("abcdefg")
    assert chain_list._cut((x, t), 1) == [(x, t)] and chain_list._cut((), 3) == [()] * 3
    parts = chain_list._cut((x, t), 3)
    assert [(a.tolist(), b) for a, b in parts] == [([0, 1], ["a", "b"]), ([2, 3], ["c", "d"]),
                                                  ([4, 5, 6], ["e", "f", "g"])]  # fmt: skip
    assert [v.shape for (v,) in chain_list._cut((Variable(np.ones((4, 2))),), 2)] == [(2, 2)] * 2
    for inputs, got in (
        ((x, x[:3]), "7, 3"), ((np.array(3),), "none"), ((x, 3), "7, none"), ((3, x), "none, 7"),
        ((Variable(np.array(3.0)),), "none"),
    ):  # fmt: skip
        words = f"arrays, or lists, of one length, to be cut into micro-batches, got lengths {got}"
        with pytest.raises(ValueError, match=words):
            chain_list._cut(inputs, 2)


def test_outputs_are_joined():
    a, b = Variable(np.ones((2, 3))), Variable(np.zeros((1, 3)))
    assert chain_list._joined([a]) is a and chain_list._joined([3]) == 3
    assert chain_list._joined([a, b]).array.tolist() == [[1] * 3] * 2 + [[0] * 3]
    first, second = chain_list._joined([(a, b), (b, a)])
    assert first.shape == second.shape == (3, 3) and second.array[0].tolist() == [0] * 3
    assert chain_list._joined([np.ones(1), np.zeros(2)]).array.tolist() == [1, 0, 0]
    for ys in ([Variable(np.array(1.0)), a], [a, Variable(np.array(1.0))], [1.0, 2.0], ["ab", "cd"], [[1], [2]]):
        with pytest.raises(ValueError, match="an output with an axis of examples, to be joined over micro-batches"):
            chain_list._joined(ys)


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (lambda rank: [(rank - 1 if rank == 1 else None, None)], "outputs of rank 0 for rank 1: 0"),
        (lambda rank: [(None, 7 if rank == 1 else None)], "expected ranks from 0 to 2, got 7"),
        (lambda rank: [((rank - 1) % SIZE, (rank + 1) % SIZE)], "the components form a cycle"),
        (lambda rank: [(None, [])], "expected None, a rank, or a list of ranks, got []"),
        (lambda rank: [(1.0, None)], "rank_in expected a whole number, got float"),
        (lambda rank: [(None, True)], "rank_out expected a whole number, got True"),
        (lambda rank: [(None, None), (None, None)], "another component gives the model's output already"),
        (lambda rank: [(None, 1)] if rank == 0 else [], "outputs of rank 0 for rank 1: 1"),
    ],
)
def test_chains(ends, words):
    def body(comm):
        model = MultiNodeChainList(comm)
        for rank_in, rank_out in ends(comm.rank):
            model.add_link(L.Linear(3, 3), rank_in=rank_in, rank_out=rank_out)
        model(np.ones((2, 3), np.float32))

    assert words in said(body)


def test_chains_of_something_else():
    assert "add_link expected a link, got int" in said(lambda comm: MultiNodeChainList(comm).add_link(3))


def test_a_batch_is_one_part_until_a_pipeline_is_asked_for():
    class Seen(L.Linear):
        def forward(self, x):
            lengths.append(len(x))
            return super().forward(x)

    model = MultiNodeChainList(create_communicator("single"))
    model.add_link(Seen(3, 2))
    x, found = np.arange(15, dtype=np.float32).reshape(5, 3), []
    for number, parts in ((None, [5]), (1, [5]), (2, [2, 3]), (5, [1] * 5)):
        lengths = []
        assert number is None or model.pipeline(number) is model
        found.append(model(x).array)
        assert lengths == parts
    for y in found:
        np.testing.assert_allclose(y, x @ model[0].W.array.T + model[0].b.array, rtol=1e-5)
