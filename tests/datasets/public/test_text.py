"""Tests of dbrdist.datasets.public.text."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dbrdist.datasets import TextDataset
from dbrdist.datasets.public import text
from dbrdist.errors import CorruptExampleError, DatasetError
from tests.each import each

TEXTS = [
    "one\ntwo\nthree\n", "one\ntwo", "", "\n", "\n\n\r\r\n\r\n", "a\r\nb\rc\nd\n\re", "\r", "\r\n",
    "ä\nあ\r\n€\r\rü\u2028x\x0b",
    "x" * 40 + "\r" + "\n" * 3 + "y" * 17 + "\r\n" + "z" * 5,
]  # fmt: skip


@each(
    content=TEXTS,
    encoding=["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "cp932", "gb18030", "utf-7", "cp037"],
    newline=[None, "", "\n", "\r", "\r\n"],
)
def test_lines_are_those_of_open(content, encoding, newline, tmp_path_factory, monkeypatch):
    if encoding in ("cp932", "cp037"):
        content = content.encode(encoding, "replace").decode(encoding)
    monkeypatch.setattr(text, "_BLOCK_BYTES", 8)
    path = tmp_path_factory.getbasetemp() / "text.txt"
    path.write_bytes(content.encode(encoding))
    with open(path, encoding=encoding, newline=newline) as file:
        expected = list(file)
    data = TextDataset(path, encoding, newline=newline)
    assert list(data) == expected and len(data) == len(expected)
    assert [data[i - len(data)] for i in range(len(data))] == expected


def test_lines_of_several_files(tmp_path):
    (tmp_path / "a").write_text("the cat\nthe dog\nno\n")
    (tmp_path / "b").write_bytes("die Katze\nder Hund\nö\n".encode("latin-1"))
    paths = [tmp_path / "a", str(tmp_path / "b")]
    data = TextDataset(paths, encoding=[None, "latin-1"])
    assert data[1] == ("the dog\n", "der Hund\n") and data[1:][1] == ("no\n", "ö\n") and len(data) == 3
    data = TextDataset(paths, ["ascii", "latin-1"], filter_func=lambda a, b: len(a) > 3 and len(b) > 3)
    assert len(data) == 2 and data[-1] == ("the dog\n", "der Hund\n")
    with pytest.raises(IndexError, match="below 2, the number of lines, got 2"):
        data[2]
    (tmp_path / "a").write_text("one\n")
    with pytest.raises(ValueError, match=r"text files of equally many lines, got .*a': 1, .*b': 3"):
        TextDataset(paths, "latin-1")


def test_a_filter_for_one_file(tmp_path):
    (tmp_path / "a").write_text("x\n\ny\n")
    data = TextDataset(str(tmp_path / "a"), filter_func=str.strip)
    assert list(data) == ["x\n", "y\n"] and len(TextDataset(str(tmp_path / "a"), filter_func=lambda _: False)) == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (([],), ValueError, "at least one text file, got none"),
        ((["a", "a"], ["utf-8"]), ValueError, "as many values of encoding as text files, 2, got 1"),
        ((["a"], None, ["strict", "ignore"]), ValueError, "values of errors as text files, 1, got 2"),
        (("a", None, None, "\n\n"), ValueError, "newline None"),
        (("a", "no-such"), LookupError, "no-such"),
        (("a", None, "no-such"), LookupError, "no-such"),
        (("a", "iso2022_kr"), ValueError, "an encoding whose lines can be told apart, got iso2022_kr"),
        (("absent",), FileNotFoundError, "absent"),
    ],
)
def test_wrong_arguments_of_text(arguments, kind, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("x\n")
    with pytest.raises(kind, match=words):
        TextDataset(*arguments)


def test_text_in_another_encoding_names_the_line(tmp_path):
    (tmp_path / "a").write_bytes(b"fine\nna\xefve\n")
    data = TextDataset(tmp_path / "a", "utf-8")
    assert data[0] == "fine\n"
    with pytest.raises(CorruptExampleError, match=r"text in utf-8 in line 2 of .*a: .*name the file's encoding"):
        data[1]
    assert TextDataset(tmp_path / "a", "utf-8", "replace")[1] == "na\ufffdve\n"


def test_a_copy_of_text_knows_the_lines(tmp_path):
    (tmp_path / "a").write_text("".join(f"line {i}\n" for i in range(1000)))
    data = TextDataset(tmp_path / "a", filter_func=lambda line: "7" in line)
    packed = pickle.dumps(data)
    copy = pickle.loads(packed)
    assert list(copy) == list(data)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(data.get_example, range(len(data)))) == list(copy)
    os.replace(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").write_text("other\n")
    assert data[0] == "line 7\n"  # the file that was counted
    with pytest.raises(DatasetError, match="a has changed since its lines were counted"):
        pickle.loads(packed)
