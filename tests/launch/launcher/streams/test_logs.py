"""Log files with a limit."""

import pytest
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.preparation.settings import LaunchSettings
from dbrdist_launch.launcher.streams.logs import Logs
from dbrdist_launch.launcher.streams.pieces import SPAWNED, Folder, Piece


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 3, 10, 7])
def test_full_files_give_way_to_new_ones_and_the_oldest_go(tmp_path, kept, size):
    logs, data = Logs(str(tmp_path), None, 10, kept), bytes(range(65, 65 + 37))
    for at in range(0, len(data), size):
        logs.write([Piece(0, "h", "out", data[at : at + size])])
    logs.close()
    parts = [data[at : at + 10] for at in range(0, len(data), 10)]
    names = ["rank-0.out", *(f"rank-0.out.{number}" for number in range(1, kept + 1))]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict(zip(names, reversed(parts)))


def test_one_full_file_of_each_stream_stays_where_nothing_else_is_said(tmp_path):
    logs = Logs(str(tmp_path), lambda text: None, 4)
    for letter in "abcd":
        logs.write([Piece(0, "h", "out", letter.encode() * 4)])
    logs.close()
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["cccc", "dddd"]


def test_a_file_that_was_closed_meanwhile_keeps_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr("dbrdist_launch.limits.OPEN_LOGS", 1)
    logs = Logs(str(tmp_path), None, 4, 1)
    for rank in (0, 1, 0, SPAWNED, 0):
        logs.write([Piece(rank, "h", "out", b"ab")])
    logs.close()
    assert (tmp_path / "rank-0.out").read_bytes() == b"ab" and (tmp_path / "rank-0.out.1").read_bytes() == b"abab"
    assert (tmp_path / "spawned.out").read_bytes() == b"ab"


def test_another_folder_begins_with_empty_files(tmp_path):
    logs = Logs(str(tmp_path), None, 4, 1)
    (tmp_path / "b").mkdir()
    logs.write([Piece(0, "h", "out", b"abc"), Folder(str(tmp_path / "b")), Piece(0, "h", "out", b"abc")])
    logs.close()
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["rank-0.out"]


@pytest.mark.parametrize(
    ("text", "count"), [(None, None), ("1", 1), ("500K", 512000), ("2m", 1 << 21), ("3G", 3 << 30), ("12", 12)]
)
def test_sizes(text, count):
    assert LaunchSettings(("x",), log_size=text).log_bytes == count


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1.5M", "1T", "²", "0K"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(LaunchError, match=r"--log-size .*: expected a size such as 500K, 100M or 2G"):
        LaunchSettings(("x",), log_size=text).log_bytes  # noqa: B018


def test_sixteen_troubles_are_remembered(tmp_path):
    said = []
    logs = Logs(str(tmp_path), said.append)
    for number in (*range(16), 0, 15, 16, 1, 0):
        logs._warn(f"why {number}")
    begin = f"dbrdist-launch: output in {tmp_path} is incomplete: why "
    assert said == [f"{begin}{number}" for number in (*range(16), 16, 0)]
