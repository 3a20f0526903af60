"""Training by virtual workers, as functions of a communicator: run on thread ranks here, on processes in tests/mpi."""

from __future__ import annotations

import functools
import itertools
import operator

import numpy as np

import dbrdist
from dbrdist import functions as F
from dbrdist import links as L
from dbrdist import optimizers
from dbrdist.comm import (
    VirtualUpdater,
    create_communicator,
    create_multi_node_evaluator,
    create_multi_node_optimizer,
)
from dbrdist.comm.links import create_mnbn_model
from dbrdist.core.array import random
from dbrdist.core.model.reporter import Reporter, report
from dbrdist.datasets import TupleDataset, block_bounds
from dbrdist.datasets.loading.base import SkipExample
from dbrdist.errors import CommunicatorError
from dbrdist.iterators import MultithreadIterator, SerialIterator
from dbrdist.training import StandardUpdater
from dbrdist.training.extensions import Evaluator
from tests.comm.contract import raises

NUM_WORKERS = 8  # as many ranks can take part


class Net(dbrdist.Chain):
    """A convolution, batch normalization, dropout and a linear layer."""

    def __init__(self, ratio=0.3, dtype=np.float32):
        super().__init__()
        with self.init_scope(), dbrdist.using_config("dtype", np.dtype(dtype)):
            self.conv = L.Convolution2D(3, 4, 3, pad=1)
            self.bn = L.BatchNormalization(4)
            self.linear = L.Linear(4 * 4 * 4, 5)
        self.ratio = ratio

    def forward(self, x, t):
        y = self.linear(F.dropout(F.relu(self.bn(self.conv(x))), self.ratio))
        loss = F.softmax_cross_entropy(y, t)
        report({"loss": loss, "accuracy": F.accuracy(y, t)}, self)
        return loss


class Line(dbrdist.Chain):
    """x w with the mean squared error, without batch statistics; dropout where ``ratio`` is above 0."""

    def __init__(self, ratio=0.0):
        super().__init__()
        with self.init_scope(), dbrdist.using_config("dtype", np.dtype(np.float64)):
            self.linear = L.Linear(6, 2, initialW=np.linspace(-1, 1, 12).reshape(2, 6))
        self.ratio = ratio

    def forward(self, x, t):
        loss = F.mean_squared_error(self.linear(F.dropout(x, self.ratio)), t)
        report({"loss": loss}, self)
        return loss


def images(n=50, seed=0):
    rng = np.random.default_rng(seed)
    return TupleDataset(rng.normal(size=(n, 3, 4, 4)).astype("f"), rng.integers(0, 5, n).astype("i"))


def points(n=50):
    rng = np.random.default_rng(1)
    return TupleDataset(rng.normal(size=(n, 6)), rng.normal(size=(n, 2)))


def optimizer_for(net, kind="momentum"):
    made = {
        "momentum": lambda: optimizers.MomentumSGD(0.1),
        "lars": lambda: optimizers.LARS(0.5),
        "adam": lambda: optimizers.Adam(0.01),
        "plain": lambda: optimizers.SGD(0.1),
    }[kind]()
    made.setup(net)
    if kind != "plain":
        made.add_hook(optimizers.WeightDecay(1e-3))
        made.add_hook(optimizers.GradientClipping(0.5))
    return made


def iterator_for(comm, data, num_workers=NUM_WORKERS, per_worker=2, kind=SerialIterator, **options):
    options = {"last": "short", "rank": comm.rank, "size": comm.size, "seed": 5} | options
    return kind(data, num_workers * per_worker, virtual_workers=num_workers, **options)


class Run:
    """A network, its updater, and what was observed in each step."""

    def __init__(self, comm, net=None, data=None, optimizer="momentum", reproducible=True, **options):
        random.set_seed(0)
        self.net = Net() if net is None else net
        self.optimizer = optimizer_for(self.net, optimizer)
        self.iterator = iterator_for(comm, images() if data is None else data, **options)
        self.updater = VirtualUpdater(self.iterator, self.optimizer, comm, reproducible=reproducible)
        self.log = []

    def steps(self, n):
        reporter = Reporter()
        reporter.add_observer("main", self.net)
        for _ in range(n):
            with reporter.scope({}):
                self.updater.update()
                self.log.append(dict(reporter.observation))
        return self

    def bits(self):
        """All state, as bytes by name."""
        found = {name: p.array for name, p in self.net.namedparams()}
        for name, p in self.net.namedparams():
            found |= {f"{name} {key}": value for key, value in (p.update_rule.state or {}).items()}
        found |= {
            f"{path} {name}": getattr(link, name) for path, link in self.net.namedlinks() for name in link._persistent
        }
        return {"log": repr(self.log)} | {name: np.asarray(value).tobytes() for name, value in found.items()}


