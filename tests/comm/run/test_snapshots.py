"""Tests of dbrdist.comm.run.snapshots."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import datasets, optimizers, training
from dbrdist import links as L
from dbrdist.comm import create_multi_node_optimizer, run_threads
from dbrdist.comm.gradients.compression import PowerSGD, TopK
from dbrdist.comm.run import snapshots
from dbrdist.comm.run.extensions import StepAgreement
from dbrdist.comm.run.snapshots import AverageStatistics, LocalState, SharedSnapshot
from dbrdist.comm.steps import step_state
from dbrdist.core.array import random
from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.core.model.chain import Sequential
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.training import extensions, triggers
from dbrdist.training.extensions import snapshots as snapshot_files
from tests.each import each
from tests.warm import ROOT


@each(states=[[], [1.0], [1.0, 3.0]])
def test_a_snapshot_has_the_means_of_statistics_and_the_rank_keeps_its_own(states):
    model = L.BatchNormalization(2)
    model.avg_mean[...] = 9
    model.N = 4
    local = snapshots.LocalState(SimpleNamespace(rank=0, size=2), Sequential(model), SimpleNamespace(skipped=[]))
    local._gathered = [
        {"0/avg_mean": np.full(2, v), "0/avg_var": np.full(2, 2 * v), "0/N": np.array(7)} for v in states
    ]
    with pytest.raises(ValueError, match="on purpose"), local.averaged():
        inside = model.avg_mean.tolist(), model.avg_var.tolist(), model.N
        raise ValueError("on purpose")
    assert inside == (([2, 2], [4, 4], 4) if len(states) == 2 else ([9, 9], [1, 1], 4))
    assert model.avg_mean.tolist() == [9, 9] and model.avg_var.tolist() == [1, 1]


@each(module=[step_state, snapshots])
def test_arrays_of_a_device_are_copied_and_numbers_are_not(monkeypatch, module):
    asked = []
    monkeypatch.setattr(module, "to_cpu", lambda x: asked.append(x) or x)
    x = np.ones(2)
    assert module._on_host(x) is x and module._on_host(3) == 3 and [a is x for a in asked] == [True]


def network(rank=0):
    """Statistics that follow from the rank."""
    model = Sequential(L.BatchNormalization(3), L.BatchNormalization(2))
    for i, bn in enumerate(model):
        bn.avg_mean[...] = 10.0 * i + rank
        bn.avg_var[...] = 1 + 10.0 * i + rank**2
        bn.N = 5
    return model


def statistics(model):
    return [np.array(a) for bn in model for a in (bn.avg_mean, bn.avg_var)]


def means_of(num_ranks):
    return [np.mean(values, 0) for values in zip(*(statistics(network(r)) for r in range(num_ranks)))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_an_evaluation_sees_the_means_of_all_ranks(num_ranks):
    def body(comm):
        model = network(comm.rank)
        AverageStatistics(comm, model)(None)
        assert [bn.N for bn in model] == [5, 5]
        return statistics(model)

    for seen in run_threads(num_ranks, body, timeout_seconds=60):
        for a, b in zip(seen, means_of(num_ranks), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def saved_by(num_ranks):
    """What rank 0 writes into a snapshot; each rank has left out as many examples as its number."""

    def body(comm):
        local = LocalState(
            comm, network(comm.rank), SimpleNamespace(skipped=[f"{comm.rank}: {i}" for i in range(comm.rank)])
        )
        local.gather()
        serializer = DictionarySerializer()
        local.serialize(serializer)
        return serializer.target

    return run_threads(num_ranks, body, timeout_seconds=60)[0]


@pytest.mark.parametrize("before, now", [(1, 1), (3, 3), (2, 1), (4, 2), (1, 3), (2, 3), (3, 2)])
def test_a_resume_gives_each_rank_its_own_or_the_mean(before, now):
    entries = saved_by(before)

    def body(comm):
        model = network(100 + comm.rank)
        local = LocalState(comm, model, SimpleNamespace(skipped=[]))
        local.serialize(NpzDeserializer(entries))
        return statistics(model), len(local.skipped)

    results = run_threads(now, body, timeout_seconds=60)
    for rank, (seen, _) in enumerate(results):
        expected = statistics(network(rank)) if before == now else means_of(before)
        for a, b in zip(seen, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    assert sum(skipped for _, skipped in results) == sum(range(before))


def test_a_snapshot_of_an_earlier_version_has_the_values_of_each_rank_apart():
    """As b1df9a7 wrote them."""
    entries = {"size": np.array(2), "constants": np.array("{}")}
    for rank in range(2):
        entries[f"rank{rank}/skipped"] = np.array(f'["{rank}"]')
        for i, bn in enumerate(network(rank)):
            values = {"avg_mean": bn.avg_mean, "avg_var": bn.avg_var, "N": np.array(5)}
            entries |= {f"rank{rank}/{i}/{name}": np.array(value) for name, value in values.items()}

    def body(comm):
        model = network(100 + comm.rank)
        local = LocalState(comm, model, SimpleNamespace(skipped=[]))
        local.serialize(NpzDeserializer(entries))
        return statistics(model), local.skipped

    for now in (2, 3):
        for rank, (seen, skipped) in enumerate(run_threads(now, body, timeout_seconds=60)):
            expected = statistics(network(rank)) if now == 2 else means_of(2)
            for a, b in zip(seen, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)
            assert skipped == ([str(rank)] if now == 2 else ["0", "1"] if rank == 0 else [])


def test_ranks_with_virtual_workers_save_the_same_as_one():
    """All have the same values; what each left out is said once, whatever the number of ranks."""

    def saved(num_ranks):
        def body(comm):
            skipped = [f"example {k}" for k in range(6)][6 * comm.rank // comm.size : 6 * (comm.rank + 1) // comm.size]
            local = LocalState(comm, network(0), SimpleNamespace(skipped=skipped, virtual_workers=6))
            local.gather()
            serializer = DictionarySerializer()
            local.serialize(serializer)
            return serializer.target

        return run_threads(num_ranks, body, timeout_seconds=60)[0]

    alone = saved(1)
    for num_ranks in (2, 3):
        found = saved(num_ranks)
        assert found.keys() == alone.keys()
        for key, value in alone.items():
            np.testing.assert_array_equal(found[key], value, key)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_large_statistics_of_many_ranks_are_saved_as_their_means(monkeypatch, num_ranks):
    """One entry for each value whatever the number of ranks, and at most 1.2 times the bytes of the network."""
    monkeypatch.setattr(snapshots, "_MOST_ROWS_BYTES", 4 * 3 * 10 + 3 * 16)  # enough for three ranks
    entries = saved_by(num_ranks)
    rows = {key: value for key, value in entries.items() if key.startswith("rows/")}
    assert len(rows) == 6 and {len(value) for value in rows.values()} == {3 if num_ranks == 3 else 1}
    assert len(entries) == 6 + 4  # and the constants, the data, the size, what was skipped

    def body(comm):
        model = network(100 + comm.rank)
        LocalState(comm, model, SimpleNamespace(skipped=[])).serialize(NpzDeserializer(entries))
        return statistics(model)

    for rank, seen in enumerate(run_threads(num_ranks, body, timeout_seconds=60)):
        for a, b in zip(seen, statistics(network(rank)) if num_ranks == 3 else means_of(num_ranks), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.slow
def test_rank_0_alone_reads_a_snapshot(tmp_path, monkeypatch):
    """All ranks of a large job would read the same file at the same time."""
    train_on(2, tmp_path, 1)
    read, readers = snapshot_files.read_npz, []
    monkeypatch.setattr(snapshot_files, "read_npz", lambda path: readers.append(path) or read(path))
    straight = run_threads(2, lambda comm: train(comm, tmp_path / f"{comm.rank}", 2), timeout_seconds=120)
    resumed = train_on(2, tmp_path, 2, autoload=True)
    assert len(readers) == 1
    for a, b in zip(straight, resumed, strict=True):
        for x, y in zip([*a[0], *a[1]], [*b[0], *b[1]], strict=True):
            np.testing.assert_array_equal(x, y)


@each(rank=[0, 1])
def test_the_rank_that_writes_gets_ready(rank):
    """Its writer reserves memory before the first step, instead of in the middle of the run."""
    ready = []
    shared = SharedSnapshot(
        SimpleNamespace(rank=rank), SimpleNamespace(initialize=ready.append, may_come_later=False), None
    )
    shared.initialize("trainer")
    assert ready == ["trainer"] * (rank == 0)


def test_a_snapshot_between_averages_of_parameters_has_the_network_that_the_ranks_evaluate(tmp_path):
    """Each rank's own parameters, and averages of them, lead to another network; a resume goes on with its own."""

    def body(comm):
        random.set_seed(0)
        model = L.Classifier(L.Linear(3, 2))
        optimizer = create_multi_node_optimizer(optimizers.SGD(0.5), comm, local_steps=4).setup(model)
        data = [(np.full(3, k % 5, np.float32), np.int32(k % 2)) for k in range(40)]
        iterator = SerialIterator(data, 4, rank=comm.rank, size=comm.size, seed=3)
        updater = training.StandardUpdater(iterator, optimizer)
        trainer = training.Trainer(updater, (3, "iteration"), tmp_path)
        average = extensions.WeightAverage(model, 0.5)
        local = LocalState(comm, model, iterator)
        for extension in (average, local):
            trainer.extend(extension)
        trainer.extend(SharedSnapshot(comm, extensions.snapshot(), local), trigger=(3, "iteration"))
        trainer.run()
        return model.predictor.W.array.copy(), average.averages["predictor/W"].copy()

    everyone = run_threads(2, body, timeout_seconds=60)
    saved = dict(np.load(tmp_path / "snapshot_iter_3"))
    for number, key in enumerate(("updater/model:main/predictor/W", "extensions/WeightAverage/weights/predictor/W")):
        values = [each[number] for each in everyone]
        assert not np.allclose(*values)
        np.testing.assert_allclose(saved[key], np.mean(values, 0), rtol=1e-6)
    own = [saved[f"updater/optimizer:main/carried/rank{rank}/value/predictor/W"] for rank in range(2)]
    np.testing.assert_array_equal(own, [each[0] for each in everyone])


