"""Links that communicate, as functions of a communicator: compared with one process that has all ranks' batches."""

from __future__ import annotations

import copy

import numpy as np

import dbrdist
from dbrdist import functions as F
from dbrdist import links as L
from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.comm import functions as C
from dbrdist.comm import links as M
from dbrdist.core.array import backend
from dbrdist.core.tape.backprop import grad
from dbrdist.core.tape.variable import Variable
from dbrdist.errors import CommunicatorError
from tests.comm.disagreement_contract import all_raise, several
from tests.comm.gradients_contract import by_name, raises, values

__all__ = ["CHECKS", "by_name"]


# ---- batch normalization ----


def batch_of(rank, sizes, kept=(3,), tail=(), offset=0.0):
    x = values((sizes[rank], *kept, *tail), rank, 21) + offset + rank
    return x, values(x.shape, rank, 22)


def normalized(bn, x, w, connect=lambda y: y):
    """Output, first-order gradients and those of a penalty on them, of a loss in which every element counts."""
    x = Variable(x)
    params = [p for _, p in sorted(bn.namedparams())]
    y = bn(x)
    loss = F.sum(y**2 * w) + F.sum(y**3)
    first = grad([loss], [x, *params], enable_double_backprop=True)
    bn.cleargrads()
    F.sum(first[0] ** 2 * w).backward()
    return y.array, [g.array for g in first], [x.grad, *(p.grad for p in params)]


def compare_with_one_process(comm, sizes, kept=(3,), tail=(), offset=0.0, rtol=1e-8, **arguments):
    gamma, beta = values(kept, 31), values(kept, 32)
    size = kept[0] if len(kept) == 1 else kept
    ours = M.MultiNodeBatchNormalization(
        size, comm, dtype=np.float64, initial_gamma=gamma, initial_beta=beta, **arguments
    )
    one = L.BatchNormalization(size, dtype=np.float64, initial_gamma=gamma, initial_beta=beta, **arguments)
    for _ in range(2):
        parts = [batch_of(r, sizes, kept, tail, offset) for r in range(comm.size)]
        y, first, second = normalized(one, *(np.concatenate(p) for p in zip(*parts)))
        begin = sum(sizes[: comm.rank])
        mine = slice(begin, begin + sizes[comm.rank])
        own_y, own_first, own_second = normalized(ours, *parts[comm.rank])
        scale = max(1.0, np.abs(second[0]).max())
        np.testing.assert_allclose(own_y, y[mine], rtol=rtol, atol=1e-9)
        np.testing.assert_allclose(own_first[0], first[0][mine], rtol=rtol, atol=1e-9)
        np.testing.assert_allclose(own_second[0], second[0][mine], rtol=rtol, atol=1e-9 * scale)
        for own, whole in zip((*own_first[1:], *own_second[1:]), (*first[1:], *second[1:]), strict=True):
            own = np.zeros_like(whole) if own is None else own
            np.testing.assert_allclose(comm.allreduce(own), whole, rtol=rtol, atol=1e-9 * scale)
        np.testing.assert_allclose(ours.avg_mean, one.avg_mean, rtol=1e-12)
        np.testing.assert_allclose(ours.avg_var, one.avg_var, rtol=1e-10)


def check_batch_normalization_is_that_of_the_joined_batch(comm):
    compare_with_one_process(comm, [4] * comm.size)
    compare_with_one_process(comm, [2] * comm.size, (3,), (2, 2), decay=0.5, eps=1e-3)
    compare_with_one_process(comm, [3] * comm.size, (2, 3))
    compare_with_one_process(comm, [4] * comm.size, use_gamma=False)
    compare_with_one_process(comm, [4] * comm.size, use_beta=False)


def check_batches_of_different_length(comm):
    compare_with_one_process(comm, [2 + 3 * r for r in range(comm.size)])
    compare_with_one_process(comm, [0 if r == 1 else 3 for r in range(comm.size)], (2,), (2, 1))


def check_variance_far_from_zero(comm):
    """E[x^2] - E[x]^2 would leave nothing of the variance: 1e9 squared is 1e18, of which float64 keeps 16 digits."""
    x = np.linspace(-1, 1, 8 * comm.size).reshape(comm.size, 8, 1)
    bn = M.MultiNodeBatchNormalization(1, comm, dtype=np.float64, eps=1e-12)
    y = bn(x[comm.rank] + 1e9).array
    np.testing.assert_allclose(y, ((x - x.mean()) / x.std())[comm.rank], atol=1e-6)
    bn = M.MultiNodeBatchNormalization(1, comm, eps=1e-12)
    y = bn((x[comm.rank] + 1000).astype(np.float32)).array
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, ((x - x.mean()) / x.std())[comm.rank], atol=1e-3)


