"""Virtual workers on ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import functions as F
from dbrdist import optimizers
from dbrdist.comm import VirtualUpdater, create_communicator, run_threads
from dbrdist.comm.steps import virtual
from dbrdist.core.model.parameter import Parameter
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.links import Linear
from tests.comm import virtual_contract
from tests.each import each


@pytest.mark.slow
@pytest.mark.parametrize("check", virtual_contract.CHECKS, ids=virtual_contract.by_name)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.filterwarnings(virtual_contract.OVERFLOWS_ARE_MEANT)
def test_virtual_workers_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_more_numbers_of_ranks(num_ranks):
    run_threads(num_ranks, virtual_contract.check_bits_with_lars, timeout_seconds=60)


class Alone:
    rank, size = 0, 1


def test_what_virtual_workers_cannot_train_with():
    link, data = Linear(2, 1), list(range(8))
    workers = SerialIterator(data, 4, virtual_workers=2, rank=0, size=1)
    optimizer = optimizers.SGD().setup(link)
    virtual._check({"main": workers}, {"main": optimizer}, Alone)
    late = optimizers.SGD().setup(Linear(None, 1))
    for iterators, optimizers_, words in (
        ({"main": workers, "x": workers}, {"main": optimizer}, "expected one iterator and one optimizer"),
        ({"main": workers}, {"main": optimizer, "x": optimizer}, "expected one iterator and one optimizer"),
        (
            {"main": SerialIterator(data, 4)},
            {"main": optimizer},
            "an iterator with virtual workers, got SerialIterator",
        ),
        (
            {"main": SerialIterator(data, 4, virtual_workers=2, rank=0, size=2)},
            {"main": optimizer},
            "got rank=0, size=2",
        ),
        ({"main": workers}, {"main": late}, "expected parameters with shapes, but /W waits for its first input"),
    ):
        with pytest.raises(ValueError, match=words):
            virtual._check(iterators, optimizers_, Alone)


def test_threads_are_limited_again_after_the_first_step(monkeypatch):
    """The first step loads libraries; only a reproducible run is limited."""
    limited = []
    monkeypatch.setattr(virtual.thread_pools, "use_one", lambda: limited.append(1))
    data = [(np.ones(2, "f4"), np.ones(1, "f4")) for _ in range(8)]
    for reproducible in (True, False):
        link = Linear(2, 1)
        updater = VirtualUpdater(
            SerialIterator(data, 4, virtual_workers=2, rank=0, size=1), optimizers.SGD().setup(link),
            create_communicator("single"), loss_func=lambda x, t, link=link: F.mean_squared_error(link(x), t),
            reproducible=reproducible,
        )  # fmt: skip
        for _ in range(5):
            updater.update()
        assert len(limited) == 2


@each(auto_new_epoch=[True, False])
def test_epochs_of_virtual_workers_are_counted(monkeypatch, auto_new_epoch):
    data = [(np.ones(2, "f4"), np.ones(1, "f4")) for _ in range(8)]
    link, told = Linear(2, 1), []
    optimizer = optimizers.SGD().setup(link)
    monkeypatch.setattr(optimizer, "new_epoch", lambda auto=False: told.append((optimizer.t, auto)))
    updater = VirtualUpdater(
        SerialIterator(data, 4, virtual_workers=2, rank=0, size=1), optimizer, create_communicator("single"),
        loss_func=lambda x, t: F.mean_squared_error(link(x), t), auto_new_epoch=auto_new_epoch,
    )  # fmt: skip
    for _ in range(5):
        updater.update()
    assert told == ([(2, True), (4, True)] if auto_new_epoch else [])


def test_new_parameters_are_taken_from_rank_0():
    """A parameter that comes between two steps has rank 0's value on all ranks, as with multi-node optimizers."""
    data = [(np.full(2, i, "f4"), np.ones(1, "f4")) for i in range(8)]

    def body(comm):
        link = Linear(2, 1)
        optimizer = optimizers.SGD(0.0).setup(link)
        updater = VirtualUpdater(
            SerialIterator(data, 4, virtual_workers=2, rank=comm.rank, size=comm.size), optimizer, comm,
            loss_func=lambda x, t: F.mean_squared_error(link(x) + getattr(link, "more", 0), t),
        )  # fmt: skip
        updater.update()
        with link.init_scope():
            link.more = Parameter(np.full(1, comm.rank + 5, "f4"))
        optimizer.setup(link)
        updater.update()
        return link.more.array.tolist()

    assert run_threads(2, body, timeout_seconds=60) == [[5.0], [5.0]]
