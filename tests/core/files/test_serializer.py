"""Saving and loading: one walk, no pickle, errors that name the entry, no half-written file."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter
from dbrdist.core.files import serializer
from dbrdist.core.files.serializer import (
    DictionarySerializer,
    NpzDeserializer,
    load_npz,
    missing,
    read_npz,
    save_npz,
    write_atomically,
)
from dbrdist.errors import CheckpointError, UsageWarning

# parameters without a shape, which most of these objects have, are saved as None; tests/training/test_mistakes.py
pytestmark = pytest.mark.filterwarnings("ignore:save_npz:dbrdist.errors.UsageWarning")


class Inner(dbrdist.Link):
    def __init__(self, value=1.0, dtype=np.float32):
        super().__init__()
        with self.init_scope():
            self.W = Parameter(np.full((2, 3), value, dtype))
        self.add_persistent("count", 0)
        self.add_persistent("mean", np.full(3, value))


class Outer(dbrdist.Chain):
    def __init__(self, value=1.0, dtype=np.float32):
        super().__init__()
        with self.init_scope():
            self.inner = Inner(value, dtype)
            self.lazy = Parameter(3.0)
            self.b = Parameter(np.full(4, value, dtype))


def test_npz_round_trip(tmp_path):
    source, target = Outer(2.0), Outer(0.0)
    source.inner.count = 7
    view = target.b.array
    save_npz(tmp_path / "model.npz", source)
    load_npz(tmp_path / "model.npz", target)
    np.testing.assert_array_equal(target.inner.W.array, source.inner.W.array)
    np.testing.assert_array_equal(target.inner.mean, source.inner.mean)
    assert target.inner.count == 7 and type(target.inner.count) is int
    assert target.b.array is view and (view == 2.0).all(), "arrays are filled in place"
    assert target.lazy.array is None
    assert os.listdir(tmp_path) == ["model.npz"]


def test_the_file_is_an_ordinary_npz_without_pickles(tmp_path):
    path = tmp_path / "m.npz"
    save_npz(path, Outer())
    with np.load(path, allow_pickle=False) as npz:
        assert sorted(npz) == ["b", "dbrdist.json", "inner/W", "inner/count", "inner/mean"]
        assert all(npz[k].dtype.kind != "O" for k in npz)
        np.testing.assert_array_equal(npz["inner/W"], np.ones((2, 3)))


def test_bfloat16_keeps_its_type(tmp_path):
    dtype = dbrdist.get_dtype("bfloat16")
    source, target = Inner(1.5, dtype), Inner(0.0, dtype)
    save_npz(tmp_path / "m.npz", source)
    load_npz(tmp_path / "m.npz", target)
    assert target.W.dtype == dtype and (target.W.array.astype(float) == 1.5).all()
    wide = Inner(0.0, np.float32)
    load_npz(tmp_path / "m.npz", wide)
    assert wide.W.dtype == np.float32 and (wide.W.array == 1.5).all()


def test_an_uninitialised_parameter_takes_the_saved_shape(tmp_path):
    source = Outer()
    source.lazy.initialize((5,))
    source.lazy.array[...] = np.arange(5)
    save_npz(tmp_path / "m.npz", source)
    target = Outer()
    load_npz(tmp_path / "m.npz", target)
    assert target.lazy.is_initialized and target.lazy.dtype == np.float32
    np.testing.assert_array_equal(target.lazy.array, np.arange(5))


def test_a_wider_file_does_not_change_the_type_of_a_late_parameter(tmp_path):
    np.savez(tmp_path / "m.npz", W=np.ones((2, 2)))
    link = dbrdist.Link()
    with link.init_scope():
        link.W = Parameter(0.0)
    load_npz(tmp_path / "m.npz", link)
    assert link.W.dtype == np.float32


def test_missing_entry_names_itself(tmp_path):
    saved = DictionarySerializer()
    saved.save(Outer(2.0))
    np.savez(tmp_path / "m.npz", **{k: v for k, v in saved.target.items() if v is not None and k != "inner/W"})
    target = Outer(9.0)
    with pytest.raises(CheckpointError, match="inner/W: expected this entry"):
        load_npz(tmp_path / "m.npz", target, ignore_names="lazy")
    load_npz(tmp_path / "m.npz", target, strict=False)
    assert (target.inner.W.array == 9.0).all() and (target.b.array == 2.0).all()


def test_shape_mismatch_names_key_expected_and_found(tmp_path):
    save_npz(tmp_path / "m.npz", Outer())
    target = Outer()
    target.inner.W.array = np.zeros((3, 2), np.float32)
    with pytest.raises(CheckpointError, match=r"inner/W: expected shape \(3, 2\) .*found \(2, 3\)"):
        load_npz(tmp_path / "m.npz", target)


def test_type_mismatch_names_key_expected_and_found():
    with pytest.raises(CheckpointError, match="n: expected a type that fits int64, found float32"):
        NpzDeserializer({"n": np.ones(2, np.float32)})("n", np.zeros(2, np.int64))
    with pytest.raises(CheckpointError, match=r"t: expected one int as in the object, found an array of shape \(2,\)"):
        NpzDeserializer({"t": np.ones(2)})("t", 3)


def test_path_and_ignored_names(tmp_path):
    save_npz(tmp_path / "m.npz", Outer(2.0))
    link = Inner(0.0)
    load_npz(tmp_path / "m.npz", link, path="inner/", ignore_names=["inner/mean", lambda key: key.endswith("count")])
    assert (link.W.array == 2.0).all() and (link.mean == 0.0).all()


def test_a_file_of_chainer(tmp_path):
    """Plain arrays under the same keys, and nothing about the format."""
    W = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez_compressed(tmp_path / "c.npz", W=W, mean=np.ones(3), count=np.array(4))
    link = Inner(0.0)
    load_npz(tmp_path / "c.npz", link)
    np.testing.assert_array_equal(link.W.array, W)
    assert link.count == 4


def test_pickles_are_refused(tmp_path):
    np.savez(tmp_path / "p.npz", W=np.array(None, object))
    with pytest.raises(CheckpointError, match=r"p\.npz: cannot be read"):
        load_npz(tmp_path / "p.npz", Inner())
    with pytest.raises(TypeError, match="thing: expected an array, a number, a string or None, got object"):
        DictionarySerializer()("thing", object())


@pytest.mark.parametrize("damage", ["truncate", "flip", "text", "npy", "empty"])
def test_damaged_files_are_named(tmp_path, damage):
    path = tmp_path / "d.npz"
    save_npz(path, Outer(), compression=damage != "flip")
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        at = data.index(np.ones(4, np.float32).tobytes())
        path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    elif damage == "text":
        path.write_text("not a zip file")
    elif damage == "npy":
        with open(path, "wb") as f:
            np.save(f, np.ones(3))
    else:
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"d\.npz: cannot be read as an \.npz file"):
        load_npz(path, Outer())


def test_a_file_of_a_later_format_is_refused(tmp_path):
    meta = np.frombuffer(b'{"format": 99, "dtypes": {}, "none": []}', np.uint8)
    np.savez(tmp_path / "f.npz", **{"dbrdist.json": meta})
    with pytest.raises(CheckpointError, match="found format 99; update dbrdist"):
        load_npz(tmp_path / "f.npz", Inner())


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "m.npz"
    save_npz(path, Inner(5.0))

    def write(f):
        f.write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, write)
    assert os.listdir(tmp_path) == ["m.npz"]
    link = Inner(0.0)
    load_npz(path, link)
    assert (link.W.array == 5.0).all()


def test_a_device_gets_the_bytes_and_is_not_replaced(tmp_path, monkeypatch):
    """As root, a rename would make a file of /dev/null; here it would of a link to it."""
    place = tmp_path / "null"
    place.symlink_to(os.devnull)
    save_npz(place, Inner())
    assert place.is_symlink() and os.listdir(tmp_path) == ["null"] and Path(os.devnull).is_char_device()
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    if full.exists():
        with pytest.raises(OSError, match="No space left"):
            save_npz(full, Inner())
        assert full.is_symlink() and full.is_char_device()


def test_what_is_open_already_gets_the_bytes(tmp_path):
    """As in `save_npz("/dev/stdout", ...)`, whatever stands behind it."""
    with open(tmp_path / "m.npz", "w+b") as file:
        save_npz(f"/dev/fd/{file.fileno()}", Inner(5.0))
        link = Inner(0.0)
        load_npz(tmp_path / "m.npz", link)
        assert (link.W.array == 5.0).all()
    reader, writer = os.pipe()
    write_atomically(f"/proc/self/fd/{writer}", lambda file: file.write(b"bytes"))
    assert os.read(reader, 9) == b"bytes"
    os.close(reader), os.close(writer)
    assert os.listdir(tmp_path) == ["m.npz"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_device_that_is_really_full(tmp_path):
    path = tmp_path / "m.npz"
    real_open = open

    def full(name, mode):
        real_open(name, mode).close()
        return real_open("/dev/full", mode)

    import dbrdist.core.files.serializer as module

    module.open = full
    try:
        with pytest.raises(OSError, match="No space left"):
            save_npz(path, Inner())
    finally:
        del module.open
    assert os.listdir(tmp_path) == []


def test_open_files_and_memory():
    buffer = io.BytesIO()
    save_npz(buffer, Inner(3.0))
    buffer.seek(0)
    link = Inner(0.0)
    load_npz(buffer, link)
    assert (link.W.array == 3.0).all()


def test_numbers_strings_lists_and_none():
    saved = DictionarySerializer()
    values = {"i": 3, "f": 0.5, "b": True, "s": "text", "n": None, "l": [1, 2], "t": (1.5,), "a": np.ones(2)}
    for key, value in values.items():
        assert saved["part"](key, value) is value
    load = NpzDeserializer(saved.target)["part"]
    old = {"i": 0, "f": 0.0, "b": False, "s": "", "n": None, "l": [], "t": (), "a": np.zeros(2)}
    for key, value in values.items():
        got = load(key, old[key])
        assert type(got) is type(value)
        np.testing.assert_array_equal(got, value)
    assert load("n", 5) is None
    assert load("i", None) == 3


def test_a_whole_number_takes_a_saved_fraction():
    """lr=1 that a schedule had moved to 0.5 must not come back as 0."""
    assert NpzDeserializer({"lr": np.array(0.5)})("lr", 1) == 0.5


def test_saved_arrays_are_copies():
    link = Inner(1.0)
    saved = DictionarySerializer()
    saved.save(link)
    link.W.array[...] = 9
    assert (saved.target["W"] == 1.0).all()


def test_threads_may_save_to_one_path(tmp_path):
    import threading

    errors = []

    def save():
        try:
            for _ in range(5):
                save_npz(tmp_path / "m.npz", Inner())
        except OSError as e:
            errors.append(e)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == [] and os.listdir(tmp_path) == ["m.npz"]
    load_npz(tmp_path / "m.npz", Inner(0.0))


def test_one_thread_at_a_time_reads_headers(tmp_path, monkeypatch):
    """CPython 3.11 fails in ast.literal_eval, with which NumPy reads them, when two threads are in it (gh-106905)."""
    import ast
    import threading

    save_npz(tmp_path / "m.npz", Inner())
    inside, most = [], []
    evaluate = ast.literal_eval

    def slowly(text):
        inside.append(text)
        threading.Event().wait(0.002)
        most.append(len(inside))
        inside.pop()
        return evaluate(text)

    monkeypatch.setattr(ast, "literal_eval", slowly)
    threads = [threading.Thread(target=read_npz, args=(tmp_path / "m.npz",)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(most) >= 6 and set(most) == {1}


def test_a_part_of_a_snapshot_without_its_path_is_told_where_it_is(tmp_path):
    model = dbrdist.links.Linear(3, 2)
    whole = dbrdist.Chain(model=model)
    save_npz(tmp_path / "whole.npz", whole)
    with pytest.raises(CheckpointError, match=r"the state has 'model/W': load it with path='model/'"):
        load_npz(tmp_path / "whole.npz", dbrdist.links.Linear(3, 2))
    again = dbrdist.links.Linear(3, 2)
    load_npz(tmp_path / "whole.npz", again, path="model/")
    np.testing.assert_array_equal(again.W.array, model.W.array)
    with pytest.raises(CheckpointError, match="belongs to another architecture"):
        load_npz(tmp_path / "whole.npz", dbrdist.Chain(other=dbrdist.links.Linear(3, 2)))


def archive(num_entries, num_bytes=0):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as z:
        for i in range(num_entries):
            z.writestr(f"e{i}", bytes(num_bytes))
    return file


def test_archives_have_limits(monkeypatch):
    monkeypatch.setattr(serializer, "_MAX_ENTRIES", 3)
    serializer.check_archive_size(archive(3))
    with pytest.raises(CheckpointError, match="expected at most 3 entries in an archive, found 4"):
        serializer.check_archive_size(archive(4))
    monkeypatch.setattr(serializer, "_MIN_LIMIT_BYTES", 1000)
    monkeypatch.setattr(serializer, "_MAX_FACTOR", 0)
    serializer.check_archive_size(archive(1, 1000))
    with pytest.raises(CheckpointError, match="to unpack to at most 1,000, but it claims 1,001"):
        serializer.check_archive_size(archive(1, 1001))
    small = archive(1, 5000)
    size = len(small.getvalue())
    monkeypatch.setattr(serializer, "_MAX_FACTOR", 5000 / size)
    serializer.check_archive_size(small)
    other = io.BytesIO(b"no archive")
    other.read()
    serializer.check_archive_size(other)
    assert other.tell() == 0


def test_serializers_have_to_define_both_of_their_members():
    for call in (lambda s: s["a"], lambda s: s("a", 1)):
        with pytest.raises(NotImplementedError):
            call(dbrdist.AbstractSerializer())


def test_numbers_are_loaded_as_the_type_that_they_replace():
    for value, saved, loaded in (
        (True, 1, True), (False, True, True), (1, 2.5, 2.5), (1, 2, 2), (1.0, 2, 2.0),
        (np.float32(1), 2.5, np.float32(2.5)),
    ):  # fmt: skip
        found = serializer._as_loaded("k", value, np.array(saved))
        assert found == loaded and type(found) is type(loaded)


def test_an_object_array_of_none_is_none():
    """As in a file that Chainer wrote, opened with pickles allowed."""
    entries = {"w": np.array(None), "y": np.arange(3.0)}
    load = NpzDeserializer(entries)
    assert load("w", None) is None and load("w", np.zeros(3)) is None
    y = np.zeros(3)
    assert load("y", y) is y and y.tolist() == [0, 1, 2]


def test_loading_asks_an_object_once():
    """Its serialize may do more than list entries."""

    class Counted:
        calls = 0

        def serialize(self, serializer):
            self.calls += 1
            serializer("missing", np.zeros(2))
            serializer["part"]("missing", np.zeros(2))

    file, thing = io.BytesIO(), Counted()
    save_npz(file, {"x": np.ones(2)})
    file.seek(0)
    with pytest.warns(UsageWarning, match=r"it has x, .*the object missing, part/missing"):
        load_npz(file, thing, strict=False)
    assert thing.calls == 1


def test_weights_of_a_part_are_loaded_into_that_part():
    words = missing("predictor/l1/W", iter(["l1/W", "l1/b"]))
    assert "the state has 'l1/W': load it into the part 'predictor' alone" in words
    names = ["l1/W", "l1/b", "l2/W", "l2/b"]
    assert "the state has 'l1/W', 'l1/b', 'l2/W', ...: it belongs to another arch" in missing("l3/W", iter(names))
    assert "the state has 'l1/W', 'l1/b': it belongs to another architecture" in missing("t", names[:2])
    assert "the state has no entries: it belongs" in missing("W", [])
    assert "the state has 'l2/W': a path ends with a slash, such as path='predictor/'" in missing("l2W", names)
    assert "load it with path='predictor/'" in missing("l1/W", iter(["predictor/l1/W"]))


def test_an_archive_is_looked_at_and_left_at_its_beginning():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", b"1234")
    for content in (buffer.getvalue(), b"no archive", b""):
        source = io.BytesIO(content)
        source.seek(len(content) // 2)
        serializer.check_archive_size(source)
        assert source.tell() == 0 and source.read() == content


def test_an_archive_is_looked_at_before_it_is_unpacked(tmp_path, monkeypatch):
    """One that would unpack to far more than it holds fills no memory."""
    happened = []
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    plain = np.load
    monkeypatch.setattr(serializer, "check_archive_size", lambda source: happened.append("size"))
    monkeypatch.setattr(serializer.np, "load", lambda *words, **more: happened.append("load") or plain(*words, **more))
    assert serializer.read_npz(tmp_path / "a.npz")["x"].tolist() == [0, 1, 2] and happened == ["size", "load"]


def test_what_an_object_is_described_by():
    saver = DictionarySerializer()
    assert serializer.described(saver, "kind", "of words") == "of words"
    assert {key: str(value) for key, value in saver.target.items()} == {"kind": "of words"}
    loader = NpzDeserializer(saver.target)
    assert serializer.described(loader, "kind", "other words") == "of words"
    assert serializer.described(NpzDeserializer({}), "kind", "other words") is None
