"""Tests of dbrdist.datasets.public.pickled."""

from __future__ import annotations

import collections
import datetime
import io
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from dbrdist.datasets import PickleDataset, PickleDatasetWriter, open_pickle_dataset, open_pickle_dataset_writer
from dbrdist.datasets.public import pickled
from dbrdist.iterators import MultiprocessIterator
from tests.each import each
from tests.warm import ROOT


def test_pickled_examples_are_counted_from_both_ends():
    file = io.BytesIO()
    writer = pickled.PickleDatasetWriter(file)
    for letter in "abc":
        writer.write(letter)
    data = pickled.PickleDataset(io.BytesIO(file.getvalue()))
    assert [data.get_example(i) for i in range(-3, 3)] == list("abcabc")
    for i in (-4, 3):
        with pytest.raises(IndexError, match="expected an index below 3"):
            data.get_example(i)


def test_a_pickle_whose_frame_ends_with_the_file_and_not_with_a_stop():
    frame = b"\x80\x04\x95" + (5).to_bytes(8, "little") + b"\x8c\3abc"
    with pytest.raises(ValueError, match=r"cut short, at example 0 \(byte 0\): the file ends after 16 bytes"):
        pickled.PickleDataset(io.BytesIO(frame))
    long = b"\x80\x04X" + (3).to_bytes(4, "little") + b"abc"
    with pytest.raises(ValueError, match=r"cut short, at example 0 \(byte 0\): the file ends after 10 bytes"):
        pickled.PickleDataset(io.BytesIO(long))
    assert pickled.PickleDataset(io.BytesIO(long + b"."))[0] == "abc"


@each(code=[b"B", b"X", b"\x8e", b"\x96", b"\x8d"])
def test_long_values_of_a_pickle_are_passed_over_by_their_length(code):
    """Those of 4 GB and more, too: the second half of the codes says its length in 8 bytes."""
    asked, plain = [], pickled._end_by_operations

    def note(reader, at):
        asked.append(at)
        return plain(reader, at)

    width = 4 if code in b"BX" else 8
    one = b"\x80\x05" + code + (300).to_bytes(width, "little") + b"." * 300 + b"."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickled, "_end_by_operations", note)
        assert list(pickled._positions(io.BytesIO(one * 3))) == [0, len(one), 2 * len(one)]
    assert asked == [k * len(one) - 1 for k in (1, 2, 3)]
    assert len(pickled.PickleDataset(io.BytesIO(one))[0]) == 300


def test_pickles_without_a_frame():
    """So short that they have none, since protocol 4."""
    examples = [set(), None, True, (), [], {}, 0, 5, b"", frozenset(), "", 1 << 300]
    for protocol in (4, 5):
        file = io.BytesIO(b"".join(pickle.dumps(example, protocol) for example in examples))
        assert list(pickled.PickleDataset(file)) == examples


Pair = collections.namedtuple("Pair", "a b")


class Own:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Own and other.value == self.value


EXAMPLES = [
    (1, 2.0, "hello"), None, [], {}, "", b"", ".", b"." * 300, 3 + 4j, {"a": {1, 2}, "b": frozenset("x")},
    bytearray(b"ab."),
    np.arange(12.0).reshape(3, 4), np.float32(1.5), np.array(["a", "b"]), np.array([None, "x"], object), "." * 70_000,
    np.zeros(0, np.int8), np.arange(9_000), [np.arange(9000.0), "." * 66_000, b"." * 66_000], Pair(1, [2]), Own("."),
    datetime.datetime(2019, 12, 5, 1, 2), datetime.timedelta(3), Decimal("1.5"), collections.OrderedDict(a=1), 1 << 80,
    collections.Counter("abca"), Path("a/b"), slice(1, 2), range(4), True, [list(range(2_000))], np.dtype("f4"),
    np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]), np.datetime64("2020-01-01"), np.asfortranarray(np.ones((2, 3))),
]  # fmt: skip


def write(file, examples, protocol=pickle.HIGHEST_PROTOCOL):
    writer = PickleDatasetWriter(file, protocol)
    for example in examples:
        writer.write(example)
    writer.flush()
    return file


@pytest.mark.slow
@each(protocol=range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_each_protocol(protocol):
    with PickleDataset(write(io.BytesIO(), EXAMPLES, protocol)) as data:
        assert len(data) == len(EXAMPLES)
        for found, expected in zip(data, EXAMPLES):
            assert type(found) is type(expected)
            np.testing.assert_equal(found, expected)
        assert data[-1].flags.f_contiguous and data[2:4] == [[], {}]
        with pytest.raises(IndexError, match=f"below {len(EXAMPLES)}, the number of examples, got {len(EXAMPLES)}"):
            data[len(data)]


def test_ends_are_found_without_reading_everything():
    examples = [np.arange(200_000), "." * 100_000, list(range(1000))]
    file = write(io.BytesIO(), examples * 10)
    read = []

    class Counting(io.BytesIO):
        def read(self, size=-1):
            found = super().read(size)
            read.append(len(found))
            return found

    data = PickleDataset(Counting(file.getvalue()))
    assert len(data) == 30 and sum(read) < 5000
    np.testing.assert_equal(data[29], examples[2])


def test_files_by_mixed_writers(tmp_path):
    with open(tmp_path / "p", "wb") as file:
        for protocol in (5, 0, 4, 1, 2, 5, 1):
            write(file, ["text.", [1, "."], b"x."], protocol)
    with open_pickle_dataset(tmp_path / "p") as data:
        assert list(data) == ["text.", [1, "."], b"x."] * 7


def test_open_and_close(tmp_path):
    path = tmp_path / "data.pickle"
    with open_pickle_dataset_writer(path) as writer:
        writer.write((1, 2.0, "hello"))
        with pytest.raises(Exception, match="pickle"):
            writer.write(lambda: 0)
        writer.write((2, 3.0, "good-bye"))
    with open_pickle_dataset(str(path)) as data:
        assert data[1] == (2, 3.0, "good-bye") and len(data) == 2
        copy = pickle.loads(pickle.dumps(data))
        assert list(copy) == list(data)
        copy.close()
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(data.get_example, [0, 1] * 50)) == list(data) * 50
    with pytest.raises(ValueError, match="closed"):
        data[0]
    with pytest.raises(TypeError, match=r"a PickleDataset of open_pickle_dataset to send .*, got one of BytesIO"):
        pickle.dumps(PickleDataset(io.BytesIO()))
    with pytest.raises(ValueError, match="protocol from 0 to"):
        PickleDatasetWriter(io.BytesIO(), -1)

    class Stream(io.BytesIO):
        def seekable(self):
            return False

    with pytest.raises(ValueError, match="the file must be seekable"):
        PickleDataset(Stream())


