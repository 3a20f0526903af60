"""ChainerMN's iterators, extensions and checkpoints, as functions of a communicator; see contract.py.

What ranks read, observe and save depends on the rank.
"""

from __future__ import annotations

import contextlib
import operator
import os
import shutil
import tempfile

import numpy as np

from dbrdist import links as L
from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer, scatter_dataset
from dbrdist.comm.data.iterators import create_multi_node_iterator, create_synchronized_iterator
from dbrdist.comm.run.extensions import (
    AllreducePersistent,
    GenericMultiNodeEvaluator,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    create_multi_node_checkpointer,
    multi_node_snapshot,
)
from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.core.model.chain import Chain, Sequential
from dbrdist.core.model.reporter import Reporter, report
from dbrdist.datasets.loading.order import OrderSampler
from dbrdist.errors import CheckpointError, CommunicatorError
from dbrdist.iterators import MultithreadIterator, SerialIterator
from dbrdist.links import Classifier
from dbrdist.training import StandardUpdater, Trainer, extensions
from dbrdist.training.triggers import IntervalTrigger
from tests.comm.contract import array_of, raises, same

# ---- iterators ----


def check_every_rank_gets_the_batches_of_one(comm):
    for master in range(comm.size):
        own = SerialIterator([100 * comm.rank + i for i in range(7)], 3, seed=comm.rank)
        twin = SerialIterator([100 * master + i for i in range(7)], 3, seed=master)
        shared = create_multi_node_iterator(own if comm.rank == master else None, comm, master)
        assert (shared.epoch, shared.batch_size, shared.is_new_epoch) == (0, 3, False)
        for _ in range(8):
            assert list(next(shared)) == list(twin.next())
            for name in ("epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch", "current_position"):
                assert getattr(shared, name) == getattr(twin, name), name
        shared.reset()
        twin.reset()
        assert list(shared.next()) == list(twin.next())
        shared.finalize()


def check_one_pass_ends_on_all_ranks(comm):
    last = comm.size - 1
    own = SerialIterator(np.arange(5), 2, False, False) if comm.rank == last else None
    shared = create_multi_node_iterator(own, comm, last)
    assert [list(batch) for batch in shared] == [[0, 1], [2, 3], [4]]
    assert list(shared) == []


def check_batches_of_arrays(comm):
    data = [(array_of(comm.rank, (2, 3)), np.int32(i), {"text": "ä"}) for i in range(4)]
    (batch,) = create_multi_node_iterator(SerialIterator(data, 4, False, False), comm)
    for i, (x, t, named) in enumerate(batch):
        same(x, array_of(0, (2, 3)))
        assert (t, named) == (i, {"text": "ä"})


class Broken:
    """A dataset of which one example cannot be read."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        if i == 1:
            raise OSError("broken on purpose")
        return i


def check_an_error_of_the_master_is_raised_on_all(comm):
    last = comm.size - 1
    dataset = Broken() if comm.rank == last else range(3)
    shared = create_multi_node_iterator(SerialIterator(dataset, 1, False, False), comm, last)
    assert list(next(shared)) == [0]
    raises(OSError, "broken on purpose", lambda: next(shared))
    raises(TypeError, "expected an iterator on rank 0, got int", lambda: create_multi_node_iterator(3, comm))


def check_a_multi_node_iterator_resumes(comm):
    """From the file that this rank wrote, and from that of the master."""

    def new():
        return create_multi_node_iterator(SerialIterator([10 * comm.rank + i for i in range(7)], 3, seed=3), comm)

    straight = new()
    batches = [list(next(straight)) for _ in range(7)]
    first = new()
    for _ in range(3):
        next(first)
    own = DictionarySerializer()
    first.serialize(own)
    masters = comm.bcast_obj(own.target)
    for saved in (own.target, masters):
        resumed = new()
        resumed.serialize(NpzDeserializer(saved))
        assert (resumed.epoch, resumed.epoch_detail) == (first.epoch, first.epoch_detail)
        assert [list(next(resumed)) for _ in range(4)] == batches[3:]


def check_synchronized_iterators_have_one_order(comm):
    for kind in (SerialIterator, MultithreadIterator):
        own = kind([(comm.rank, i) for i in range(9)], 4, seed=comm.rank)
        expected = SerialIterator([(comm.rank, i) for i in range(9)], 4, seed=0)
        next(own)
        shared = create_synchronized_iterator(own, comm)
        assert shared.seed == 0
        for _ in range(6):
            batch = next(shared)
            assert list(batch) == list(next(expected))
            indices = [i for _, i in batch]
            assert comm.allgather_obj(indices) == [indices] * comm.size
        shared.finalize()


class Backwards(OrderSampler):
    """A sampler of the caller's own, without a pure ``order``."""

    def __call__(self, order, position):
        return order[::-1]


