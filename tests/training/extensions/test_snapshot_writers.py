"""Writers beside the training loop: the files they make, and errors that do not get lost."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import Sequential, optimizers, serializers
from dbrdist import links as L
from dbrdist.core.array.pages import CopySpace
from dbrdist.errors import CheckpointError
from dbrdist.training import extensions, make_extension
from dbrdist.training.extensions import snapshot_writers, snapshots
from dbrdist.training.extensions.snapshot_writers import (
    ProcessQueueWriter,
    ProcessWriter,
    QueueWriter,
    SimpleWriter,
    StandardWriter,
    ThreadQueueWriter,
    ThreadWriter,
    Writer,
)
from tests.training.training_helpers import make_trainer

IN_THREADS = [SimpleWriter, ThreadWriter, ThreadQueueWriter]
IN_PROCESSES = [ProcessWriter, ProcessQueueWriter]


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def run(folder, stop=(4, "iteration"), **options):
    trainer = make_trainer(folder, stop=stop)
    trainer.extend(extensions.snapshot(**options), trigger=(1, "iteration"))
    trainer.run()
    return trainer


def fail(path, target, words="no space left"):
    raise OSError(28, words)


def save_some(path, target):
    """Fails from the third step on."""
    if target["updater/iteration"] >= 3:
        fail(path, target)
    serializers.save_npz(path, target)


@pytest.mark.parametrize("kind", IN_THREADS)
def test_files_are_those_of_the_loop_itself(tmp_path, kind):
    (plain := tmp_path / "plain").mkdir()
    (beside := tmp_path / "beside").mkdir()
    run(plain)
    run(beside, writer=kind())
    assert files(beside) == files(plain)
    for name in files(plain):
        assert snapshots.is_whole(str(beside / name))
        mine, expected = np.load(beside / name), np.load(plain / name)
        assert mine.files == expected.files
        for key in mine.files:
            if "elapsed" not in key:
                np.testing.assert_array_equal(mine[key], expected[key])


@pytest.mark.parametrize("kind", IN_THREADS)
def test_the_newest_stay_and_a_run_goes_on_from_them(tmp_path, kind):
    run(tmp_path, n_retains=2, writer=kind())
    assert files(tmp_path) == ["snapshot_iter_3", "snapshot_iter_4"]
    trainer = run(tmp_path, stop=(6, "iteration"), n_retains=1, autoload=True, writer=kind())
    assert files(tmp_path) == ["snapshot_iter_6"]
    straight = make_trainer(tmp_path, stop=(6, "iteration"))
    straight.run()
    ours, expected = (t.updater.get_optimizer("main").target.w.array for t in (trainer, straight))
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("kind", IN_THREADS)
def test_a_run_that_begins_anew_keeps_its_own_newest(tmp_path, kind):
    """Files of an earlier run with higher numbers do not push it out."""
    run(tmp_path, stop=(9, "iteration"), n_retains=1)
    run(tmp_path, stop=(2, "iteration"), n_retains=1, writer=kind())
    assert files(tmp_path) == ["snapshot_iter_2", "snapshot_iter_9"]


@pytest.mark.parametrize("kind", IN_THREADS)
def test_a_writer_gets_a_copy(tmp_path, kind):
    """What the loop does to the parameters meanwhile is not in the file."""
    seen, gate = [], threading.Event()

    def savefun(path, target):
        if kind is not SimpleWriter:
            gate.wait(30)
        seen.append(float(target["updater/model:main/w"][0]))
        serializers.save_npz(path, target)

    trainer, values = make_trainer(tmp_path, stop=(2, "iteration")), []
    trainer.extend(extensions.snapshot(writer=kind(savefun)), trigger=(1, "iteration"))

    @make_extension(trigger=(1, "iteration"), priority=-200)
    def watch(trainer):
        values.append(float(trainer.updater.get_optimizer("main").target.w.array[0]))
        if kind is ThreadWriter or len(values) == 2:
            gate.set()

    trainer.extend(watch)
    trainer.run()
    assert seen == values


@pytest.mark.parametrize("kind", IN_THREADS)
def test_an_error_of_a_writer_ends_the_run(tmp_path, kind, capsys):
    with pytest.raises(CheckpointError, match="could not be written: no space left; earlier snapshots are unharmed"):
        run(tmp_path, stop=(300, "iteration"), writer=kind(save_some))
    assert files(tmp_path) == ["snapshot_iter_1", "snapshot_iter_2"]


@pytest.mark.parametrize("kind", IN_THREADS)
def test_an_error_at_the_last_snapshot_is_raised_too(tmp_path, kind, capsys):
    finalized = []
    trainer = make_trainer(tmp_path, stop=(1, "iteration"))
    trainer.extend(extensions.snapshot(writer=kind(fail)), trigger=(1, "iteration"))
    after = extensions.LogReport()
    after.finalize = lambda: finalized.append(True)
    trainer.extend(after, priority=-1000)
    with pytest.raises(CheckpointError, match="no space left"):
        trainer.run()
    assert finalized == [True] and files(tmp_path) == ["log.jsonl"]


def test_memory_that_is_still_being_reserved_does_not_hold_up_the_end_of_the_program(monkeypatch):
    began, gate, seen = threading.Event(), threading.Event(), []

    def reserve(space, num_bytes):
        seen.append((threading.current_thread().daemon, num_bytes))
        began.set()
        gate.wait(30)

    monkeypatch.setattr(CopySpace, "reserve", reserve)
    ThreadWriter().prepare(4096)
    assert began.wait(30)
    gate.set()
    assert seen == [(True, 4096)]


@pytest.mark.parametrize("kind", IN_THREADS)
def test_a_failed_run_is_saved(tmp_path, kind, capsys):
    trainer = make_trainer(tmp_path)
    trainer.extend(lambda trainer: 1 / 0, name="fail", trigger=(3, "iteration"))
    trainer.extend(extensions.snapshot(writer=kind(), snapshot_on_error=True))
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert files(tmp_path) == ["snapshot_iter_3"] and snapshots.is_whole(str(tmp_path / "snapshot_iter_3"))


def test_a_part_of_the_run_goes_through_a_writer(tmp_path):
    trainer = make_trainer(tmp_path, stop=(1, "epoch"))
    model = trainer.updater.get_optimizer("main").target
    trainer.extend(extensions.snapshot_object(model, "model_{.updater.iteration}.npz", writer=ThreadWriter()))
    trainer.run()
    (name,) = files(tmp_path)
    assert sorted(set(np.load(tmp_path / name).files) - {"dbrdist.json"}) == ["b", "w"]


def test_arguments_of_savefun(tmp_path):
    given = {}
    for kind in (SimpleWriter, ThreadWriter):

        def savefun(path, target, **options):
            given.update(options)
            open(path, "wb").close()

        run(tmp_path, stop=(1, "iteration"), writer=kind(savefun, compression=True))
    assert given == {"compression": True}


def test_a_function_is_a_writer(tmp_path):
    calls = []
    run(tmp_path, writer=lambda filename, outdir, target: calls.append((filename, outdir, type(target))))
    assert calls == [(f"snapshot_iter_{i}", str(tmp_path), dict) for i in (1, 2, 3, 4)]


def test_savefun_belongs_to_the_writer():
    with pytest.raises(TypeError, match="expected savefun or writer, got both; give savefun to the writer"):
        extensions.snapshot(serializers.save_npz, writer=SimpleWriter())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Writer()("a", ".", {}), "Writer must define __call__"),
        (lambda: StandardWriter()("a", ".", {}), "StandardWriter must define create_worker"),
        (lambda: QueueWriter()("a", ".", {}), "QueueWriter must define create_queue"),
    ],
)
def test_bases_say_what_to_define(make, words):
    with pytest.raises(NotImplementedError, match=words):
        make()


def test_a_task_of_ones_own(tmp_path):
    calls = []
    run(tmp_path, stop=(3, "iteration"), writer=ThreadQueueWriter(task=lambda *args: calls.append(args[:2])))
    assert calls == [(f"snapshot_iter_{i}", str(tmp_path)) for i in (1, 2, 3)]


def test_a_writer_without_work_ends(tmp_path):
    for kind in (*IN_THREADS, *IN_PROCESSES):
        run(tmp_path, writer=kind(), condition=lambda: False)
    assert files(tmp_path) == []


@pytest.mark.programs
@pytest.mark.parametrize("kind", IN_PROCESSES)
def test_processes_write(tmp_path, kind):
    run(tmp_path, stop=(3, "iteration"), n_retains=2, writer=kind())
    assert files(tmp_path) == ["snapshot_iter_2", "snapshot_iter_3"]
    assert all(snapshots.is_whole(str(path)) for path in tmp_path.iterdir())


@pytest.mark.programs
@pytest.mark.parametrize("kind", IN_PROCESSES)
def test_a_process_that_fails_ends_the_run(tmp_path, kind, capfd):
    with pytest.raises(CheckpointError, match="the process that writes snapshots ended with exit status 1"):
        run(tmp_path, stop=(4, "iteration"), writer=kind(save_some))
    assert files(tmp_path) == ["snapshot_iter_1", "snapshot_iter_2"]


@pytest.mark.programs
def test_a_process_that_is_killed_does_not_hang_the_run(tmp_path):
    writer = ProcessQueueWriter(task=_die)
    with pytest.raises(CheckpointError, match="exit status 9"):
        writer("a", str(tmp_path), {"x": np.zeros(1 << 20)})  # more than a pipe holds
        writer.finalize()


def _die(*work):
    os._exit(9)


def test_the_names_of_chainer():
    assert extensions.snapshot_writers is snapshot_writers


def test_a_thread_copies_into_the_memory_of_the_copy_before(tmp_path):
    """Once the file of that one is written; the first copy into memory that was made ready when the run started."""
    writer, model = ThreadWriter(), L.Linear(50, 60)
    trainer = SimpleNamespace(out=str(tmp_path), updater=SimpleNamespace(iteration=0, get_all_optimizers=dict))
    saver = extensions.snapshot_object(model, "at{.updater.iteration}", writer=writer)
    saver.initialize(trainer)
    seen = []
    whole = writer.create_worker
    writer.create_worker = lambda filename, outdir, target: (seen.append(target), whole(filename, outdir, target))[1]
    for step in range(3):
        model.W.array[...] = step
        trainer.updater.iteration = step
        saver.save(trainer)
        model.W.array[...] = -1
    saver.finalize()
    assert np.shares_memory(seen[0]["W"], seen[1]["W"])
    for step in range(3):
        saved = np.load(tmp_path / f"at{step}")
        assert np.all(saved["W"] == step)
        assert saved["b"].shape == (60,)


def test_state_bytes_are_those_of_parameters_and_optimizers():
    model = L.Linear(10, 3)
    optimizer = optimizers.RMSpropWarmup().setup(model)
    updater = SimpleNamespace(get_all_optimizers=lambda: {"main": optimizer})
    assert snapshots.state_bytes(SimpleNamespace(updater=updater)) == 3 * 4 * 33


def test_parameters_that_have_no_values_yet_are_no_bytes():
    model = Sequential(L.Linear(None, 3), L.Linear(2, 5, nobias=True))
    updater = SimpleNamespace(get_all_optimizers=lambda: {"main": optimizers.SGD(0.1).setup(model)})
    assert snapshots.state_bytes(SimpleNamespace(updater=updater)) == 4 * (3 + 10)
    assert snapshots.state_bytes(SimpleNamespace(updater=object())) == 0
