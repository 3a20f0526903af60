"""Data that ranks divide, seen from one of them: who reads, what is sent, and to whom."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from dbrdist.comm import create_communicator, run_threads, scatter_dataset, scatter_index
from dbrdist.comm.data import datasets
from dbrdist.core.array.random import generator
from dbrdist.datasets import open_images
from tests.comm.comm_helpers import SIZE, said
from tests.each import each


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for label, names in (("ant", "ab"), ("bee", "c")):
        (root / label).mkdir()
        for name in names:
            (root / label / f"{name}.jpg").write_bytes(name.encode())
    return root


class Group:
    """What one rank sees of some ranks: what it hands to them, and what the first of them has."""

    def __init__(self, log, name, first):
        self.log, self.name, self.first = log, name, first

    def _of_first(self, what, x):
        self.log.append((self.name, what, x is None))
        return self.first[what] if self.first is not None else x

    def bcast(self, x):
        return self._of_first("block", x)

    def bcast_obj(self, x):
        return self._of_first("index" if self.name == "host" else "root", x)

    def finalize(self):
        self.log.append((self.name, "finalized"))


@each(place=["rank 0", "another host", "not the first of its host"])
def test_a_list_of_images_is_sent_once_to_each_host(place, images):
    log, index = [], open_images(images)
    rank, intra_rank, inter_rank = {"rank 0": (0, 0, 0), "another host": (2, 0, 1)}.get(place, (3, 1, 1))

    class Comm:
        def split(self, color, key):
            assert key == rank
            if color is None:
                return None
            is_host = len(splits) == 1
            assert not is_host or color == inter_rank
            splits.append(color)
            sent = {"block": index.block(), "root": index.root, "index": index}
            return Group(log, "host" if is_host else "leaders", None if intra_rank == rank == 0 else sent)

    splits, comm = [None] * (intra_rank > 0), Comm()
    comm.rank, comm.intra_rank, comm.inter_rank = rank, intra_rank, inter_rank
    looked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.agree, "together", lambda comm: contextlib.nullcontext())
        patch.setattr(datasets, "open_images", lambda root: looked.append(root) or index)
        found = datasets.open_images_once(images, comm)
    assert looked == [images] * (rank == 0)
    assert [found.path(i) for i in range(3)] == [index.path(i) for i in range(3)] and found.root == str(images)
    is_leader, is_first = intra_rank == 0, rank == 0
    expected = [("leaders", "block", not is_first), ("leaders", "root", not is_first), ("leaders", "finalized")]
    assert log == expected * is_leader + [("host", "index", not is_leader), ("host", "finalized")]


@each(
    **{"size, rank, equal, bounds": [
        (3, 0, True, (0, 3)), (3, 1, True, (2, 5)), (3, 2, True, (4, 7)), (3, 0, False, (0, 2)), (3, 1, False, (2, 4)),
        (3, 2, False, (4, 7)), (7, 3, True, (3, 4)), (1, 0, True, (0, 7)), (9, 0, False, (0, 0)), (9, 8, False, (6, 7)),
    ]}
)  # fmt: skip
def test_ranges_of_seven_samples(size, rank, equal, bounds):
    class Comm:
        def bcast_obj(self, x, root):
            roots.append(root)
            return (7, equal)

    roots, comm = [], Comm()
    comm.rank, comm.size = rank, size
    assert datasets.scatter_index(99, comm, 4) == bounds and roots == [4]


@each(seed=[None, 0, 5])
def test_a_permutation_without_a_seed_is_that_of_zero(seed):
    comm, data = create_communicator("single"), np.arange(9)
    shard = datasets.scatter_dataset(data, comm, shuffle=True, seed=seed)
    assert list(shard) == generator(seed or 0, "scatter").permutation(9).tolist() and shard.num_padding == 0
    assert list(datasets.scatter_dataset(data, comm)) == list(range(9))


def test_examples_that_each_rank_has_are_not_sent(monkeypatch):
    comm, data, sent = create_communicator("single"), list(range(5)), []
    plain = comm.bcast_obj
    monkeypatch.setattr(comm, "bcast_obj", lambda x, *rest, **named: [sent.append(x), plain(x, *rest, **named)][1])
    datasets.scatter_dataset(data, comm)
    assert sent and not any(x is data for x in sent)


@each(num_padding=[0, 1])
def test_padding_is_left_out_on_demand(num_padding):
    shard = datasets.Shard(list("abcdef"), 1, 4, np.array([5, 4, 3, 2, 1, 0]), num_padding)
    assert list(shard) == ["e", "d", "c"]
    assert list(shard.without_padding()) == ["e", "d", "c"][: 3 - num_padding]


DATA = list(range(10))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm: scatter_dataset(DATA, comm, root=comm.rank), "expected the same root on every rank"),
        (lambda comm: scatter_dataset(DATA, comm, root=None if comm.rank else 0), "expected a whole number, got None"),
        (lambda comm: scatter_dataset(DATA[: 5 + comm.rank], comm), "expected 5 examples as rank 0 has, got 6"),
        (lambda comm: scatter_dataset(iter(DATA), comm), "expected a dataset, but list_iterator has no len()"),
        (lambda comm: scatter_dataset(7 if comm.rank == 1 else DATA, comm), "expected a dataset, but int has no len()"),
        (lambda comm: scatter_dataset(DATA, comm, shuffle=True, seed="a"), "seed expected a whole number, got str"),
        (
            lambda comm: scatter_dataset(DATA, comm, seed=1.5 if comm.rank else 1),
            "seed expected a whole number, got fl",
        ),
        (lambda comm: scatter_index(-1, comm), "expected at least 1 sample to divide over 3 ranks, got -1"),
        (lambda comm: scatter_index("10", comm), "n_total_samples expected a whole number, got str"),
        (lambda comm: scatter_index(10.5, comm), "n_total_samples expected a whole number, got float"),
    ],
)
def test_parts_of_datasets(call, words):
    assert words in said(call)


def test_the_root_decides_how_a_dataset_is_divided():
    def body(comm):
        mine = comm.rank == 1  # the root
        parts = scatter_dataset(DATA, comm, 1, shuffle=mine, seed=comm.rank, force_equal_length=mine)
        exact = scatter_dataset(DATA, comm, 1, force_equal_length=not mine)
        return list(parts[:]), parts.num_padding, list(exact[:]), scatter_index(10, comm, 1, force_equal_length=mine)

    found = run_threads(SIZE, body, timeout_seconds=30)
    assert [len(shuffled) for shuffled, *_ in found] == [4, 4, 4]
    assert [num_padding for _, num_padding, *_ in found] == [1, 1, 0]
    own = [x for shuffled, num_padding, *_ in found for x in shuffled[: 4 - num_padding]]
    assert sorted(own) == DATA != own
    assert [x for *_, exact, _ in found for x in exact] == DATA
    assert [bounds for *_, bounds in found] == [(0, 4), (3, 7), (6, 10)]


def test_ranks_that_have_a_dataset_read_their_own():
    def body(comm):
        mine = list(range(10)) if comm.rank < 2 else None
        found = scatter_dataset(mine, comm, root=1)
        return found._dataset is mine, list(found), found.num_padding

    assert run_threads(3, body, timeout_seconds=60) == [
        (True, [0, 1, 2, 3], 1), (True, [3, 4, 5, 6], 1), (False, [6, 7, 8, 9], 0)
    ]  # fmt: skip


def test_every_example_is_in_one_part_where_a_rank_has_another_order(monkeypatch):
    told = []
    monkeypatch.setattr(datasets, "warn", told.append)

    def body(comm):
        numbers = list(range(7))[:: -1 if comm.rank else 1]
        return list(datasets.scatter_dataset(numbers, comm, shuffle=True, seed=3).without_padding()[:])

    assert sorted(n for part in run_threads(2, body) for n in part) == list(range(7))
    assert len(told) == 1 and "rank 1 has other examples than rank 0" in told[0]
