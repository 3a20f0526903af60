"""What one rank evaluates or saves of networks that differ between ranks, between two averages of local steps."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from dbrdist import comm as dc
from dbrdist import iterators, links, optimizers, serializers, training
from dbrdist.comm.run.snapshots import LocalState, SharedSnapshot
from dbrdist.core.model import apart
from dbrdist.errors import UsageWarning
from dbrdist.training import extensions

EXAMPLES = [(np.arange(3, dtype=np.float32) * k, np.int32(k % 2)) for k in range(8)]


def run(tmp_path, extend, num_steps, num_ranks=2, local_steps=3):
    """Train on ranks with what ``extend`` adds; gives the mistakes that were warned of."""

    def train(comm):
        model = links.Classifier(links.Linear(3, 2))
        optimizer = dc.create_multi_node_optimizer(optimizers.SGD(0.1), comm, local_steps=local_steps).setup(model)
        iterator = iterators.SerialIterator(EXAMPLES[comm.rank :: comm.size], 2)
        updater = training.StandardUpdater(iterator, optimizer)
        trainer = training.Trainer(updater, (num_steps, "iteration"), out=str(tmp_path / "run"))
        extend(comm, trainer, model, iterator)
        trainer.run()
        return optimizer.num_local_steps

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = dc.run_threads(num_ranks, train, timeout_seconds=60)
    return found[0], [str(w.message) for w in given if issubclass(w.category, UsageWarning)]


def evaluator(model):
    return extensions.Evaluator(iterators.SerialIterator(EXAMPLES, 4, repeat=False, shuffle=False), model)


def evaluate_on_rank_0(comm, trainer, model, iterator):
    if comm.rank == 0:
        trainer.extend(evaluator(model), trigger=(1, "iteration"))


def evaluate_a_part_of_the_network(comm, trainer, model, iterator):
    if comm.rank == 0:
        trainer.extend(
            extensions.Evaluator(evaluator(model).get_iterator("main"), links.Classifier(model.predictor)),
            trigger=(1, "iteration"),
        )


def evaluate_together(comm, trainer, model, iterator):
    part = dc.scatter_dataset(EXAMPLES if comm.rank == 0 else None, comm)
    own = extensions.Evaluator(iterators.SerialIterator(part, 4, repeat=False, shuffle=False), model)
    trainer.extend(dc.create_multi_node_evaluator(own, comm), trigger=(1, "iteration"))


def save_on_rank_0(comm, trainer, model, iterator):
    if comm.rank == 0:
        trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))


def save_the_network_on_rank_0(comm, trainer, model, iterator):
    if comm.rank == 0:
        trainer.extend(extensions.snapshot_object(model, "m"), trigger=(1, "iteration"))


def save_on_each_rank_apart(comm, trainer, model, iterator):
    trainer.extend(dc.create_multi_node_checkpointer("own", comm), trigger=(1, "iteration"))


def save_together(comm, trainer, model, iterator):
    local = LocalState(comm, model, iterator)
    trainer.extend(local)
    trainer.extend(SharedSnapshot(comm, extensions.snapshot(), local), trigger=(1, "iteration"))


@pytest.mark.parametrize("extend", [evaluate_on_rank_0, evaluate_a_part_of_the_network])
def test_an_evaluation_of_one_ranks_own_network_is_warned_of_once_with_the_way_out(tmp_path, extend):
    num_local, words = run(tmp_path, extend, num_steps=6)
    assert num_local == 2 and len(words) == 1
    assert "this rank's own network" in words[0] and "create_multi_node_evaluator" in words[0]


@pytest.mark.parametrize("extend", [save_on_rank_0, save_the_network_on_rank_0])
def test_a_snapshot_of_rank_0s_own_network_is_warned_of_once_with_the_way_out(tmp_path, extend):
    num_local, words = run(tmp_path, extend, num_steps=6)
    assert num_local == 2 and len(words) == 1
    assert "rank 0's own network is saved" in words[0] and "SharedSnapshot" in words[0]


@pytest.mark.parametrize("extend", [evaluate_together, save_on_each_rank_apart, save_together])
def test_ranks_that_evaluate_and_save_together_hear_nothing(tmp_path, extend):
    assert run(tmp_path, extend, num_steps=6) == (2, [])


@pytest.mark.parametrize("extend", [evaluate_on_rank_0, save_on_rank_0])
@pytest.mark.parametrize("settings", [{"local_steps": 1}, {"num_ranks": 1}, {"num_steps": 1}])
def test_networks_that_all_ranks_have_are_evaluated_and_saved_by_one(tmp_path, extend, settings):
    assert run(tmp_path, extend, **{"num_steps": 4, **settings})[1] == []


def test_an_evaluation_at_an_average_is_one_of_all_ranks_network(tmp_path):
    def extend(comm, trainer, model, iterator):
        if comm.rank == 0:
            trainer.extend(evaluator(model), trigger=training.triggers.ManualScheduleTrigger([4, 7], "iteration"))

    assert run(tmp_path, extend, num_steps=8)[1] == []


def test_links_are_apart_until_they_are_joined_and_not_within_a_block_of_all():
    one, other = links.Linear(2, 2), links.Linear(2, 2)
    apart.go_apart(one, 3)
    assert apart.owner([other]) is None and apart.owner([other, one]) == 3
    with apart.joined():
        assert apart.owner([one]) is None
    assert apart.owner([links.Classifier(one)]) == 3
    apart.join(one)
    assert apart.owner([one]) is None


def load_the_same(comm, model, folder):
    serializers.load_npz(folder / "saved.npz", model)


def average(comm, model, folder):
    for p in model.params():
        p.array = comm.allreduce(p.array) / comm.size


def bcast_a_part(comm, model, folder):
    comm.bcast_data(model.predictor)


def train_jointly(comm, model, folder):
    optimizer = dc.create_multi_node_optimizer(optimizers.SGD(0.1), comm).setup(model)
    optimizer.update(model, np.ones((2, 3), "f"), np.zeros(2, "i"))


def begin_to_train_apart(comm, model, folder):
    optimizer = dc.create_multi_node_optimizer(optimizers.SGD(0.1), comm, local_steps=3).setup(model)
    optimizer.update(model, np.ones((2, 3), "f"), np.zeros(2, "i"))


@pytest.mark.parametrize("give", [load_the_same, average, bcast_a_part, train_jointly, begin_to_train_apart])
def test_ranks_that_have_been_given_the_same_network_hear_nothing_until_they_part_again(tmp_path, give):
    serializers.save_npz(tmp_path / "saved.npz", links.Classifier(links.Linear(3, 2)))

    def steps(comm, model, count):
        optimizer = dc.create_multi_node_optimizer(optimizers.SGD(0.1), comm, local_steps=3).setup(model)
        for _ in range(count):
            optimizer.update(model, np.full((2, 3), comm.rank + 1, "f"), np.zeros(2, "i"))
        return optimizer.num_local_steps, apart.owner([model])

    def train(comm):
        model = links.Classifier(links.Linear(3, 2))
        assert steps(comm, model, 6) == (2, comm.rank)
        give(comm, model, tmp_path)
        found = apart.owner([model])
        assert steps(comm, model, 4) == (0, None)
        return found, steps(comm, model, 2)

    assert dc.run_threads(2, train, timeout_seconds=60) == [(None, (1, 0)), (None, (1, 1))]


@pytest.mark.parametrize(
    "out, name", [("run/rank{}", "{{.updater.iteration}}"), ("run", "of_{}_{{.updater.iteration}}")]
)
def test_ranks_that_save_a_file_each_hear_nothing(tmp_path, out, name):
    def save_on_each_rank(comm, trainer, model, iterator):
        trainer.out = str(tmp_path / out.format(comm.rank))
        trainer.extend(extensions.snapshot(filename=name.format(comm.rank)), trigger=(1, "iteration"))

    assert run(tmp_path, save_on_each_rank, num_steps=6) == (2, [])
