"""Tests of dbrdist.cli.builders.batch_norm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import dbrdist
from dbrdist import links as L
from dbrdist.cli.builders import batch_norm
from dbrdist.errors import ConfigError
from tests.each import each

ORIGIN = SimpleNamespace(where=lambda path: f"run.yaml:{'.'.join(path)}")


def task_with(*links):
    """As a task has it: a network called predictor."""
    return dbrdist.Chain(predictor=dbrdist.ChainList(*links))


@each(
    **{
        "group, size, rank, split": [
            (1, 4, 0, None), (2, 1, 0, None), (2, 4, 0, (0, 0)), (2, 4, 1, (0, 1)), (2, 4, 3, (1, 3)),
            (4, 4, 3, (0, 3)), (2, 8, 5, (2, 5)),
        ]
    }
)  # fmt: skip
def test_neighbouring_ranks_normalize_together(group, size, rank, split):
    made = []
    config = SimpleNamespace(batch_norm=SimpleNamespace(group=group))
    comm = SimpleNamespace(size=size, rank=rank, split=lambda *words: made.append(words) or "neighbours")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_norm, "create_mnbn_model", lambda network, comm: made.append(comm) or L.Linear(1, 1))
        batch_norm.share(config, ORIGIN, task_with(L.Linear(1, 1), L.BatchNormalization(2)), comm)
        assert made == ([] if split is None else [split, "neighbours"])
        made.clear()
        batch_norm.share(config, ORIGIN, task_with(L.Linear(1, 1)), comm)  # which normalizes nothing
        assert made == []


def test_groups_divide_the_ranks():
    config = SimpleNamespace(batch_norm=SimpleNamespace(group=3))
    with pytest.raises(ConfigError) as caught:
        batch_norm.share(config, ORIGIN, task_with(L.BatchNormalization(2)), SimpleNamespace(size=4, rank=0))
    words = "batch_norm.group: expected a divisor of the number of ranks, 4, got 3"
    assert str(caught.value) == f"run.yaml:batch_norm.group: {words}"


@each(statistics=["running", "last"], eps=[None, 0.25])
def test_what_a_network_is_prepared_for(statistics, eps):
    task = task_with(L.BatchNormalization(2), L.Linear(1, 1), L.LayerNormalization(2))
    before = task.predictor[2].eps
    with pytest.MonkeyPatch.context() as patch:
        used = []
        patch.setattr(batch_norm, "use_last_batch", used.append)
        batch_norm.prepare(task, SimpleNamespace(statistics=statistics, eps=eps))
    assert task.predictor[0].eps == (2e-5 if eps is None else eps) and task.predictor[2].eps == before
    assert used == [task] * (statistics == "last")


def test_statistics_are_measured_over_the_same_batches_each_time(monkeypatch):
    given = []
    monkeypatch.setattr(batch_norm, "RecalibrateStatistics", lambda *words: given.append(words) or "extension")
    config = SimpleNamespace(batch_size=4, seed=7, virtual_workers=None, batch_norm=SimpleNamespace(batches=5))
    made = SimpleNamespace(data=SimpleNamespace(train=list(range(10))), task="task", convert="convert", device=None)
    comm = SimpleNamespace(rank=1, size=2)
    assert batch_norm.recalibration(config, made, comm) == "extension"
    ((*start, batches, num_batches, convert, device),) = given
    assert (start, num_batches, convert, device) == ([comm, "task"], 5, "convert", None)
    first, second = batches(), batches()
    assert [[first.next() for _ in range(6)]] == [[second.next() for _ in range(6)]]
    assert (first.batch_size, first.rank, first.size, first.repeat) == (4, 1, 2, True)
    seen = [x for iterator in [batches()] for _ in range(3) for x in iterator.next()]
    assert len(seen) == 5 and len(set(seen)) == 5 and seen != sorted(seen)  # this rank's half of an epoch, 4 + 4 + 2
