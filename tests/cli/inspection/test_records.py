"""Tests of dbrdist.cli.inspection.records."""

from __future__ import annotations

import json
import math
import os
import shutil

import pytest

from dbrdist.cli.inspection import records
from dbrdist.cli.inspection.records import LogLines, RunReader
from dbrdist.cli.output.folder import CONFIG, LOG, RANKS, SUMMARY, TEST_EXAMPLES, WORDS
from dbrdist.cli.output.lock import Lock
from dbrdist.errors import CheckpointError
from tests.cli.inspection.records_helpers import record


def test_a_record_is_what_lies_in_the_folder(tmp_path):
    (tmp_path / SUMMARY).write_text('{"status": "finished", "seed": 3}')
    one = records.read(str(tmp_path))
    assert one[:5] == (str(tmp_path), tmp_path.name, {"status": "finished", "seed": 3}, [], "")
    (tmp_path / CONFIG).write_bytes(b"epochs: 3 # \xff\n")
    (tmp_path / LOG).write_text('{"epoch": 1}\n')
    assert records.read(str(tmp_path))[3:5] == ([{"epoch": 1}], "epochs: 3 # \ufffd\n")


def test_names_of_runs_are_paths_where_they_would_be_alike():
    found = records.distinct([record("a", []), record("b", []), record("a", [])._replace(path="other/a")])
    assert [run.name for run in found] == ["runs/a", "b", "other/a"]


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_a_reader_reads_what_is_new_and_leaves_half_a_line_for_the_next_time(tmp_path):
    (tmp_path / SUMMARY).write_text('{"status": "finished"}')
    log, reader = tmp_path / LOG, RunReader(str(tmp_path))
    assert reader.read().log == []
    append(log, '{"epoch": 1, "main/loss": 3}\n{"epo')
    assert reader.read().log == [{"epoch": 1, "main/loss": 3}]
    append(log, 'ch": 2}\n')
    run = reader.read()
    assert run.log == [{"epoch": 1, "main/loss": 3}, {"epoch": 2}] and not run.problems
    append(log, '{"epoch": 3, "main/loss": 1}\n')
    assert [list(c) for c in reader.read().log.column("main/loss")] == [[1.0, 3.0], [3.0, 1.0]]


BAD_LINES = ["[1]", "x", '"text"', "1", '{"a": ', "[" * 100_000, '{"a": "' + "x" * (1 << 20) + '"}', "\0\0", "9" * 5000]


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_line_that_is_no_object_is_left_out_and_said(tmp_path, line):
    (tmp_path / LOG).write_text(f'{{"epoch": 1}}\n{line}\n\n{{"epoch": 2}}\n')
    run = RunReader(str(tmp_path)).read()
    assert run.log == [{"epoch": 1}, {"epoch": 2}]
    assert run.problems == [f"{tmp_path / LOG}: 1 line is no JSON object and left out"]


def test_a_log_that_begins_anew_is_read_anew(tmp_path):
    (tmp_path / LOG).write_text('{"epoch": 1}\nbad\n{"epoch": 2}\n')
    reader = RunReader(str(tmp_path))
    assert len(reader.read().log) == 2
    (tmp_path / "new").write_text("".join(f'{{"epoch": {k}}}\n' for k in range(1, 6)))
    os.replace(tmp_path / "new", tmp_path / LOG)  # as a resumed run does
    run = reader.read()
    assert [e["epoch"] for e in run.log] == [1, 2, 3, 4, 5] and not run.problems
    (tmp_path / LOG).write_text('{"epoch": 9}\n')  # shorter
    assert reader.read().log == [{"epoch": 9}]
    os.remove(tmp_path / LOG)
    assert reader.read().log == []


