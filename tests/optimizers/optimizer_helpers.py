"""Links, gradients and steps for the tests of optimizers."""

from __future__ import annotations

import numpy as np

import dbrdist
from dbrdist import Parameter

SHAPES = ((4, 3), (5,), (2, 3, 2, 2), ())


def make(dtype=np.float64, shapes=SHAPES):
    random = np.random.default_rng(0)
    link = dbrdist.Link()
    with link.init_scope():
        for i, shape in enumerate(shapes):
            setattr(link, f"p{i}", Parameter(random.normal(size=shape).astype(dtype)))
    return link


def run(link, optimizer, steps, factor=1.0):
    for t in steps:
        random = np.random.default_rng(100 + t)
        for p in link.params():
            p.grad = np.asarray(factor * random.normal(size=p.shape), p.dtype)
        optimizer.update()


def saved(link, optimizer):
    target = dbrdist.serializers.DictionarySerializer()
    link.serialize(target["model"])
    optimizer.serialize(target["optimizer"])
    return dbrdist.serializers.NpzDeserializer(target.target)


W = np.array([[3.0, -4.0], [1.0, 2.0]])
G = np.array([[0.5, 0.25], [-1.5, 2.0]])


def link_of(**arrays):
    link = dbrdist.Link()
    with link.init_scope():
        for name, a in arrays.items():
            setattr(link, name, Parameter(np.array(a)))
    return link


KINDS_OF_NUMBERS = {
    "0-d": np.array,
    "0-d float32": lambda x: np.array(x, np.float32),
    "one element": lambda x: np.array([x]),
    "float64": np.float64,
    "read-only": lambda x: np.broadcast_to(np.float64(x), (1, 1)),
}


def steps_of(optimizer, dtype, hook=None, num_steps=3):
    """The parameters after some steps."""
    link = link_of(w=W.astype(dtype), v=W[0].astype(dtype))
    optimizer.setup(link)
    optimizer.use_fp32_update()
    if hook is not None:
        optimizer.add_hook(hook)
    for k in range(num_steps):
        link.w.grad, link.v.grad = ((k + 1) * G).astype(dtype), G[0].astype(dtype)
        optimizer.update()
    return [p.array for p in link.params()]


# ---- published numbers ----------------------------------------------------------------------------------------------
def follow(optimizer, gradients_, lrs=None, start=0.0):
    link = dbrdist.Link()
    with link.init_scope():
        link.w = Parameter(np.array([start]))
    optimizer.setup(link)
    out = []
    for i, g in enumerate(gradients_):
        if lrs is not None:
            optimizer.lr = lrs[i]
        link.w.grad = np.array([float(g)])
        optimizer.update()
        out.append(float(link.w.array[0]))
    return out, link
