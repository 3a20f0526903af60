"""Snapshots on disk: any damage is seen, none loads, and nothing else is lost."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.core.files.serializer import load_npz, save_npz
from dbrdist.errors import CheckpointError
from dbrdist.training import extensions
from dbrdist.training.extensions import snapshots
from dbrdist.training.extensions.log_report import read_log
from tests.each import each
from tests.training.training_helpers import Line, Noisy, full_run, made, make_trainer
from tests.warm import ROOT


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a snapshot."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = make_trainer(folder)
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
    trainer.run()
    return Path(snapshots.newest(str(folder))).read_bytes()


def damaged(rng, data, kind):
    changed = bytearray(data)
    if kind == "cut":
        return bytes(changed[: rng.integers(len(data))])
    if kind == "flip":
        changed[rng.integers(len(data))] ^= 1 << rng.integers(8)
    elif kind == "zero":
        start = int(rng.integers(len(data) - 600))
        length = int(rng.integers(1, 600))
        changed[start : start + length] = bytes(length)
    elif kind == "directory":  # the last third is the directory of so small an archive
        changed[rng.integers(len(data) * 2 // 3, len(data))] ^= int(rng.integers(1, 256))
    else:
        start = int(rng.integers(len(data)))
        changed[start:start] = rng.bytes(int(rng.integers(1, 50)))
    return bytes(changed)


def anew(path, data):
    """A file that takes the place of another is written at once, one that is written over goes to disk first."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "flip", "zero", "directory", "insert"])
def test_no_damaged_snapshot_loads(tmp_path, whole, kind):
    rng, path = np.random.default_rng(0), tmp_path / "snapshot_iter_1"
    for _ in range(100):
        changed = damaged(rng, whole, kind)
        if changed == whole:
            continue
        anew(path, changed)
        assert not snapshots.is_whole(str(path))
        with pytest.raises(CheckpointError, match="the snapshot is damaged"):
            snapshots.load(str(path), make_trainer(tmp_path))
    path.write_bytes(whole)
    assert snapshots.is_whole(str(path))
    snapshots.load(str(path), make_trainer(tmp_path))