def test_a_folder_that_is_removed_and_comes_back(tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    (place / LOG).write_text('{"epoch": 1}\n')
    (place / CONFIG).write_text("epochs: 1")
    reader = RunReader(str(place))
    assert reader.read().config == "epochs: 1"
    shutil.rmtree(place)
    run = reader.read()
    assert (run.summary, run.log, run.config) == ({"status": "gone"}, [], "")
    assert run.problems == [f"{place}: the folder was removed; it is shown again when there is a run in it"]
    place.mkdir()
    (place / LOG).write_text('{"epoch": 7}\n')
    assert reader.read().log == [{"epoch": 7}]


def test_files_that_are_no_files_are_a_sentence_or_nothing(tmp_path):
    (tmp_path / CONFIG).write_text("a: 1")
    os.mkfifo(tmp_path / LOG)
    os.mkfifo(tmp_path / WORDS)
    run = RunReader(str(tmp_path)).read()
    assert len(run.problems) == 1 and run.problems[0].startswith(f"{tmp_path / LOG}: the log cannot be read: ")
    assert run.messages == [] and run.config == "a: 1"
    os.remove(tmp_path / LOG)
    os.mkdir(tmp_path / LOG)
    assert RunReader(str(tmp_path)).read().problems == [f"{tmp_path / LOG}: the log cannot be read: Is a directory"]


def test_states_of_ranks_come_in_their_order_and_are_kept_while_one_is_written(tmp_path):
    folder = tmp_path / RANKS
    folder.mkdir()
    for rank in (10, 2, 0):
        (folder / f"{rank}.json").write_text(json.dumps({"step": rank}))
    for name in ("x.json", "-1.json", "1.txt", "0x1.json", "12345678.json", "\u0663.json"):
        (folder / name).write_text('{"step": 99}')
    reader = RunReader(str(tmp_path))
    expected = [{"step": rank, "rank": rank} for rank in (0, 2, 10)]
    assert reader.read().ranks == expected
    (folder / "2.json").write_text('{"st')
    assert reader.read().ranks == expected
    os.remove(folder / "2.json")
    assert [state["rank"] for state in reader.read().ranks] == [0, 10]


@pytest.mark.slow
def test_what_is_too_large_for_a_state_is_not_read_and_pictures_are(tmp_path):
    (tmp_path / RANKS).mkdir()
    (tmp_path / RANKS / "0.json").write_text('{"step": 1}')
    (tmp_path / RANKS / "1.json").write_text('{"step": "' + "x" * (1 << 17) + '"}')
    (tmp_path / TEST_EXAMPLES).write_text('{"first": []}'.ljust(74 << 20))
    run = RunReader(str(tmp_path)).read()
    assert run.ranks == [{"step": 1, "rank": 0}] and run.examples == {"first": []}


def test_of_the_messages_the_last_are_kept(tmp_path):
    (tmp_path / WORDS).write_text("".join(f"line {i}\n" for i in range(30_000)))
    assert RunReader(str(tmp_path)).read().messages == [f"line {i}" for i in range(29_800, 30_000)]
    (tmp_path / WORDS).write_text("x" * 100_000)  # one line without an end
    assert RunReader(str(tmp_path)).read().messages == []


def test_a_run_that_is_said_to_run_is_believed_if_its_process_is_there(tmp_path):
    (tmp_path / SUMMARY).write_text('{"status": "running"}')
    assert RunReader(str(tmp_path)).read().summary["status"] == "failed"
    lock = Lock(str(tmp_path / "run.lock"))
    lock.acquire()
    try:
        assert RunReader(str(tmp_path)).read().summary["status"] == "running"
    finally:
        lock.release()


def test_reading_needs_a_run(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="expected the folder of a run"):
            records.read(str(place))


def test_columns_grow_with_their_log():
    log = LogLines([{"a": 1, "epoch": 1}, {"b": 2.0, "epoch_detail": 1.5}])
    assert log.names() == ["a", "epoch", "b", "epoch_detail"]
    assert [list(c) for c in log.column("b")] == [[1.5], [2.0]]
    log += [{"b": None, "c": True}, {"b": 5, "epoch": 3}]
    assert log.names()[-1] == "c"
    assert [list(c) for c in log.column("b")] == [[1.5, 3.0], [2.0, 5.0]]
    assert [list(c) for c in log.column("c")] == [[], []]


def test_another_log_in_the_file_of_the_one_before_is_read_anew(tmp_path):
    def written(first, num):
        return "".join(f'{{"epoch": {k}, "elapsed_time": {first + k}}}\n' for k in range(num))

    (tmp_path / LOG).write_text(written(1.5, 3))
    reader = RunReader(str(tmp_path))
    assert len(reader.read().log) == 3
    (tmp_path / LOG).write_text(written(12.25, 9))  # longer, with the number of the file before
    run = reader.read()
    assert [e["elapsed_time"] for e in run.log] == [12.25 + k for k in range(9)] and not run.problems


@pytest.mark.parametrize(
    "value", [1e300, -1e300, 1.7976931348623157e308, 5e-324, 10**308, 0, -0.0], ids=lambda v: f"{v:g}"
)
def test_every_finite_number_can_be_drawn(value):
    assert records.number(value) == float(value) and isinstance(records.number(value), float)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**309, -(10**400), True, None, "1", [1.0]], ids=type
)
def test_what_is_no_finite_number_is_not_drawn(value):
    assert records.number(value) is None