@pytest.mark.slow
def test_loader_processes(tmp_path):
    with open_pickle_dataset_writer(tmp_path / "p") as writer:
        for i in range(50):
            writer.write((np.full(3, i), i))
    with open_pickle_dataset(tmp_path / "p") as data, MultiprocessIterator(data, 10, False, False, 1) as iterator:
        assert [int(label) for batch in iterator for _, label in batch] == list(range(50))


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
from dbrdist.datasets import open_pickle_dataset
data = open_pickle_dataset(sys.argv[1])
assert data[0] == "0" * 20000
place = os.lseek(data._reader.fileno(), 0, os.SEEK_CUR)
child = os.fork()
if child == 0:
    os._exit(0 if data[49] == "49" * 20000 and data[1] == "1" * 20000 else 3)
assert os.waitpid(child, 0)[1] == 0
assert os.lseek(data._reader.fileno(), 0, os.SEEK_CUR) == place  # the child has a file of its own
assert data[7] == "7" * 20000
"""


@pytest.mark.slow
def test_a_forked_process_opens_the_file_again(tmp_path):
    with open_pickle_dataset_writer(tmp_path / "p") as writer:
        for i in range(50):
            writer.write(str(i) * 20000)
    found = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path / "p")], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 0, found.stderr


def test_threads_take_turns():
    class Slow(io.BytesIO):
        def seek(self, *place):
            found = super().seek(*place)
            time.sleep(0.001)
            return found

    data = PickleDataset(write(Slow(), range(1000, 1010)))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(data.get_example, list(range(10)) * 4)) == list(range(1000, 1010)) * 4


def test_a_frame_that_ends_like_a_pickle():
    examples = [[46] * 40_000, 46, "." * 50, [46] * 33_000]  # 46 is the full stop
    assert list(PickleDataset(write(io.BytesIO(), examples))) == examples


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


HOSTILE = {
    "a system call": Calls(os.mkdir, "made-by-the-pickle"),
    "eval": Calls(eval, "open('made-by-the-pickle', 'w')"),
    "a process": Calls(subprocess.Popen, ["touch", "made-by-the-pickle"]),
    "a getattr": Calls(getattr, 1, "real"),
    "an imported class": b"\x80\x04\x8c"
    + bytes([len(__name__)])
    + __name__.encode()
    + b"\x8c\x10subprocess.Popen\x93.",
    "a class that is at home elsewhere": b"cdbrdist.datasets.pickled\nDatasetMixin\n.",
    "a function of one's own": b"c" + __name__.encode() + b"\nwrite\n.",
    "numpy's memory maps": Calls(np.memmap, "made-by-the-pickle", "u1", "w+", 0, (1,)),
    "a numpy function": Calls(np.savetxt, "made-by-the-pickle", [1]),
    "a method of a class": b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
    "a function alone": os.system,
    "a class that is not there": b"cno_such_module\nX\n.",
    "a persistent id": b"Pmade\n.",
}


@each(kind=list(HOSTILE))
def test_hostile_pickles_are_refused_in_words(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = HOSTILE[kind]
    file = io.BytesIO(pickle.dumps(1) + (bad if isinstance(bad, bytes) else pickle.dumps(bad)) + pickle.dumps(3))
    data = PickleDataset(file)
    assert len(data) == 3 and (data[0], data[2]) == (1, 3)
    with pytest.raises(ValueError, match=r"refused the pickle of example 1 in .*: it refers to .*trusted=True"):
        data[1]
    assert os.listdir(tmp_path) == []


def test_trusted_files_may_hold_functions():
    file = write(io.BytesIO(), [os.path.join, np.sum])
    assert PickleDataset(file, trusted=True)[0] is os.path.join
    with pytest.raises(ValueError, match="refused the pickle"):
        PickleDataset(file)[0]


@each(cut=[1, 2, 5, 30, 200])
def test_damaged_pickles_are_refused_in_words(cut, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "damaged.pickle"
    with open(path, "wb") as file:
        write(file, [(1, "a"), list(range(200)), "text" * 20])
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    with pytest.raises(ValueError, match=r"damaged.pickle has another thing, or is cut short, at example \d \(byte"):
        open_pickle_dataset(path)
    path.write_bytes(data + b"<html>")
    with pytest.raises(ValueError, match="cut short, at example 3"):
        open_pickle_dataset(path)


def test_an_empty_file_has_no_examples():
    assert len(PickleDataset(io.BytesIO())) == 0 and pickled._positions(io.BytesIO()).tolist() == []
