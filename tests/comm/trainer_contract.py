"""Trainers whose ranks do not have the same data, position or extensions, as functions of a communicator."""

from __future__ import annotations

import operator
import shutil
import tempfile

import numpy as np

from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.comm.run.extensions import StepAgreement
from dbrdist.datasets import TupleDataset
from dbrdist.errors import CommunicatorError
from dbrdist.iterators import MultithreadIterator, SerialIterator
from dbrdist.training import StandardUpdater, Trainer, extensions
from tests.comm.contract import raises
from tests.comm.disagreement_contract import all_raise, several
from tests.comm.training_contract import Net

NUM_EXAMPLES = 40


def data_of(n=NUM_EXAMPLES):
    rng = np.random.default_rng(5)
    return TupleDataset(rng.normal(size=(n, 5)), rng.normal(size=(n, 3)))


def iterator_of(comm, n=NUM_EXAMPLES, batch=8, kind=SerialIterator, **options):
    return kind(data_of(n), batch, **({"rank": comm.rank, "size": comm.size, "seed": 1} | options))


_folder = tempfile.TemporaryDirectory(prefix="dbrdist-trainers-")  # the Trainer makes its folder, and writes nothing


def trainer_of(comm, iterator, num_steps=4, out=_folder.name, agrees=True):
    model = Net()
    updater = StandardUpdater(iterator, create_multi_node_optimizer(optimizers.SGD(0.01), comm).setup(model))
    trainer = Trainer(updater, (num_steps, "iteration"), out)
    if agrees:
        trainer.extend(StepAgreement(comm, iterator))
    return trainer


def run(trainer):
    trainer.run(show_loop_exception_msg=False)


@several
def check_iterators_over_different_batches(comm):
    odd = comm.rank == comm.size - 1
    for mine, text in [
        ({"n": NUM_EXAMPLES + 100}, f"{NUM_EXAMPLES + 100} training examples instead of {NUM_EXAMPLES} training"),
        ({"batch": 12}, "batch 12 instead of batch 8"),
        ({"seed": 2}, "with seed 2 instead of shuffled by ShuffleOrderSampler with seed 1"),
        ({"shuffle": False}, "index order instead of shuffled"),
        ({"last": "short"}, "last='short' instead of last='wrap'"),
        ({"n": 41, "kind": MultithreadIterator}, f"41 training examples instead of {NUM_EXAMPLES} training examples"),
        ({"rank": None, "size": None}, "training examples of its own instead of"),
    ]:
        iterator = iterator_of(comm, **(mine if odd else {}))
        all_raise(comm, CommunicatorError, text, lambda iterator=iterator: run(trainer_of(comm, iterator)))
        iterator.finalize()


@several
def check_a_share_that_two_ranks_take(comm):
    iterator = iterator_of(comm, rank=0)
    everyone = ", ".join(map(str, range(comm.size)))
    text = f"a share of their own, got rank=0 on ranks {everyone}; make them with rank=comm.rank"
    raises(CommunicatorError, text, lambda: run(trainer_of(comm, iterator)))
    run(trainer_of(comm, iterator_of(comm, rank=comm.size - 1 - comm.rank)))  # as good as any other


@several
def check_data_of_its_own_on_each_rank(comm):
    """As after scatter_dataset, or where each host reads its own files."""
    iterator = iterator_of(comm, n=10 + comm.rank, batch=3 + comm.rank, rank=None, size=None, seed=comm.rank)
    trainer = trainer_of(comm, iterator)
    run(trainer)
    assert trainer.updater.iteration == 4


@several
def check_a_snapshot_that_one_rank_alone_loads(comm):
    """Where a program has ``snapshot(autoload=True)`` under ``if comm.rank == 0``."""
    for agrees in (True, False):
        out = tempfile.mkdtemp()
        try:
            for num_steps in (3, 6):
                trainer = trainer_of(comm, iterator_of(comm), num_steps, out, agrees)
                if comm.rank == 0:
                    trainer.extend(extensions.snapshot(autoload=True), trigger=(3, "iteration"))
                if num_steps == 3:
                    run(trainer)
                else:
                    all_raise(comm, CommunicatorError, " instead of ", lambda trainer=trainer: run(trainer))
                    assert trainer.updater.iteration == (3 if comm.rank == 0 else 0)
        finally:
            shutil.rmtree(out)


@several
def check_a_trigger_that_fires_on_one_rank_alone(comm):
    """As one of seconds does, by each rank's own clock."""
    trainer = trainer_of(comm, iterator_of(comm))
    fires = lambda trainer: comm.rank == 0 and trainer.updater.iteration == 2  # noqa: E731
    trainer.extend(lambda trainer: comm.bcast_obj("the news"), name="spread", trigger=fires)
    all_raise(comm, CommunicatorError, "in different verbs: bcast_obj on rank 0 (at ", lambda: run(trainer))
    assert trainer.updater.iteration in (2, 3)


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