def test_each_bit_counts(tmp_path, whole):
    """Bits that no reader looks at, too: times in the directory, padding, the seal itself."""
    path = tmp_path / "snapshot_iter_1"
    for position in np.random.default_rng(1).integers(0, 8 * len(whole), 200).tolist() + list(range(-2400, 0, 8)):
        changed = bytearray(whole)
        changed[position // 8] ^= 1 << position % 8
        anew(path, changed)
        assert not snapshots.is_whole(str(path)), position


def test_an_npz_file_of_another_program_is_whole_by_its_own_checksums(tmp_path):
    path = tmp_path / "snapshot_iter_1"
    with open(path, "wb") as file:
        np.savez(file, a=np.arange(100))
    assert snapshots.is_whole(str(path))
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    assert not snapshots.is_whole(str(path))


def bomb(num_bytes):
    """A small archive that claims an array of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (num_bytes,)})
        with archive.open("a.npy", "w") as entry:
            entry.write(header.getvalue())
            for _ in range(num_bytes >> 20):
                entry.write(bytes(1 << 20))
    return file.getvalue()


@pytest.mark.slow
def test_a_bomb_is_refused_before_it_unpacks(tmp_path):
    path = tmp_path / "snapshot_iter_1"
    path.write_bytes(bomb(300 << 20))
    assert path.stat().st_size < 1 << 20
    assert not snapshots.is_whole(str(path))
    with pytest.raises(CheckpointError, match=r"unpack to at most 268,435,456, but it claims 314,57"):
        load_npz(str(path), make_trainer(tmp_path))


def test_an_array_that_claims_more_than_its_entry_is_damage(tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, archive.open("a.npy", "w") as entry:
        np.lib.format.write_array_header_1_0(entry, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)})
    (tmp_path / "a").write_bytes(file.getvalue())
    with pytest.raises(CheckpointError, match=r"cannot be read as an .npz file"):
        load_npz(str(tmp_path / "a"), make_trainer(tmp_path))


def test_the_snapshot_just_written_stays_whatever_the_others_are_called(tmp_path):
    """One with a higher number, damaged or of another run, must not push it out."""
    (tmp_path / "snapshot_iter_1000").write_bytes(b"half")
    trainer = make_trainer(tmp_path)
    trainer.extend(extensions.snapshot(n_retains=1), trigger=(1, "iteration"))
    trainer.run()
    left = snapshots.find(str(tmp_path))
    assert [os.path.basename(path) for path in left][-1] == "snapshot_iter_1000"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert snapshots.newest(str(tmp_path)) == left[-2]


def test_a_snapshot_of_a_savefun_is_renamed_into_place(tmp_path):
    seen = []

    def save(path, target):
        seen.append(os.path.basename(path))
        Path(path).write_bytes(b"mine")

    snapshots.write(str(tmp_path / "a"), None, save)
    assert (tmp_path / "a").read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["a"]
    assert seen[0].startswith("a.tmp-")


def test_the_log_lies_beside_the_snapshot(tmp_path):
    """A snapshot does not grow with the log."""

    def sizes(num_steps):
        folder = tmp_path / str(num_steps)
        trainer = make_trainer(folder, (num_steps, "iteration"))
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
        trainer.extend(extensions.snapshot(), trigger=(num_steps, "iteration"))
        trainer.run()
        return os.path.getsize(folder / f"snapshot_iter_{num_steps}")

    assert abs(sizes(2) - sizes(50)) < 100


def test_a_log_that_lost_lines_is_named(tmp_path):
    def trainer(stop):
        made = make_trainer(tmp_path, (stop, "iteration"))
        made.extend(extensions.LogReport(trigger=(1, "iteration")))
        made.extend(extensions.snapshot(autoload=True), trigger=(4, "iteration"))
        return made

    trainer(4).run()
    text = (tmp_path / "log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_text("".join(text[:2]) + text[2][:10])  # killed while it wrote
    with pytest.warns(UserWarning, match=r"log.jsonl has 2 of the 4 lines"):
        trainer(6).run()
    assert [entry["iteration"] for entry in read_log(tmp_path / "log.jsonl")] == [1, 2, 5, 6]


def test_struct_of_the_directory_is_not_trusted(tmp_path, whole):
    """An end record that points beyond the file."""
    at = whole.rindex(b"PK\x05\x06")
    changed = whole[: at + 12] + struct.pack("<II", 2**31 - 1, 2**31 - 1) + whole[at + 20 :]
    (tmp_path / "a").write_bytes(changed)
    assert not snapshots.is_whole(str(tmp_path / "a"))


@pytest.mark.programs
@pytest.mark.parametrize("number, more", [(100, []), (30, ["thread"])])
def test_kills_while_saving_lose_nothing(tmp_path, number, more):
    """Also where a thread writes: the newest file is whole and of one step, whatever the weights have become."""
    program = [sys.executable, str(ROOT / "tests/training/killed_saves.py"), str(tmp_path), str(number), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= number / 2  # half of the kills wait for a half-written file; the others come at any time


def test_snapshots_under_a_condition_and_by_a_function(tmp_path):
    trainer = made(tmp_path)
    allowed = [False]
    conditional = extensions.snapshot(filename=lambda t: f"at{t.updater.iteration}", condition=lambda: allowed[0])
    conditional(trainer)
    assert os.listdir(tmp_path) == []
    conditional.on_error(trainer, None, None)
    allowed[0] = True
    conditional.on_error(trainer, None, None)
    assert os.listdir(tmp_path) == []
    conditional(trainer)
    assert os.listdir(tmp_path) == ["at0"] and conditional.find_newest(trainer) is None
    os.remove(tmp_path / "at0")
    extensions.snapshot(filename="error", snapshot_on_error=True).on_error(trainer, None, None)
    assert os.listdir(tmp_path) == ["error"]
    for name in ("s_1", "s_10", "s_9", "s_x", "s_", "t_3", "s_2.tmp-1"):
        (tmp_path / name).touch()
    names = [os.path.basename(p) for p in snapshots.find(str(tmp_path), "s_{.updater.iteration}")]
    assert names == ["s_x", "s_1", "s_9", "s_10"]
    assert snapshots.find(str(tmp_path / "nowhere")) == []


def test_the_newest_snapshots_are_kept(tmp_path):
    trainer = made(tmp_path)
    keep = extensions.snapshot(n_retains=1)
    for n in (1, 2, 10):
        trainer.updater.iteration = n
        keep(trainer)
        assert os.listdir(tmp_path) == [f"snapshot_iter_{n}"]
    again = extensions.snapshot(autoload=True)
    assert os.path.basename(again.find_newest(trainer)) == "snapshot_iter_10"
    assert keep.find_newest(trainer) is None
    trainer.updater.iteration = 0
    keep.resume(trainer)
    assert trainer.updater.iteration == 0
    again.resume(trainer)
    assert trainer.updater.iteration == 10
    model = Line()
    extensions.snapshot_object(model, "model_{.updater.iteration}", autoload=True).resume(trainer)


@each(size=[0, 1, 71, 72, 73])
def test_files_without_a_seal_are_of_other_programs(size):
    assert snapshots._seal_holds(io.BytesIO(b"x" * size)) is None


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    path = tmp_path / "snapshot"
    never = "it ends early, or was never a snapshot"
    assert snapshots.damage(str(path)) == "it is no longer there"
    path.write_bytes(b"")
    assert snapshots.damage(str(path)) == "it is empty"
    path.write_bytes(b"something else")
    assert snapshots.damage(str(path)) == never
    np.savez(tmp_path / "whole.npz", a=np.ones(3))
    assert snapshots.damage(str(tmp_path / "whole.npz")) is None


@pytest.fixture
def disk(monkeypatch):
    """What goes to disk, in order: ("flush", name, bytes of a file) and ("rename", from, to)."""
    events, replace = [], os.replace

    def flush(descriptor):
        found = os.fstat(descriptor)
        size = None if stat.S_ISDIR(found.st_mode) else found.st_size
        events.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), size))

    monkeypatch.setattr(os, "fsync", flush)

    def rename(source, target, **options):
        events.append(("rename", os.path.basename(source), os.path.basename(target)))
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", rename)
    return events


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads the names of open files below /proc")
@pytest.mark.parametrize("savefun", [None, lambda path, target: save_npz(path, target, compression=False)])
def test_a_snapshot_is_on_disk_before_it_has_its_name(tmp_path, disk, savefun):
    """Flushed, renamed, and the folder flushed: a power cut leaves the old file or the new one."""
    snapshots.write(str(tmp_path / "state"), Noisy(), savefun)
    last = max(i for i, event in enumerate(disk) if event[0] == "rename")
    assert disk[last][2] == "state"
    assert ("flush", disk[last][1], (tmp_path / "state").stat().st_size) in disk[:last]  # all of it
    assert disk[last + 1 :] == [("flush", tmp_path.name, None)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads the names of open files below /proc")
def test_save_npz_flushes_before_it_renames(tmp_path, disk):
    save_npz(tmp_path / "model.npz", Noisy())
    first, rename, last = disk
    assert rename[::2] == ("rename", "model.npz")
    assert first == ("flush", rename[1], (tmp_path / "model.npz").stat().st_size)
    assert last == ("flush", tmp_path.name, None)


@pytest.mark.parametrize("of_folder", [False, True])
def test_a_flush_that_fails_costs_the_new_file_alone(tmp_path, monkeypatch, of_folder):
    """A disk may turn out to be full or broken when it is flushed; some file systems cannot flush a folder."""
    path = tmp_path / "state"
    path.write_bytes(b"old")

    def flush(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_folder:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", flush)
    with contextlib.nullcontext() if of_folder else pytest.raises(OSError, match="Input/output error"):
        save_npz(path, Noisy())
    assert os.listdir(tmp_path) == ["state"]
    assert (path.read_bytes() == b"old") == (not of_folder)


@each(num_bytes=[0, 1, 63, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 20) + 2])
def test_the_checksum_of_a_file_is_that_of_all_its_bytes(num_bytes):
    data = np.random.default_rng(1).bytes(num_bytes)
    expected = hashlib.blake2b(data, digest_size=32).hexdigest().encode()
    assert snapshots._checksum(io.BytesIO(data), num_bytes) == expected
    assert snapshots._checksum(io.BytesIO(data + b"behind"), num_bytes) == expected


def test_a_seal_of_no_bytes_holds():
    seal = snapshots._SEAL + hashlib.blake2b(b"", digest_size=32).hexdigest().encode()
    assert snapshots._seal_holds(io.BytesIO(seal)) is True
    assert snapshots._seal_holds(io.BytesIO(seal[1:])) is None
    assert snapshots._seal_holds(io.BytesIO(b"x" + seal)) is False
    assert snapshots._seal_holds(io.BytesIO(b"x" * 200)) is None


def test_the_seal_is_the_comment_of_the_archive(tmp_path):
    path = tmp_path / "snapshot"
    snapshots.write(str(path), Line())
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.comment == snapshots._SEAL + hashlib.blake2b(data[:-80], digest_size=32).hexdigest().encode()
        assert len(archive.comment) == 80 and archive.testzip() is None
    assert data[-82:-80] == (80).to_bytes(2, "little") and snapshots.damage(str(path)) is None


def test_only_the_newest_snapshots_stay(tmp_path):
    full_run(tmp_path / "run.v1.5", (11, "iteration"), n_retains=3).run()
    assert sorted(os.listdir(tmp_path / "run.v1.5")) == [
        "log.jsonl",
        "snapshot_iter_10",
        "snapshot_iter_11",
        "snapshot_iter_9",
    ]


def test_a_damaged_snapshot_is_passed_over(tmp_path):
    full_run(tmp_path, (3, "iteration")).run()
    newest = tmp_path / "snapshot_iter_3"
    content = newest.read_bytes()
    numbers = np.load(newest)["updater/model:main/w"].tobytes()
    assert numbers in content
    newest.write_bytes(content.replace(numbers, bytes(8)))
    resumed = full_run(tmp_path, (3, "iteration"), autoload=True)
    with pytest.warns(UserWarning, match="snapshot_iter_3 is damaged"):
        resumed.run()
    assert resumed.updater.iteration == 3


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_snapshot_that_was_cut_off_is_passed_over(tmp_path, cut):
    full_run(tmp_path, (2, "iteration")).run()
    newest = tmp_path / "snapshot_iter_2"
    newest.write_bytes(newest.read_bytes()[: -cut or None] if cut else b"")
    with pytest.warns(UserWarning, match="damaged"):
        assert extensions.snapshots.newest(str(tmp_path)) == str(tmp_path / "snapshot_iter_1")


def test_a_full_disk_leaves_no_half_of_a_snapshot(tmp_path):
    def save(path, target):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    trainer = full_run(tmp_path, (2, "iteration"))
    trainer.run()
    before = sorted(os.listdir(tmp_path))
    resumed = full_run(tmp_path, (3, "iteration"), autoload=True, savefun=save)
    with pytest.raises(CheckpointError, match=r"snapshot_iter_3: .*No space left on device; earlier snapshots"):
        resumed.run(show_loop_exception_msg=False)
    assert sorted(os.listdir(tmp_path)) == before
    assert extensions.snapshots.is_whole(str(tmp_path / "snapshot_iter_2"))


def test_a_snapshot_of_another_architecture_is_refused(tmp_path):
    class Parabola(Line):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                import dbrdist

                self.c = dbrdist.Parameter(np.zeros(1))

    make_trainer(tmp_path, (1, "iteration"))
    for first, second in ((Line, Parabola), (Parabola, Line)):
        trainer = make_trainer(tmp_path, (1, "iteration"), model=first())
        trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
        trainer.run()
        other = make_trainer(tmp_path, (1, "iteration"), model=second())
        with pytest.raises(CheckpointError, match="model:main/c"):
            extensions.snapshots.load_newest(str(tmp_path), other)


def test_a_link_alone(tmp_path):
    trainer = make_trainer(tmp_path, (2, "iteration"))
    model = trainer.updater.get_optimizer("main").target
    trainer.extend(extensions.snapshot_object(model, "model_{.updater.iteration}"), trigger=(2, "iteration"))
    trainer.run()
    fresh = Line()
    extensions.snapshots.load(str(tmp_path / "model_2"), fresh)
    assert fresh.w.array == model.w.array


def test_snapshot_on_error_and_condition(tmp_path):
    trainer = make_trainer(tmp_path, (5, "iteration"))
    trainer.extend(extensions.snapshot(snapshot_on_error=True), trigger=(100, "iteration"))
    trainer.extend(extensions.snapshot(condition=lambda: False, filename="never"), trigger=(1, "iteration"))

    def fail(trainer):
        if trainer.updater.iteration == 2:
            raise ValueError("stop")

    trainer.extend(fail)
    with pytest.raises(ValueError, match="stop"):
        trainer.run(show_loop_exception_msg=False)
    assert os.listdir(tmp_path) == ["snapshot_iter_2"]


@pytest.mark.parametrize(
    ("filename", "out", "is_said"),
    [
        ("snap_{.updater.iteration}", "run", True), ("snap_{.updater.iteration}", "run/0", False),
        ("snap_{.updater.iteration}", "run/10/", True), ("snap_{.updater.iteration}", "run/rank00/", False),
        ("snap_0_{.updater.iteration}", "run", False), ("snap_{.updater.iteration}_of_10", "run", True),
        (lambda trainer: "snap_0", "run", False), (lambda trainer: "snap_10", "run", True),
    ],
)  # fmt: skip
def test_one_ranks_own_network_is_said_unless_its_number_stands_in_a_name(monkeypatch, filename, out, is_said):
    """The number of the step is none of a rank."""
    written = []

    def writer(name, folder, copy):
        written.append((name, folder, copy))

    writer.copy_of = lambda target: "copy"
    monkeypatch.setattr(snapshots, "owner", lambda networks: 0)
    trainer = SimpleNamespace(out=out, updater=SimpleNamespace(iteration=0))
    extension = snapshots.Snapshot({}, filename, writer=writer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert extension.save(trainer) == os.path.join(out, written[0][0])
    assert [str(w.message)[:45] for w in caught] == ["snapshot: rank 0's own network is saved, which"[:45]] * is_said
    assert written[0][1:] == (out, "copy")