def check_groups_of_ranks(comm):
    part = comm.split(comm.rank % 2, comm.rank)
    bn = M.MultiNodeBatchNormalization(2, part, dtype=np.float64)
    y = bn(values((3, 2), comm.rank) + comm.rank)
    group = range(comm.rank % 2, comm.size, 2)
    whole = np.concatenate([values((3, 2), r) + r for r in group])
    expected = (whole - whole.mean(0)) / np.sqrt(whole.var(0) + 2e-5)
    k = comm.rank // 2
    np.testing.assert_allclose(y.array, expected[3 * k : 3 * k + 3])
    part.finalize()


def check_evaluation_does_not_communicate(comm):
    bn = M.MultiNodeBatchNormalization(2, comm)
    bn(values((3, 2), comm.rank, dtype=np.float32))
    with dbrdist.using_config("train", False):
        if comm.rank == 0:
            y = bn(np.ones((3, 2), np.float32)).array
            expected = (1 - bn.avg_mean) / np.sqrt(bn.avg_var + 2e-5)
            np.testing.assert_allclose(y, np.broadcast_to(expected, (3, 2)), rtol=1e-4)
    comm.barrier()


def check_types_and_layouts(comm):
    for dtype in ("float16", "float32", "float64"):
        bn = M.MultiNodeBatchNormalization(3, comm)
        x = Variable(backend.channels_last(values((4, 3, 5, 5), comm.rank, dtype=dtype)))
        y = bn(x)
        F.sum(F.relu(y) * x).backward()
        assert y.dtype == x.grad.dtype == np.dtype(dtype)
        assert backend.is_channels_last(y.array) and backend.is_channels_last(x.grad)


