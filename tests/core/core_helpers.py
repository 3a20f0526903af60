"""Small functions and links that several tests of the core are about."""

from __future__ import annotations

import numpy as np

import dbrdist
import dbrdist.links as L
from dbrdist import FunctionNode, Parameter, optimizers
from dbrdist.core.model import flat


# ---- optimizers and their rules -------------------------------------------------------------------------------------
def with_gradients(optimizer=None, dtype=np.float32):
    link = L.Linear(2, 3, initialW=dbrdist.initializers.Constant(1.0), initial_bias=1.0)
    for p in link.params():
        p.array = p.array.astype(dtype)
        p.grad = np.ones_like(p.array)
    return link, (optimizer or optimizers.SGD(lr=0.5)).setup(link)


# ---- flat memory ----------------------------------------------------------------------------------------------------
def two_parameters():
    a, b = Parameter(np.array([[1.0, 2.0, 3.0]])), Parameter(np.array([4.0, 5.0]))
    a.grad, b.grad = np.array([[6.0, 7.0, 8.0]]), np.array([9.0, 10.0])
    flat.gather([a, b])
    return a, b


class Old(dbrdist.Function):
    """The same in the old style."""

    def forward(self, xs):
        return (xs[0] * 3.0,)

    def backward(self, xs, gys):
        return (gys[0] * 3.0,)


class Notes(FunctionNode):
    """Hands its input on twice or once, and its gradient with a note of its name."""

    def __init__(self, name, noted, count=1):
        self.name, self.noted, self.count = name, noted, count

    def forward(self, xs):
        return tuple(xs[0] * (k + 1) for k in range(self.count))

    def backward(self, wanted, gys):
        self.noted.append(self.name)
        return (sum(g * (k + 1) for k, g in enumerate(gys) if g is not None),)


# ---- functions of users ---------------------------------------------------------------------------------------------
class Twice(FunctionNode):
    given: object = None

    def forward(self, xs):
        self.retain_inputs((0,))
        return [xs[0] * 2] if self.given is None else self.given(xs[0])

    def backward(self, indexes, gys):
        return gys[0] * 2