def check_other_orders_are_synchronized(comm):
    plain = create_synchronized_iterator(SerialIterator(range(5), 2, shuffle=False), comm)
    assert list(next(plain)) == [0, 1]
    shared = create_synchronized_iterator(SerialIterator(range(5), 5, order_sampler=Backwards()), comm)
    batch = list(next(shared))
    assert sorted(batch) == list(range(5))
    assert comm.allgather_obj(batch) == [batch] * comm.size
    saved = DictionarySerializer()
    shared.serialize(saved)
    again = create_synchronized_iterator(SerialIterator(range(5), 5, order_sampler=Backwards()), comm)
    again.serialize(NpzDeserializer(saved.target))
    assert list(next(again)) == list(next(shared))


def check_iterators_that_do_not_fit_raise_on_all(comm):
    if comm.size > 1:
        long = SerialIterator(range(5 + (comm.rank == 1)), 2)
        raises(CommunicatorError, "6 examples", lambda: create_synchronized_iterator(long, comm))
        some = SerialIterator(range(5), 2, shuffle=comm.rank == 0)
        raises(CommunicatorError, "index order", lambda: create_synchronized_iterator(some, comm))
    bad = iter([1]) if comm.rank == comm.size - 1 else SerialIterator(range(5), 2)
    raises(TypeError, "with an order_sampler", lambda: create_synchronized_iterator(bad, comm))


# ---- evaluation ----


class Words(GenericMultiNodeEvaluator):
    """Texts, which have no mean."""

    def calc_local(self, *xs):
        return " ".join(str(int(x)) for x in xs[0])

    def aggregate(self, results):
        report({"count": len(results)}, self.get_target("main"))
        return results


def check_generic_evaluation(comm):
    for n in (1, 5, 8):
        for root in range(comm.size):
            shard = scatter_dataset(np.arange(n), comm)
            evaluator = Words(comm, SerialIterator(shard, 2, False, False), Chain(), root=root)
            evaluator.name = "validation"  # as a trainer does
            for _ in range(2):
                with Reporter() as reporter:
                    result = evaluator()
                if comm.rank != root:
                    assert result is None and reporter.observation == {}
                    continue
                assert sorted(int(w) for words in result for w in words.split()) == list(range(n))
                assert reporter.observation == {"validation/main/count": len(result)}


