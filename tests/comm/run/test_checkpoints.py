"""Snapshots and checkpoints of ranks, seen from one of them."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import create_communicator
from dbrdist.comm.run import checkpoints
from dbrdist.comm.run.extensions import create_multi_node_checkpointer, multi_node_snapshot
from dbrdist.training import extensions
from tests.each import each


def packed(**entries):
    file = io.BytesIO()
    np.savez(file, **entries)
    return np.frombuffer(file.getvalue(), np.uint8)


@each(is_writer=[False, True], has_target=[False, True])
def test_replicas_load_what_their_writer_has_read(is_writer, has_target, tmp_path):
    said, loaded, trainer, own = [], [], object(), object()
    content = packed(a=np.arange(3))
    path = str(tmp_path / "snapshot_iter_3.0")
    (tmp_path / "snapshot_iter_3.0").write_bytes(content.tobytes())

    class Replicas:
        def bcast(self, x):
            said.append(None if x is None else x.tobytes())
            return content

        def finalize(self):
            said.append("finalized")

    class Comm:
        rank, size = 1, 3

        def allgather_obj(self, x):
            said.append(x)
            return [True, x, False]

        def split(self, color, key):
            said.append((color, key))
            return Replicas()

    one = object.__new__(checkpoints.MultiNodeSnapshot)
    one._comm, one._number, one._snapshot = Comm(), 7, SimpleNamespace(target=own if has_target else None)
    one._newest = lambda trainer: path if is_writer else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "together", lambda comm: contextlib.nullcontext())
        patch.setattr(checkpoints.snapshots, "load_entries", lambda *arguments: loaded.append(arguments))
        one.resume(trainer)
    assert said == [is_writer, (7, 1), content.tobytes() if is_writer else None, "finalized"]
    ((name, entries, target),) = loaded
    assert name == (path if is_writer else "the writer's snapshot") and target is (own if has_target else trainer)
    assert entries["a"].tolist() == [0, 1, 2]


@each(is_writer=[False, True])
def test_the_writer_alone_saves_at_an_error(is_writer):
    calls, error = [], ValueError()
    one = object.__new__(checkpoints.MultiNodeSnapshot)
    one._is_writer, one._snapshot = is_writer, SimpleNamespace(on_error=lambda *arguments: calls.append(arguments))
    one.on_error("trainer", error, "traceback")
    assert calls == [("trainer", error, "traceback")] * is_writer


@each(
    **{"sets, size, found": [
        ([], 2, [[0], [1]]), ([range(3)], 3, [[0, 1, 2]]), ([2, [1, 0]], 3, [[2], [0, 1]]),
        ([{3, 1}, []], 4, [[1, 3], [0], [2]]), ([np.int64(1)], 2, [[1], [0]]),
    ]}
)  # fmt: skip
def test_each_rank_is_in_one_set(sets, size, found):
    assert checkpoints._parse_sets(sets, size) == found
    for wrong, words in (([0, [0]], "each rank in one set, got rank 0 twice"), ([[size]], "expected a rank from 0")):
        with pytest.raises(ValueError, match=words):
            checkpoints._parse_sets(wrong, size)


def test_a_snapshot_of_replicas_is_the_one_it_was_made_of():
    comm = create_communicator("single")
    snapshot = extensions.snapshot(filename="s_{.updater.iteration}", n_retains=3)
    snapshot.priority, snapshot.trigger = -7, (3, "epoch")
    one = multi_node_snapshot(comm, snapshot, [])
    assert (one.priority, one.trigger, one.default_name) == (-7, (3, "epoch"), "multi_node_snapshot")
    assert one._snapshot.filename == "s_{.updater.iteration}.0" and snapshot.filename == "s_{.updater.iteration}"
    assert one._is_writer and one._number == 0 and one._snapshot._num_kept == 3
    by_function = multi_node_snapshot(comm, extensions.snapshot(filename=lambda trainer: f"at-{trainer}"), [])
    assert by_function._snapshot.filename(5) == "at-5.0"


@each(num_kept=[1, 2, 5], gc_interval=[1, 2, 3])
def test_generations_are_removed_now_and_then(num_kept, gc_interval, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generations")
    comm = create_communicator("single")
    saver = create_multi_node_checkpointer("a", comm, num_kept, gc_interval, str(folder))
    trainer = SimpleNamespace(updater=SimpleNamespace(iteration=0), out="elsewhere", serialize=lambda serializer: None)
    (folder / "snapshot_a_1_3").touch()  # of another rank
    (folder / "snapshot_a_0_100").touch()  # of a run that went on for longer
    kept = []
    for step in range(1, 12):
        trainer.updater.iteration = 9 * step
        saver(trainer)
        kept.append(9 * step)
        if step % gc_interval == 0:
            kept = kept[-num_kept:]
        assert saver._iterations(str(folder)) == sorted([100, *kept])
    assert (folder / "snapshot_a_1_3").exists()


@each(
    **{
        "autoload, filename, is_writer": [
            (True, "s_{.updater.iteration}.1", True), (False, "s_{.updater.iteration}.1", True),
            (True, lambda trainer: "s", True), (True, "s_{.updater.iteration}.1", False),
        ]
    }
)  # fmt: skip
def test_a_writer_finds_its_files(tmp_path, autoload, filename, is_writer):
    for name in ("s_2.1", "s_10.1", "s_3.0", "other"):
        (tmp_path / name).touch()
    one = object.__new__(checkpoints.MultiNodeSnapshot)
    one._snapshot, one._is_writer = SimpleNamespace(autoload=autoload, filename=filename), is_writer
    found = one._files(SimpleNamespace(out=str(tmp_path)))
    whole = autoload and is_writer and isinstance(filename, str)
    assert list(found.items()) == [(f"s_{k}", str(tmp_path / f"s_{k}.1")) for k in (2, 10)] * whole