@functools.cache
def bits_alone(num_steps, dtype, num_examples, **options):
    """The state after some steps of one rank."""
    with dbrdist.using_config("dtype", dtype):
        return Run(create_communicator("single"), data=images(num_examples), **options).steps(num_steps).bits()


def same_as_alone(comm, num_steps=5, num_examples=50, **options):
    """Five steps with 4 to an epoch, whose last one is short: the same bits as one rank has."""
    together = Run(comm, data=images(num_examples), **options).steps(num_steps).bits()
    alone = bits_alone(num_steps, dbrdist.config.dtype, num_examples, **options)
    assert together.keys() == alone.keys()
    for name, value in together.items():
        assert value == alone[name], name


def check_bits_with_momentum_and_clipping(comm):
    same_as_alone(comm)


def check_bits_with_lars(comm):
    same_as_alone(comm, optimizer="lars")


def check_bits_with_adam_and_an_odd_number_of_workers(comm):
    same_as_alone(comm, optimizer="adam", num_workers=11, per_worker=1)


def check_bits_with_fewer_examples_than_workers(comm):
    """An epoch of 18 examples: 16, and 2 for 8 workers, of which some ranks have none."""
    same_as_alone(comm, num_examples=18)


def check_bits_in_bfloat16(comm):
    with dbrdist.using_config("dtype", dbrdist.mixedbf16):
        same_as_alone(comm)


class Holes:
    """Images of which every seventh is left out, and in the second half of the order of indices all are."""

    def __init__(self, n, all_from):
        self.images, self.all_from = images(n), all_from

    def __len__(self):
        return len(self.images)

    def example_at(self, i, seed, epoch):
        if i % 7 == 3 or i >= self.all_from:
            raise SkipExample(f"example {i} is corrupt")
        return self.images[i]

    def __getitem__(self, i):
        return self.example_at(i, 0, 0)


def check_bits_where_examples_are_left_out(comm):
    """A step of which every example is corrupt changes nothing, but counts."""

    def run_of(over):
        run = Run(over, data=Holes(40, 16), shuffle=False)
        run.steps(1)
        before = run.net.linear.W.array.copy()
        run.steps(1)
        np.testing.assert_array_equal(run.net.linear.W.array, before)
        assert run.log[1] == {}
        assert run.updater.iteration == 2
        return run.steps(3).bits()

    assert run_of(comm) == run_of(create_communicator("single"))


def check_bits_with_frozen_and_odd_parameters(comm):
    """Frozen, tied and with a rule of its own; noise on the gradients; statistics that are tuned anew."""

    class Odd(Net):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.again = self.linear.copy()  # shares the arrays

        def forward(self, x, t):
            h = F.relu(self.bn(self.conv(x), finetune=True))
            loss = F.softmax_cross_entropy(self.linear(h) + self.again(F.dropout(h)), t)
            report({"loss": loss}, self)
            return loss

    def run_of(over):
        run = Run(over, net=Odd())
        run.optimizer.add_hook(optimizers.GradientNoise(0.01))
        run.net.conv.W.update_rule.enabled = False
        run.net.bn.gamma.update_rule.hyperparam.lr = 0.001
        return run.steps(5).bits()

    assert run_of(comm) == run_of(create_communicator("single"))


def check_bits_with_a_loss_scale(comm):
    """Updates that overflow are left out on all ranks alike."""

    def run_of(over):
        run = Run(over)
        run.optimizer.loss_scaling(10)
        run.optimizer._loss_scale = 3e38
        with np.errstate(all="ignore"):
            bits = run.steps(5).bits()
        assert 1 < run.optimizer._loss_scale < 1e38
        return bits

    assert run_of(comm) == run_of(create_communicator("single"))


def check_bits_with_loader_threads(comm):
    run = Run(comm, kind=MultithreadIterator, n_threads=2).steps(5)
    run.iterator.finalize()
    assert run.bits() == bits_alone(5, dbrdist.config.dtype, 50)