class Twice(Chain):
    """Gives a Variable."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(1, 1, initialW=2.0, nobias=True)

    def forward(self, x):
        return self.linear(x)


def check_generic_evaluation_in_order_of_batches(comm):
    """By default results are those of the target: the first batches of all ranks, then the second, as far as any."""
    values = np.arange(comm.rank + 1, dtype=np.float32)[:, None] + 10 * comm.rank
    seen = []
    evaluator = GenericMultiNodeEvaluator(
        comm, SerialIterator(values, 1, False, False), Twice(), progress_hook=lambda batch: seen.append(len(batch))
    )
    result = evaluator()
    assert seen == [1] * (comm.rank + 1)
    if comm.rank == 0:
        expected = [2.0 * (10 * r + b) for b in range(comm.size) for r in range(comm.size) if b <= r]
        assert [type(x) for x in result] == [np.ndarray] * len(expected)
        assert [float(x[0, 0]) for x in result] == expected


def check_a_generic_evaluation_that_fails_raises_on_all(comm):
    class Fails(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return None if comm.rank == comm.size - 1 else 1

        def aggregate(self, results):
            raise KeyError("of the root")

    raises(TypeError, "got None", lambda: Fails(comm, SerialIterator([1.0], 1, False, False), Chain())())
    Fails.calc_local = lambda self, x: 1
    raises(KeyError, "of the root", lambda: Fails(comm, SerialIterator([1.0], 1, False, False), Chain())())
    raises(ValueError, "expected a rank", lambda: Fails(comm, None, Chain(), root=comm.size))


# ---- observations ----


class FakeUpdater:
    """Counts."""

    def __init__(self):
        self.iteration = 0
        self.epoch = 0
        self.previous_epoch_detail = 0.0

    @property
    def epoch_detail(self):
        return self.iteration / 4


class FakeTrainer:
    """What triggers and aggregators need."""

    def __init__(self, out="result"):
        self.updater = FakeUpdater()
        self.observation = {}
        self.out = out

    def step(self, **observation):
        self.updater.previous_epoch_detail = self.updater.epoch_detail
        self.updater.iteration += 1
        self.updater.epoch = int(self.updater.epoch_detail)
        self.observation = {key.replace("_", "/"): value for key, value in observation.items()}


def check_observation_aggregator(comm):
    trainer, mean = FakeTrainer(), (comm.size - 1) / 2
    each, every_third = ObservationAggregator(comm, "loss"), ObservationAggregator(
        comm, "loss", "largest", comm_trigger=(3, "iteration"), aggregator=lambda xs: max(map(max, xs))
    )  # fmt: skip
    for step in range(1, 8):
        trainer.step(loss=np.float32(comm.rank + step))
        every_third(trainer)
        each(trainer)
        assert trainer.observation["loss"] == mean + step
        assert trainer.observation.get("largest") == (comm.size - 1 + step if step % 3 == 0 else None)


def check_an_aggregator_with_values_on_some_ranks(comm):
    trainer, last = FakeTrainer(), comm.size - 1
    one = ObservationAggregator(comm, "loss", "all")
    trainer.step(**({"loss": 3.0} if comm.rank == last else {}))
    one(trainer)
    assert trainer.observation["all"] == 3.0
    trainer.step()
    one(trainer)
    assert "all" not in trainer.observation
    broken = ObservationAggregator(comm, "loss", aggregator=lambda xs: 1 / 0)
    trainer.step(loss=1.0)
    raises(ZeroDivisionError, "division", lambda: broken(trainer))
    trainer.step(loss="high" if comm.rank == last else 1.0)
    raises(TypeError, f"a number as 'loss', got another value on rank {last}", lambda: one(trainer))
    trainer.step(loss=2.0)
    one(trainer)
    assert trainer.observation["all"] == 2.0


def check_early_stopping(comm):
    """One rank alone sees no improvement, but the mean over ranks improves; then it does not."""
    for trigger in ((2, "iteration"), IntervalTrigger(2, "iteration")):
        stop = MultiNodeEarlyStoppingTrigger(comm, check_trigger=trigger, patience=2, max_trigger=(100, "iteration"))
        trainer, stopped = FakeTrainer(), []
        assert not stop(trainer)
        for step in range(12):
            loss = 10.0 - min(step, 5) + (comm.rank - (comm.size - 1) / 2) * 2 * step
            trainer.step(main_loss=loss)
            stopped.append(stop(trainer))
        assert comm.allgather_obj(stopped) == [stopped] * comm.size
        assert True in stopped and not any(stopped[:5])
    assert stop.get_training_length() == (100, "iteration")


def check_early_stopping_resumes(comm):
    def losses(trainer, stop, steps):
        fired = []
        for step in steps:
            trainer.step(main_loss=float(comm.rank + max(8 - step, 3)))
            fired.append(stop(trainer))
        return fired

    def new():
        return MultiNodeEarlyStoppingTrigger(comm, check_trigger=(3, "iteration"), patience=2)

    trainer, stop = FakeTrainer(), new()
    straight = losses(trainer, stop, range(20))
    trainer, stop = FakeTrainer(), new()
    first = losses(trainer, stop, range(10))
    saved = DictionarySerializer()
    stop.serialize(saved)
    again = new()
    again.serialize(NpzDeserializer(saved.target))
    assert first + losses(trainer, again, range(10, 20)) == straight
    assert True in straight


def check_allreduce_persistent(comm):
    model = Sequential(L.BatchNormalization(3))
    model[0].avg_mean[...] = np.arange(3) + comm.rank
    model[0].N = 7
    extension = AllreducePersistent(model, comm)
    assert extension.trigger == (1, "epoch")
    extension(None)
    same(model[0].avg_mean, (np.arange(3) + (comm.size - 1) / 2).astype(np.float32))


# ---- checkpoints ----


@contextlib.contextmanager
def folder_of_all(comm):
    """A folder that all ranks see."""
    path = comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None)
    try:
        yield path
        comm.barrier()
    finally:
        if comm.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def trainer_of(comm, out, num_steps, *, together=True, size=3):
    """A trainer with rank-dependent data, which without ``together`` trains a model of its own on each rank."""
    model = Classifier(L.Linear(4, size, initialW=np.full((size, 4), 0.1 * (comm.rank + 1), np.float32)))
    rng = np.random.default_rng(comm.rank)
    data = [(x, np.int32(t)) for x, t in zip(rng.normal(size=(10, 4)).astype(np.float32), rng.integers(0, 3, 10))]
    optimizer = optimizers.MomentumSGD(0.1)
    if together:
        optimizer = create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    updater = StandardUpdater(SerialIterator(data, 3, seed=comm.rank), optimizer)
    return Trainer(updater, (num_steps, "iteration"), out), model, optimizer


def weights(model):
    return np.concatenate([p.array.ravel() for p in model.params()])


def check_checkpoints_go_on_exactly(comm):
    for together in (True, False):
        with folder_of_all(comm) as out:
            straight, expected, _ = trainer_of(comm, out, 12, together=together)
            straight.run()
            first, _, _ = trainer_of(comm, out, 7, together=together)
            saver = create_multi_node_checkpointer("a.run", comm, 2, 2, out)
            first.extend(saver, trigger=(2, "iteration"))
            first.run()
            comm.barrier()
            resumed, model, optimizer = trainer_of(comm, out, 12, together=together)
            loader = create_multi_node_checkpointer("a.run", comm, path=out)
            assert loader.maybe_load(resumed, optimizer) is True
            assert resumed.updater.iteration == 6
            resumed.run()
            np.testing.assert_array_equal(weights(model), weights(expected))


def check_models_that_differ_stay_different(comm):
    """The first update after a load does not broadcast where the optimizer is named."""
    with folder_of_all(comm) as out:
        first, model, _ = trainer_of(comm, out, 1, together=False)
        first.extend(create_multi_node_checkpointer("n", comm, path=out), trigger=(1, "iteration"))
        first.run()
        comm.barrier()
        resumed, again, optimizer = trainer_of(comm, out, 2)
        assert create_multi_node_checkpointer("n", comm, path=out).maybe_load(resumed, optimizer)
        optimizer.hyperparam.lr = optimizer.hyperparam.momentum = 0.0
        resumed.run()
        np.testing.assert_array_equal(weights(again), weights(model))


def check_generations(comm):
    with folder_of_all(comm) as out:
        saver = create_multi_node_checkpointer("name", comm, cp_interval=3, gc_interval=2)
        trainer, _, _ = trainer_of(comm, out, 9)
        trainer.extend(saver, trigger=(1, "iteration"))
        trainer.run()
        comm.barrier()
        found = sorted(
            int(n.rpartition("_")[2]) for n in os.listdir(out) if n.startswith(f"snapshot_name_{comm.rank}_")
        )
        assert found == [6, 7, 8, 9], found  # removed after every second call, the last one the eighth
        comm.barrier()


def check_a_generation_that_one_rank_lacks_is_passed_over(comm):
    with folder_of_all(comm) as out:
        trainer, _, _ = trainer_of(comm, out, 5)
        trainer.extend(create_multi_node_checkpointer("n", comm, path=out), trigger=(1, "iteration"))
        trainer.run()
        comm.barrier()
        if comm.rank == comm.size - 1:
            os.remove(f"{out}/snapshot_n_{comm.rank}_5")
            with open(f"{out}/snapshot_n_{comm.rank}_4", "r+b") as file:
                file.seek(200)
                file.write(b"damage")
        comm.barrier()
        resumed, _, _ = trainer_of(comm, out, 9)
        assert create_multi_node_checkpointer("n", comm, path=out).maybe_load(resumed)  # and rank 0 warns
        assert resumed.updater.iteration == 3


def check_a_folder_that_one_rank_cannot_handle(comm):
    """Nobody waits for the rank whose folder cannot be listed, or whose old files cannot be removed."""
    with folder_of_all(comm) as out:
        trainer, _, _ = trainer_of(comm, out, 1)
        saver = create_multi_node_checkpointer("n", comm, 1, 1, out)
        trainer.run()
        if comm.rank == comm.size - 1:
            os.mkdir(f"{out}/snapshot_n_{comm.rank}_0")  # in the place of an older generation
            os.close(os.open(f"{out}/snapshot_n_{comm.rank}_²", os.O_CREAT))
        raises(OSError, f"snapshot_n_{comm.size - 1}_0", lambda: saver.save(trainer))
        assert saver.maybe_load(trainer) and trainer.updater.iteration == 1
        if comm.rank == comm.size - 1:
            saver._path = f"{out}/snapshot_n_{comm.rank}_1/none"
            saver._iterations = os.listdir
        raises(OSError, "none", lambda: saver.maybe_load(trainer))


def check_nothing_to_load(comm):
    with folder_of_all(comm) as out:
        trainer, _, _ = trainer_of(comm, out, 3)
        assert create_multi_node_checkpointer("n", comm, path=f"{out}/none").maybe_load(trainer) is False
        other, _, _ = trainer_of(comm, out, 1)
        other.extend(create_multi_node_checkpointer("n", comm, path=out), trigger=(1, "iteration"))
        other.run()
        comm.barrier()
        assert create_multi_node_checkpointer("another", comm, path=out).maybe_load(trainer) is False
        wide, _, _ = trainer_of(comm, out, 3, size=5)
        loader = create_multi_node_checkpointer("n", comm, path=out)
        raises(CheckpointError, "shape", lambda: loader.maybe_load(wide))
        comm.barrier()


def check_checkpoints_of_another_number_of_ranks(comm):
    if comm.size == 1:
        return
    with folder_of_all(comm) as out:
        trainer, _, _ = trainer_of(comm, out, 1)
        trainer.extend(create_multi_node_checkpointer("n", comm, path=out), trigger=(1, "iteration"))
        trainer.run()
        comm.barrier()
        part = comm.split(int(comm.rank == comm.size - 1), comm.rank)
        if comm.rank < comm.size - 1:
            fewer, _, _ = trainer_of(part, out, 3)
            loader = create_multi_node_checkpointer("n", part, path=out)
            raises(CheckpointError, f"got one of {comm.size}", lambda: loader.maybe_load(fewer))
        comm.barrier()
        part.finalize()


def check_a_checkpoint_that_one_rank_cannot_write_raises_on_all(comm):
    with folder_of_all(comm) as out:
        place = out
        if comm.rank == comm.size - 1:
            place = f"{out}/file"
            with open(place, "w") as file:
                file.write("in the way")
        trainer, _, _ = trainer_of(comm, out, 1)
        saver = create_multi_node_checkpointer("n", comm, path=place)
        raises(OSError, "", lambda: saver.save(trainer))
        raises(ValueError, "cp_interval expected 1 or more", lambda: create_multi_node_checkpointer("n", comm, 0))
        raises(ValueError, "without '/'", lambda: create_multi_node_checkpointer("a/b", comm))
        raises(TypeError, "whole number", lambda: create_multi_node_checkpointer("n", comm, 1, 2.5))
        comm.barrier()


def check_snapshots_of_replicas(comm):
    """The writers' files, whose content all replicas load."""
    size = comm.size
    for sets, writers in [
        ([range(size)], {0}),
        ([], set(range(size))),
        ([size - 1], set(range(size))),
        ([{size - 1, 0}], {0, *range(1, size - 1)}),
    ]:
        with folder_of_all(comm) as out:
            first, model, _ = trainer_of(comm, out, 4, together=False)
            snapshot = extensions.snapshot(n_retains=2)
            first.extend(multi_node_snapshot(comm, snapshot, sets), trigger=(1, "iteration"))
            first.run()
            comm.barrier()
            names = {f"snapshot_iter_{i}.{rank}" for i in (3, 4) for rank in writers}
            assert {name for name in os.listdir(out) if name.startswith("snapshot")} == names
            resumed, again, _ = trainer_of(comm, out, 4, together=False)
            auto = extensions.snapshot(n_retains=2, autoload=True)
            resumed.extend(multi_node_snapshot(comm, auto, sets), trigger=(1, "iteration"))
            resumed.run()
            everyone = comm.allgather_obj(weights(model))
            own_set = next(
                (sorted(s) for s in [[s] if isinstance(s, int) else list(s) for s in sets] if comm.rank in s),
                [comm.rank],
            )
            np.testing.assert_array_equal(weights(again), everyone[own_set[0]])
            assert resumed.updater.iteration == 4