def check_training_is_that_of_one_process(comm):
    """The same weights after some steps, with ranks that have parts of the batch, also where part of the model is
    computed again in backward."""

    def network():
        dbrdist.random.set_seed(3)
        return L.Classifier(Forgetful())

    one = network()
    model = M.create_mnbn_model(network(), comm)
    alone = optimizers.MomentumSGD(lr=0.1).setup(one)
    together = create_multi_node_optimizer(optimizers.MomentumSGD(lr=0.1), comm).setup(model)
    for step in range(4):
        x = values((4 * comm.size, 5), step, 51, dtype=np.float32)
        t = (x.sum(1) * 7).astype(np.int32) % 3
        mine = slice(4 * comm.rank, 4 * comm.rank + 4)
        alone.update(one, x, t)
        together.update(model, x[mine], t[mine])
    for (name, expected), (_, p) in zip(one.namedparams(), model.namedparams(), strict=True):
        np.testing.assert_allclose(p.array, expected.array, rtol=1e-3, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(model.predictor.bn.avg_var, one.predictor.bn.avg_var, rtol=1e-4)


class Forgetful(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1, self.bn, self.l2 = L.Linear(5, 8), L.BatchNormalization(8), L.Linear(8, 3)

    def forward(self, x):
        return self.l2(F.forget(lambda h: F.relu(self.bn(h)), self.l1(x)))


class Net(dbrdist.Chain):
    """A batch normalization in three places: an attribute, a list, one shared link."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(3, 4)
            self.bn = L.BatchNormalization(4, decay=0.7, eps=1e-3, initial_gamma=2, use_beta=False)
            self.rest = dbrdist.Sequential(L.Linear(4, 4), L.BatchNormalization(None), F.relu)
        self.in_a_list = [self.bn]

    def forward(self, x):
        return self.rest(self.in_a_list[0](self.l1(x)))


def check_create_mnbn_model(comm):
    net = Net()
    net(values((8, 3), 5, dtype=np.float32))
    before = copy.deepcopy(net)
    model = M.create_mnbn_model(net, comm)
    assert type(net.bn) is L.BatchNormalization and type(model.bn) is M.MultiNodeBatchNormalization
    assert model.in_a_list[0] is model.bn and model.bn.comm is comm
    assert type(model.rest[1]) is M.MultiNodeBatchNormalization
    assert (model.bn.decay, model.bn.eps) == (0.7, 1e-3) and model.bn.beta is None
    np.testing.assert_array_equal(model.bn.avg_mean, net.bn.avg_mean)
    assert [name for name, _ in model.namedparams()] == [name for name, _ in net.namedparams()]
    for r in range(2):
        parts = [values((4, 3), k, r, dtype=np.float32) * (k + 1) for k in range(comm.size)]
        whole = before(np.concatenate(parts)).array
        mine = model(parts[comm.rank]).array
        np.testing.assert_allclose(mine, whole[4 * comm.rank : 4 * comm.rank + 4], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(model.bn.avg_var, before.bn.avg_var, rtol=1e-5)
    other = M.create_mnbn_model(model, comm)
    assert other.bn is not model.bn and other.bn.comm is comm
    copy.deepcopy(model)(parts[comm.rank])


class Derived(L.BatchNormalization):
    def forward(self, x):
        return x


def check_wrong_links(comm):
    raises(
        ValueError, "no class derived from BatchNormalization", lambda: M.create_mnbn_model(Net_with(Derived(3)), comm)
    )
    raises(ValueError, "a Link", lambda: M.create_mnbn_model(F.relu, comm))
    raises(ValueError, "'auto', 'mpi' or 'nccl'", lambda: M.create_mnbn_model(Net(), comm, "carrier pigeon"))
    raises(ValueError, "'auto'", lambda: M.MultiNodeBatchNormalization(3, comm, communication_backend="gloo"))
    raises(ValueError, "n-step recurrent link", lambda: M.create_multi_node_n_step_rnn(L.Linear(2), comm))
    rnn = M.create_multi_node_n_step_rnn(L.NStepLSTM(1, 2, 2, 0.0), comm)
    raises(ValueError, "2 states and the sequences", lambda: rnn(None, [np.zeros((2, 2), np.float32)]))


def Net_with(link):
    return dbrdist.Sequential(L.Linear(3, 3), link)


@several
def check_channels_that_differ_between_ranks(comm):
    bn = M.MultiNodeBatchNormalization(2 + comm.rank, comm)
    x = values((3, 2 + comm.rank), comm.rank, dtype=np.float32)
    all_raise(comm, CommunicatorError, "the same shape and type", lambda: bn(x))


# ---- recurrent links ----

KINDS = [L.NStepLSTM, L.NStepGRU, L.NStepRNNTanh, L.NStepRNNReLU, L.NStepBiLSTM, L.NStepBiGRU, L.NStepBiRNNTanh]


@several
def check_recurrent_links_go_on_at_the_next_rank(comm):
    """Sequences cut into one piece for each rank: outputs and gradients are those of the whole sequences."""
    for kind in KINDS:
        rnns = []
        for r in range(comm.size):
            dbrdist.random.set_seed(r)
            rnns.append(kind(2, 3, 3, 0.0))
        pieces = [[values((n, 3), r, n, dtype=np.float32) - 1 for n in (4, 2)] for r in range(comm.size)]
        states = [None] * rnns[0].n_cells
        losses = []
        for rnn, xs in zip(rnns, pieces):
            *states, ys = rnn(*states, xs)
            losses.append(sum(F.sum(y**2) for y in ys))
        (sum(losses) + sum(F.sum(s**2) for s in states)).backward()
        whole = rnns[comm.rank]
        expected = {name: p.grad for name, p in whole.namedparams()}

        dbrdist.random.set_seed(comm.rank)
        last = comm.rank == comm.size - 1
        mine = M.create_multi_node_n_step_rnn(
            kind(2, 3, 3, 0.0), comm, comm.rank - 1 if comm.rank else None, None if last else comm.rank + 1
        )
        *states, ys, delegate = mine(pieces[comm.rank])
        assert (delegate is None) == last
        loss = sum(F.sum(y**2) for y in ys)
        loss = loss + sum(F.sum(s**2) for s in states) if last else C.pseudo_connect(delegate, loss)
        loss.backward()
        for name, p in mine.actual_rnn.namedparams():
            np.testing.assert_allclose(p.grad, expected[name], rtol=1e-3, atol=1e-5, err_msg=f"{kind.__name__} {name}")


@several
def check_states_that_do_not_fit(comm):
    if comm.rank == 0:
        C.send(Variable(np.zeros((1, 1, 2), np.float32)), comm, 1)
    if comm.rank == 1:
        rnn = M.create_multi_node_n_step_rnn(L.NStepLSTM(1, 2, 2, 0.0), comm, rank_in=0)
        xs = [np.zeros((2, 2), np.float32)]
        raises(ValueError, "2 states from rank 0", lambda: rnn(xs))
        raises(ValueError, "None for the states", lambda: rnn(np.zeros((1, 1, 2), np.float32), None, xs))
    comm.barrier()


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]
