"""What the tests of flat memory share: a small net, gradients for it, and a look at what moved."""

from __future__ import annotations

import numpy as np

import dbrdist
from dbrdist import Parameter
from dbrdist.core.model import flat
from dbrdist.optimizers import SGD


class Net(dbrdist.Chain):
    """Three parameters in a link, whose names would sort in another order, and a bias below."""

    def __init__(self, dtype=np.float64, lazy=False):
        super().__init__()
        with self.init_scope():
            self.z = Parameter(np.arange(1.0, 7.0).reshape(2, 3).astype(dtype))
            self.a = Parameter(np.array([2.0], dtype)) if not lazy else Parameter(2.0)
            self.m = Parameter(np.full((3, 3), 0.5, dtype))


def give(link, value=1.0):
    """A gradient for every parameter, as backward would leave it."""
    for i, p in enumerate(link.params(include_uninit=False)):
        p.grad = np.full(p.shape, value + i, p.dtype)


def arrays(link):
    return {name: p.array.copy() for name, p in link.namedparams(include_uninit=False)}


def assert_moved(link, before, moved):
    for name, p in link.namedparams(include_uninit=False):
        assert (not np.array_equal(p.array, before[name])) == (name in moved), name


def in_one_run(*params):
    return len(flat.runs(params)) == 1


def link_of(*params):
    link = dbrdist.Link()
    with link.init_scope():
        for i, p in enumerate(params):
            setattr(link, f"p{i}", p)
    return link


def after(num_updates, net):
    """The net, before and after its parameters have been trained; lr 0 leaves the values."""
    optimizer = SGD(lr=0.0).setup(net)
    for _ in range(num_updates):
        give(net)
        optimizer.update()
    net.cleargrads()
    return net