def check_replicas_go_on_from_what_all_writers_have(comm):
    with folder_of_all(comm) as out:
        first, _, _ = trainer_of(comm, out, 4, together=False)
        first.extend(multi_node_snapshot(comm, extensions.snapshot(), []), trigger=(1, "iteration"))
        first.run()
        comm.barrier()
        if comm.rank == comm.size - 1:
            os.remove(f"{out}/snapshot_iter_4.{comm.rank}")
        comm.barrier()
        resumed, _, _ = trainer_of(comm, out, 3, together=False)
        resumed.extend(multi_node_snapshot(comm, extensions.snapshot(autoload=True), []), trigger=(9, "iteration"))
        resumed.run()
        assert resumed.updater.iteration == 3
        fresh, _, _ = trainer_of(comm, f"{out}/new", 1, together=False)
        fresh.extend(multi_node_snapshot(comm, extensions.snapshot(autoload=True), []), trigger=(9, "iteration"))
        fresh.run()
        assert fresh.updater.iteration == 1


def check_bad_replica_sets_raise_on_all(comm):
    snapshot = extensions.snapshot()
    raises(ValueError, "got rank 0 twice", lambda: multi_node_snapshot(comm, snapshot, [[0], 0]))
    raises(ValueError, "expected a rank from 0", lambda: multi_node_snapshot(comm, snapshot, [[comm.size]]))
    raises(TypeError, "whole number", lambda: multi_node_snapshot(comm, snapshot, [[0.5]]))


DAMAGE_IS_MEANT = "ignore:.* damaged on ranks"
CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
