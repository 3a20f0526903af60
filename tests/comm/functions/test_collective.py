"""Tests of dbrdist.comm.functions.collective."""

import numpy as np

from dbrdist.comm import create_communicator, functions
from dbrdist.core.tape.variable import Variable


def test_what_the_root_broadcasts_is_another_variable():
    comm = create_communicator("single")
    x = Variable(np.ones(3))
    y = functions.bcast(comm, x)
    assert y is not x and y.array is not x.array and y.array.tolist() == [1] * 3
    gathered = functions.gather(comm, x)
    assert type(gathered) is tuple and gathered[0].array.tolist() == [1] * 3


def test_a_delegate_of_ones_own_gets_no_gradient():
    comm = create_communicator("single")
    y = functions.allreduce(comm, Variable(np.ones(2)))
    own = y.creator.inputs[-1]
    assert y.creator.has_own_delegate and own.shape == (0,)
    y.grad = np.ones(2)
    y.backward()
    assert own.gradient is None
    delegate = Variable(np.zeros(3))
    y = functions.pseudo_connect(delegate, Variable(np.ones(2)))
    y.grad = np.ones(2)
    y.backward()
    assert delegate.grad.tolist() == [0] * 3
