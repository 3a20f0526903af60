"""Tests of dbrdist.comm.functions.graph."""

import threading

import numpy as np

from dbrdist import functions as F
from dbrdist.comm import create_communicator, functions
from dbrdist.comm.functions import graph
from dbrdist.core.tape.node import assignments
from dbrdist.core.tape.variable import Variable
from tests.each import each


def test_calls_that_have_gradients_are_counted():
    comm = create_communicator("single")
    assert [graph.number_of_call(comm) for _ in range(3)] == [1, 2, 3]
    assert comm.gate.backward_of == 0
    with graph.going_back_through(comm, 7):
        assert comm.gate.backward_of == 7
        with graph.going_back_through(comm, 8):
            assert comm.gate.backward_of == 8
        assert comm.gate.backward_of == 7
    assert comm.gate.backward_of == 0
    y = functions.allreduce(comm, Variable(np.ones(2)))
    assert y.creator.number == 4 and functions.allreduce(comm, Variable(np.ones(2))).creator.number == 5


def test_communication_has_ranks_above_all_before_it():
    """In a thread of its own: earlier communication of this one counts too."""
    found = []

    def work():
        comm = create_communicator("single")
        assert graph.place() == 0
        y = functions.allreduce(comm, Variable(np.ones(2)))
        found.append((y.creator.rank, y.node.rank, graph.place()))
        z = functions.allreduce(comm, Variable(np.ones(2)))
        found.append((z.creator.rank, z.node.rank, graph.place()))
        graph.go_beyond(10)
        graph.go_beyond(3)
        w = functions.allreduce(comm, Variable(np.ones(2)))
        found.append((w.creator.rank, w.node.rank, graph.place()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(1, 2, 1), (2, 3, 2), (11, 12, 11)]


def in_a_thread(function):
    """What it returns in a thread that has not communicated yet."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@each(**{"least, x_rank, ranks, place": [(0, 0, (1, 2), 3), (1, 0, (2, 3), 4), (5, 0, (6, 7), 8), (-1, 0, (0, 1), 2),
                                         (2, 4, (4, 5), 6), (4, 4, (5, 6), 7), (3, 4, (4, 5), 6)]})  # fmt: skip
def test_what_is_called_later_comes_above_what_was_before(least, x_rank, ranks, place):
    """Two functions in a row, on an input of some rank; those that are above ``least`` already stay."""

    def work():
        x = Variable(np.ones(2))
        for _ in range(x_rank):
            x = F.relu(x)
        assignments[0] += 1
        since = assignments[0]
        y = F.relu(x)
        z = F.exp(y)
        graph.deepen((z, None), least, since)
        assert y.node.rank == y.creator.rank + 1 and z.node.rank == z.creator.rank + 1
        return (y.creator.rank, z.creator.rank), graph.place()

    assert in_a_thread(work) == (ranks, place)


def test_what_has_no_functions_changes_no_place():
    def work():
        graph.go_beyond(4)
        graph.deepen((), 7, assignments[0])
        graph.deepen((Variable(np.ones(2)), 3), 7, assignments[0])
        return graph.place()

    assert in_a_thread(work) == 4