def test_how_much_is_read_of_each_file(tmp_path, monkeypatch):
    (tmp_path / CONFIG).write_text("x" * ((1 << 20) + 1))
    start = '{"epoch": 1, "x": "'
    lines = [start + "y" * ((1 << 20) - len(start) - 3 + more) + '"}\n' for more in (0, 1)]
    (tmp_path / LOG).write_text("".join(lines))
    (tmp_path / RANKS).mkdir()
    for rank, size in ((1, 1 << 16), (2, (1 << 16) + 1), (999_999, 20), (1_000_000, 20)):
        (tmp_path / RANKS / f"{rank}.json").write_text('{"step": 1}'.ljust(size))
    text = "".join(f"{k:07}\n" for k in range(1 << 13))  # 64 KiB
    (tmp_path / WORDS).write_text(text[: 8 * 200])
    run = RunReader(str(tmp_path)).read()
    assert len(run.config) == 1 << 20 and len(run.log) == 1 and len(lines[0]) == 1 << 20
    assert run.problems == [f"{tmp_path / LOG}: 1 line is no JSON object and left out"]
    assert [state["rank"] for state in run.ranks] == [1, 999_999]
    assert run.messages == [f"{k:07}" for k in range(200)]
    whole = "first\n" + "x" * ((1 << 16) - 6)
    for more, expected in ((0, ["first", whole[6:]]), (1, ["x" * (len(whole) - 6 + 1)])):
        (tmp_path / WORDS).write_text(whole + "x" * more)  # the first line may be half of one
        assert RunReader(str(tmp_path)).read().messages == expected
    monkeypatch.setattr(records, "read_json", lambda path: {"read": os.path.basename(path)})
    for size, expected in ((1 << 27, {"read": TEST_EXAMPLES}), ((1 << 27) + 1, {})):
        with open(tmp_path / TEST_EXAMPLES, "wb") as file:
            file.truncate(size)  # takes no room on the disk
        assert RunReader(str(tmp_path)).read().examples == expected
    monkeypatch.setattr(records.os, "listdir", lambda path: [f"{k}.json" for k in range((1 << 16) + 1)])
    monkeypatch.setattr(records, "_state_in", lambda path: {"step": 1})
    assert len(RunReader(str(tmp_path)).read().ranks) == 1 << 16


def test_a_log_has_a_thousand_names_at_most():
    log = LogLines([{f"a{k}": 1.0 for k in range(999)}, {"b": 1.0}, {"c": 1.0}])
    assert log.names() == [*(f"a{k}" for k in range(999)), "b"]


def test_a_log_that_has_not_changed_is_not_read_again(tmp_path, monkeypatch):
    log, begun = tmp_path / LOG, []
    log.write_text('{"epoch": 1}\n{"epoch": 2}\n')
    (tmp_path / SUMMARY).write_text("{}")
    reader = RunReader(str(tmp_path))
    plain = reader._begin_log
    monkeypatch.setattr(reader, "_begin_log", lambda place: begun.append(place) or plain(place))
    there = os.stat(log)
    for _ in range(3):
        problems = []
        reader._read_log(problems)
        assert not problems and begun == [(there.st_dev, there.st_ino)]
    with open(log, "a") as file:
        file.write('{"epoch": 3}\n')
    reader._read_log([])
    assert len(begun) == 1
    log.write_text('{"epoch": 1}\n')  # shorter
    reader._read_log([])
    assert begun == [(there.st_dev, there.st_ino)] * 2
