"""Snapshots on disk: any damage is seen, none loads, and nothing else is lost."""

import io
import os
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from training_helpers import make_trainer

from dbrdist.core.serializer import load_npz
from dbrdist.errors import CheckpointError
from dbrdist.training import extensions
from dbrdist.training.extensions import snapshots
from dbrdist.training.extensions.log_report import read_log


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
def test_a_hundred_kills_while_saving_lose_nothing(tmp_path):
    program = [sys.executable, str(Path(__file__).with_name("killed_saves.py")), str(tmp_path), "100"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 50  # half of the kills wait for a half-written file; the others come at any time
