"""Tests of dbrdist.comm.functions.collective."""

from types import SimpleNamespace

import numpy as np

from dbrdist.comm import create_communicator, functions
from dbrdist.comm.functions import collective
from dbrdist.core.tape.variable import Variable
from tests.each import each


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


@each(
    case=[
        (np.ones((2, 3)), [(3,), (3,)]), (np.ones((3, 2)), None), (np.ones(()), None), (np.ones(2), [(), ()]),
        ([np.float32(1), np.ones(3)], [(), (3,)]), ([np.ones(2), np.ones(3)], [(2,), (3,)]), ((np.ones(2),), None),
        ("ab", None), (None, None),
    ]
)  # fmt: skip
def test_what_is_one_for_each_rank(case):
    xs, shapes = case
    found = collective._for_each(SimpleNamespace(size=2), xs)
    assert (found and [x.shape for x in found]) == shapes
    if isinstance(xs, np.ndarray):
        of_variable = collective._for_each(SimpleNamespace(size=2), Variable(xs))
        assert (of_variable and [x.shape for x in of_variable]) == shapes


def test_a_vector_is_numbers_one_for_each_rank():
    comm = create_communicator("single")
    x = np.array([2.0], np.float32)
    for verb in functions.reduce_scatter, functions.scatter, lambda comm, x: functions.alltoall(comm, x)[0]:
        for xs in x, [x[0]], Variable(x):
            y = verb(comm, xs)
            assert type(y) is Variable and y.shape == () and y.dtype == np.float32 and y.array == 2
    for verb in functions.allreduce, lambda comm, x: functions.allgather(comm, x)[0], functions.bcast:
        assert type(verb(comm, x[0])) is Variable
