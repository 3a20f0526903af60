"""Communication that gradients flow through, with arrays on the device: results and gradients lie there too."""

from __future__ import annotations

import numpy as np
from support import is_on, put

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist.comm import MultiNodeChainList, run_threads
from dbrdist.comm import functions as C
from dbrdist.comm.links import MultiNodeBatchNormalization, create_multi_node_n_step_rnn
from dbrdist.core.array import backend
from dbrdist.core.tape.backprop import grad
from dbrdist.core.tape.variable import Variable


def host(rank, shape=(2, 3)):
    return np.random.default_rng([rank, 3]).standard_normal(shape).astype(np.float32)


def functions(comm, device):
    """Every function, in first and second order."""
    last = comm.size - 1
    x, d = Variable(put(device, host(comm.rank))), Variable(put(device, np.zeros(1, np.float32)))
    on_root = comm.rank == last
    delegate = C.send((x, x * 2), comm, (comm.rank + 1) % comm.size)
    gathered = C.gather(comm, x, last)
    ys = [
        *C.recv(comm, (comm.rank - 1) % comm.size, delegate),
        *C.allgather(comm, x),
        *C.alltoall(comm, [x] * comm.size),
        C.allreduce(comm, x),
        C.reduce_scatter(comm, [x] * comm.size),
        C.bcast(comm, x if on_root else d, last),
        C.scatter(comm, [x] * comm.size if on_root else d, last),
        *(gathered if on_root else ()),
    ]
    assert all(is_on(device, y.array) for y in ys)
    tied = None if on_root else gathered
    loss = C.pseudo_connect(tied, sum(F.sum(y**3) for y in ys))
    g, gd = grad([loss], [x, d], enable_double_backprop=True)
    assert is_on(device, g.array)
    C.pseudo_connect(gd, C.pseudo_connect(tied, F.sum(g**2))).backward()
    assert is_on(device, x.grad)
    return backend.to_cpu(g.array), backend.to_cpu(x.grad)


def links(comm, device):
    """A chain in a pipeline, batch normalization and a recurrent link over two ranks."""
    bn = MultiNodeBatchNormalization(3, comm).to_device(device)
    x = Variable(put(device, host(comm.rank, (4, 3, 2, 2))))
    y = bn(x)
    F.sum(y**3).backward()
    model = MultiNodeChainList(comm).pipeline(2)
    model.add_link(
        L.Linear(3, 3, initialW=host(5 + comm.rank, (3, 3))),
        rank_in=0 if comm.rank else None,
        rank_out=None if comm.rank else 1,
    )
    model.to_device(device)
    z = model() if comm.rank else model(put(device, host(8, (4, 3))))
    (F.sum(z**2) if comm.rank else z).backward()
    rnn = create_multi_node_n_step_rnn(
        L.NStepLSTM(1, 3, 3, 0.0, initialW=host(9, (3, 3))),
        comm,
        0 if comm.rank else None,
        None if comm.rank else 1,
    ).to_device(device)
    *_, hs, delegate = rnn([put(device, host(10, (4, 3)))])
    C.pseudo_connect(delegate, F.sum(hs[0] ** 2)).backward()
    found = [y.array, x.grad, model[0].W.grad, rnn.actual_rnn[0].w0.grad]
    assert all(is_on(device, a) for a in found)
    return [backend.to_cpu(a) for a in found]


def test_functions_of_threads(device):
    for num_ranks in (2, 3):
        expected = run_threads(num_ranks, functions, backend.get_device("@numpy"), timeout_seconds=60)
        for found, right in zip(run_threads(num_ranks, functions, device, timeout_seconds=60), expected, strict=True):
            for a, b in zip(found, right, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_links_of_threads(device):
    expected = run_threads(2, links, backend.get_device("@numpy"), timeout_seconds=60)
    for found, right in zip(run_threads(2, links, device, timeout_seconds=60), expected, strict=True):
        for a, b in zip(found, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