def check_the_recipe_holds_without_reproducible_sums(comm):
    together = Run(comm, reproducible=False).steps(5)
    alone = Run(create_communicator("single")).steps(5)
    for (name, p), (_, q) in zip(together.net.namedparams(), alone.net.namedparams()):
        np.testing.assert_allclose(p.array, q.array, rtol=1e-3, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(together.net.bn.avg_var, alone.net.bn.avg_var, rtol=1e-4)
    assert together.net.bn.N == alone.net.bn.N
    for mine, theirs in zip(together.log, alone.log):
        assert mine.keys() == theirs.keys()
        np.testing.assert_allclose(mine["main/loss"], theirs["main/loss"], rtol=1e-4)


def check_sums_that_travel_in_float16_have_room(comm):
    """Each rank's sum is just below a power of two: those of two ranks and more need the next one."""
    random.set_seed(0)
    net = dbrdist.Link()
    with net.init_scope():
        net.w = dbrdist.Parameter(np.ones(5, np.float32))
    x = np.full((16, 5), 1.9999, np.float32)
    comm.set_config("allreduce_grad_dtype", "float16")
    iterator = iterator_for(comm, TupleDataset(x, x))
    optimizer = optimizers.SGD(1.0).setup(net)
    updater = VirtualUpdater(iterator, optimizer, comm, loss_func=lambda x, t: F.sum(net.w * x) * (1 / len(x)))
    updater.update()
    comm.set_config("allreduce_grad_dtype", None)
    np.testing.assert_allclose(net.w.array, -0.9999, rtol=1e-3)


def check_the_mean_is_that_over_examples(comm):
    """Three steps of gradient descent on squares, by NumPy."""
    data = points(21)
    run = Run(comm, net=Line(), data=data, optimizer="plain").steps(3)
    x, t = (np.stack(column) for column in zip(*data))
    w, b = np.linspace(-1, 1, 12).reshape(2, 6), np.zeros(2)
    orders = [random.permutation(5, epoch, 21) for epoch in (0, 1)]
    for step, batch in enumerate([orders[0][:16], orders[0][16:], orders[1][:16]]):
        d = x[batch] @ w.T + b - t[batch]
        np.testing.assert_allclose(run.log[step]["main/loss"], (d**2).mean(), rtol=1e-12)
        g = 2 * d / d.size
        w, b = w - 0.1 * g.T @ x[batch], b - 0.1 * g.sum(0)
    np.testing.assert_allclose(run.net.linear.W.array, w, rtol=1e-12)
    np.testing.assert_allclose(run.net.linear.b.array, b, rtol=1e-12, atol=1e-15)


def check_dropout_is_that_of_the_whole_batch(comm):
    """A worker drops what a single rank with the whole batch would drop in the same rows."""
    run = Run(comm, net=Line(0.5), data=points(), optimizer="plain").steps(5)
    random.set_seed(0)
    net = Line(0.5)
    whole = StandardUpdater(SerialIterator(points(), 16, seed=5, last="short"), optimizer_for(net, "plain"))
    for _ in range(5):
        whole.update()
    np.testing.assert_allclose(run.net.linear.W.array, net.linear.W.array, rtol=1e-12)


def check_statistics_are_the_mean_over_workers(comm):
    """Each worker normalises with its own batch; the running variance is unbiased, weighted by examples."""

    class Norm(dbrdist.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.bn = L.BatchNormalization(6, decay=0.75, dtype=np.float64)

        def forward(self, x, t):
            return F.sum(self.bn(x))

    data = points(43)  # 24 and 19: the last batch gives workers 2 or 3 examples
    net = Norm()
    run = Run(comm, net=net, data=data, optimizer="plain", per_worker=3).steps(2)
    x = np.stack([a for a, _ in data])
    order = random.permutation(5, 0, 43)
    mean, var = np.zeros(6), np.ones(6)
    for batch in (order[:24], order[24:]):
        cuts = [len(batch) * k // 8 for k in range(9)]
        workers = [x[batch[a:b]] for a, b in itertools.pairwise(cuts)]
        share = [len(w) / len(batch) for w in workers]
        mean = 0.75 * mean + 0.25 * sum(s * w.mean(0) for s, w in zip(share, workers))
        var = 0.75 * var + 0.25 * sum(s * w.var(0, ddof=1) for s, w in zip(share, workers))
    np.testing.assert_allclose(net.bn.avg_mean, mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(net.bn.avg_var, var, rtol=1e-9)
    assert run.updater.iteration == 2


def check_steps_are_those_of_one_process_that_adds_gradients_of_small_batches(comm):
    """Golden number 11 of large batches: with batch normalization, workers of 4 are no batch of 32, but one where the
    statistics are shared.
    """
    data = images(32)
    x, t = (np.stack(column) for column in zip(*data))
    with dbrdist.using_config("dtype", np.dtype(np.float64)):
        nets = {kind: Net(ratio=0.0, dtype=np.float64) for kind in ("workers", "added", "whole", "shared")}
    x = x.astype(np.float64)
    for net in nets.values():
        net.copyparams(nets["workers"])
    Run(comm, net=nets["workers"], data=TupleDataset(x, t), per_worker=4, optimizer="momentum").steps(4)
    shared = create_mnbn_model(nets["shared"], comm)
    whole = optimizer_for(nets["whole"])
    together = create_multi_node_optimizer(optimizer_for(shared), comm)
    added = optimizer_for(nets["added"])
    for step in range(4):
        order = random.permutation(5, step, 32)
        nets["added"].cleargrads()
        for rows in np.split(order, 8):
            (nets["added"](x[rows], t[rows]) / 8).backward()
        added.update()
        whole.update(nets["whole"], x[order], t[order])
        begin, end = block_bounds(32, comm.rank, comm.size)
        together.update(shared, x[order[begin:end]], t[order[begin:end]], num_samples=end - begin)
    for name, p in nets["added"].namedparams():
        found = {kind: dict(net.namedparams())[name].array for kind, net in (nets | {"shared": shared}).items()}
        np.testing.assert_allclose(found["workers"], p.array, rtol=1e-9, atol=1e-12, err_msg=name)
        if 32 % comm.size == 0:  # the ranks' losses are means: only those of equal parts add up to that of the whole
            np.testing.assert_allclose(found["shared"], found["whole"], rtol=1e-9, atol=1e-12, err_msg=name)
    assert not np.allclose(nets["whole"].conv.W.array, nets["workers"].conv.W.array, rtol=1e-3)


def check_evaluation(comm):
    """The means over all examples, the same bits as alone; 50 examples in batches of 16."""
    net = Run(comm).steps(2).net

    def evaluate(over):
        own = Evaluator(iterator_for(over, images(50, 3), repeat=False, shuffle=False), net)
        own.name = "validation"
        return create_multi_node_evaluator(own, over)()

    found = evaluate(comm)
    assert found == evaluate(create_communicator("single"))
    x, t = (np.stack(column) for column in zip(*images(50, 3)))
    with dbrdist.using_config("train", False), Reporter() as reporter:
        reporter.add_observer("main", net)
        net(x, t)
        whole = reporter.observation
    assert found.keys() == {"validation/main/loss", "validation/main/accuracy"}
    np.testing.assert_allclose(found["validation/main/loss"], float(whole["main/loss"]), rtol=1e-5)
    np.testing.assert_allclose(found["validation/main/accuracy"], float(whole["main/accuracy"]), rtol=1e-6)


def check_all_ranks_begin_with_the_parameters_and_statistics_of_rank_0(comm):
    def run_of(over, rank):
        run = Run(over)
        run.net.conv.W.array[...] += rank
        run.net.bn.avg_mean[...] = rank
        return run.steps(2).bits()

    assert run_of(comm, comm.rank) == run_of(create_communicator("single"), 0)


def check_values_that_only_some_workers_observe(comm):
    class Sometimes(Line):
        def forward(self, x, t):
            loss = super().forward(x, t)
            if len(x) == 3:
                report({"three": x.sum()}, self)
            report({"text": "no number", "row": np.zeros(3)}, self)
            return loss

    run = Run(comm, net=Sometimes(), data=points(19), optimizer="plain").steps(4)  # 16 and 3; 2 and up to 1 each
    assert all(set(entry) == {"main/loss"} for entry in run.log)
    run = Run(comm, net=Sometimes(), data=points(19), optimizer="plain", per_worker=3).steps(1)  # 19 of 24: 2 or 3
    x = np.stack([a for a, _ in points(19)])[random.permutation(5, 0, 19)]
    cuts = [19 * k // 8 for k in range(9)]
    sums = [x[a:b].sum() for a, b in itertools.pairwise(cuts) if b - a == 3]
    np.testing.assert_allclose(run.log[0]["main/three"], np.mean(sums), rtol=1e-12)


def check_a_stop_request_travels_in_the_header(comm):
    run = Run(comm)
    comm.stop.request = 15 if comm.rank == comm.size - 1 else 0
    try:
        run.steps(1)
        assert comm.stop.answers.tolist() == [0] * (comm.size - 1) + [15]
    finally:
        comm.stop.request, comm.stop.answers = 0, None


def check_a_bad_loss_is_seen_by_all(comm):
    """A loss that is not finite in one worker is in the mean that every rank has."""

    class Bad(Line):
        def forward(self, x, t):
            return super().forward(x / 0.0 if np.abs(x).max() > 2.5 else x, t)

    with np.errstate(all="ignore"):
        run = Run(comm, net=Bad(), data=points(16), optimizer="plain").steps(1)
    assert not np.isfinite(run.log[0]["main/loss"])


def check_a_step_that_fails_changes_nothing(comm):
    """Neither parameters nor running statistics, where a worker fails, or all are done and the ranks disagree."""
    for moment in ("worker", "ranks"):
        run = Run(comm).steps(1)
        before, calls = run.bits(), []

        def fail(x, t, run=run, calls=calls, moment=moment):
            calls.append(run.net(x, t))
            if moment == "worker":
                raise ArithmeticError("broken on purpose")
            return calls[-1]

        run.updater.loss_func = fail
        if moment == "worker":
            raises(ArithmeticError, "on purpose", run.updater.update)
        elif comm.size > 1:
            run.optimizer.lr += comm.rank
            raises(CommunicatorError, "lr", run.updater.update)
        after = run.bits()
        for name, value in before.items():
            assert after[name] == value, name
        assert calls or comm.size == 1


def check_a_parameter_that_is_replaced_in_forward(comm):
    class Replaces(Line):
        def forward(self, x, t):
            if comm.rank == comm.size - 1:
                self.linear.W.array = self.linear.W.array.astype(np.float32)
            return super().forward(x, t)

    run = Run(comm, net=Replaces(), data=points(), optimizer="plain")
    words = "the forward pass has added, removed or replaced a parameter"
    raises(RuntimeError, words, lambda: run.steps(1))


def check_without_a_reporter(comm):
    """What is reported then goes nowhere, as in any updater."""
    run = Run(comm)
    run.updater.update()
    assert run.bits()["/linear/W"] == Run(comm).steps(1).bits()["/linear/W"]


def check_too_many_ranks(comm):
    if comm.size > 1:
        raises(
            ValueError,
            f"got virtual_workers={comm.size - 1} for {comm.size} ranks; start at most {comm.size - 1} ranks",
            lambda: Run(comm, num_workers=comm.size - 1),
        )


def check_recipes_that_differ(comm):
    if comm.size == 1:
        return
    last = comm.rank == comm.size - 1

    def differ(words, **options):
        raises(CommunicatorError, words, lambda: Run(comm, **options).steps(1))

    differ("virtual workers 9", num_workers=9 if last else 8)
    differ("batch 24", per_worker=3 if last else 2)
    differ("reproducible False", reproducible=not last)
    differ(f"but those of rank {comm.size - 1} differ from rank 0's", data=points() if last else images())
    differ("/linear/W (2, 6) float64 instead of /conv/W", net=Line() if last else Net())


def check_optimizers_that_differ(comm):
    if comm.size == 1:
        return
    last = comm.rank == comm.size - 1
    run = Run(comm, optimizer="adam" if last else "momentum")
    raises(CommunicatorError, "optimizer Adam", lambda: run.steps(1))
    run = Run(comm).steps(1)
    run.optimizer.lr = 0.2 if last else 0.1
    raises(CommunicatorError, "lr 0.2", lambda: run.steps(1))


def check_one_rank_with_a_wrong_iterator(comm):
    random.set_seed(0)
    net = Net()
    optimizer = optimizer_for(net)
    last = comm.rank == comm.size - 1
    plain = SerialIterator(images(), 16, rank=comm.rank, size=comm.size)
    iterator = plain if last else iterator_for(comm, images())
    words = "expected an iterator with virtual workers, got SerialIterator without"
    raises(ValueError, words, lambda: VirtualUpdater(iterator, optimizer, comm))


OVERFLOWS_ARE_MEANT = "ignore:NaN or infinity in the gradient:RuntimeWarning"
CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