def train_on(num_ranks, out, epochs, **options):
    return run_threads(num_ranks, lambda comm: train(comm, out, epochs, **options), timeout_seconds=120)


def train(comm, out, epochs, autoload=False, seen=None, **options):
    """A run on digits with batch normalization, one snapshot per epoch; the trained parameters and statistics."""
    train, _ = datasets.get_digits()
    random.set_seed(0)
    model = L.Classifier(Sequential(L.BatchNormalization(64), L.Linear(64, 10)))
    optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(0.1), comm, **options).setup(model)
    iterator = SerialIterator(train, 200, last="short", rank=comm.rank, size=comm.size, seed=0)
    trainer = training.Trainer(training.StandardUpdater(iterator, optimizer), triggers.EndTrigger(epochs), out)
    agreement = StepAgreement(comm, iterator, shares_time=True)
    local = LocalState(comm, model, iterator)
    trainer.extend(agreement)
    trainer.extend(local)
    trainer.extend(SharedSnapshot(comm, extensions.snapshot(n_retains=1, autoload=autoload), local))
    if seen is not None:
        look = training.make_extension(priority=0)(
            lambda t: seen.append((t.updater.iteration, agreement.elapsed_time(t), dict(t.observation)))
        )
        trainer.extend(look)
    trainer.run()
    return [p.array.copy() for p in model.params()], [
        v.copy() for v in (model.predictor[0].avg_mean, model.predictor[0].avg_var)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_trainer_goes_on_from_a_shared_snapshot(tmp_path, num_ranks):
    def straight(comm):
        return train(comm, str(tmp_path / "straight"), 2)

    def cut(comm):
        train(comm, str(tmp_path / "cut"), 1)
        seen = []
        return *train(comm, str(tmp_path / "cut"), 2, autoload=True, seen=seen), seen

    whole, parts = run_threads(num_ranks, straight, timeout_seconds=60), run_threads(num_ranks, cut, timeout_seconds=60)
    for (params, statistics), (others, their_statistics, seen) in zip(whole, parts, strict=True):
        assert seen[0][0] == 9  # 1,442 examples in batches of 200: eight steps an epoch
        for a, b in zip([*params, *statistics], [*others, *their_statistics], strict=True):
            np.testing.assert_array_equal(a, b)
    if num_ranks > 1:  # each rank goes on with statistics of its own
        assert not np.array_equal(parts[0][1][0], parts[1][1][0])
    assert all(seen == parts[0][2] for _, _, seen in parts)  # the same time and the same loss on all ranks
    assert all(seconds > 0 and list(observed) == ["main/loss", "main/accuracy"] for _, seconds, observed in seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"compression": TopK(0.05)},
        lambda: {"compression": PowerSGD(1), "accumulate": 3},
        lambda: {"local_steps": 3},
        lambda: {"double_buffering": True},
        lambda: {"zero": 2, "accumulate": 3},
    ],
)
def test_a_trainer_goes_on_within_a_round(tmp_path, options):
    """After eight steps, two batches are added up, and ranks are two steps into their round."""

    def straight(comm):
        return train(comm, str(tmp_path / "straight"), 2, **options())

    def cut(comm):
        train(comm, str(tmp_path / "cut"), 1, **options())
        return train(comm, str(tmp_path / "cut"), 2, autoload=True, **options())

    whole, parts = run_threads(3, straight, timeout_seconds=60), run_threads(3, cut, timeout_seconds=60)
    for mine, theirs in zip(whole, parts, strict=True):
        for a, b in zip([*mine[0], *mine[1]], [*theirs[0], *theirs[1]], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.programs
def test_the_example_stops_on_request_and_goes_on(tmp_path):
    program = [sys.executable, str(ROOT / "examples" / "library" / "train.py"), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*program, "--epochs", "100000"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for _ in range(4):  # the communicator, the headings, two epochs
            process.stdout.readline()
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "all ranks stopped after step" in out
    found = snapshot_files.newest(str(tmp_path / "out"))
    step = int(found.rpartition("_")[2])
    epochs = step // 23 + 2
    words = [*program, "--resume", "--epochs", str(epochs)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    table = [line.split()[0] for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert table == [str(epoch) for epoch in range(step // 23 + 1, epochs + 1)]


def test_a_rank_may_make_another_average_for_itself():
    def part(comm):
        def average(model):
            return AverageStatistics(comm, model)

        if comm.rank == 0:
            average(L.BatchNormalization(2))
        model = L.BatchNormalization(2)
        model.avg_mean[...] = comm.rank
        average(model)(None)
        return model.avg_mean.tolist()

    assert run_threads(2, part, timeout_seconds=60) == [[0.5, 0.5]] * 2
