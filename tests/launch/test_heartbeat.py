"""The page of beats: how it is found, written and read."""

import json
import os
import struct
import subprocess
import sys
import time

import pytest
from dbrdist_launch import heartbeat
from support import environment


def test_heartbeat_travels_through_the_page(tmp_path, monkeypatch):
    page = tmp_path / "page"
    page.write_bytes(bytes(heartbeat.PAGE_BYTES))
    writer = heartbeat._Writer(str(page))
    before = time.monotonic()
    writer.beat(4, {"loss": 0.5, "total": 10})
    found = heartbeat.read(page.read_bytes())
    assert (found.number, found.step, found.paused, found.fields) == (1, 4, False, {"loss": 0.5, "total": 10})
    assert before <= found.time <= time.monotonic()
    writer.pause()
    assert heartbeat.read(page.read_bytes()).paused
    writer.beat(None, {})
    assert heartbeat.read(page.read_bytes())[:2] == (2, 4)


def test_beats_go_to_the_page_where_there_is_one(monkeypatch):
    happened = []
    page = type("Page", (), {
        "beat": lambda self, *given: happened.append(given), "pause": lambda self: happened.append("pause"),
    })  # fmt: skip
    for writer, is_active in ((None, False), (page(), True)):
        monkeypatch.setattr(heartbeat, "_writer", writer)
        assert heartbeat.active() is is_active
        heartbeat.beat(7, loss=0.5, total=9)
        heartbeat.pause()
        heartbeat.beat()
    assert happened == [(7, {"loss": 0.5, "total": 9}), "pause", (None, {})]
    heartbeat._forget()
    assert not heartbeat.active()


@pytest.mark.programs
def test_heartbeat_without_a_launcher_does_nothing():
    program = "from dbrdist_launch import heartbeat as h; h.beat(1, a=2); h.pause(); print(h.active())"
    for value in ({}, {heartbeat.VARIABLE: "/nowhere"}):
        child = subprocess.run(
            [sys.executable, "-c", program], env=environment("x", **value), capture_output=True, text=True
        )
        assert child.stdout == "False\n", child.stderr


STEP = 2.0**-10


def page_of(writer):
    """(number of beats, step, fields) as a supervisor reads them from the page."""
    found = heartbeat.read(bytes(writer.page))
    return found.number, found.step, found.fields


def test_the_page_is_found_by_its_path_or_by_the_descriptor_that_came_with_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "page").write_bytes(bytes(4096))
    page, other = os.memfd_create("dbrdist-heartbeat"), os.memfd_create("another")
    for descriptor in (page, other):
        os.ftruncate(descriptor, 4096)
    monkeypatch.delenv("DBRDIST_HEARTBEAT", raising=False)
    assert heartbeat._open() is None and capsys.readouterr().err == ""
    own, stale = f"/proc/self/fd/{page}", f"/proc/self/fd/{other}"
    for words, is_found in (
        (f"{tmp_path}/page", True), (own, True), (f"{own},{other}", True), (f"{stale},{page}", True),
        (f"/proc/self/fd/9999,{page}", True), (f",{page}", True), (f"{stale},{other}", False), (stale, False),
        (f"{tmp_path}/none,{other}", False),
    ):  # fmt: skip
        monkeypatch.setenv("DBRDIST_HEARTBEAT", words)
        writer = heartbeat._open()
        assert (writer is not None) == is_found, words
        said = (
            ""
            if is_found
            else f"heartbeats do not reach the launcher: {words.partition(',')[0]} cannot be opened here\n"
        )
        assert capsys.readouterr().err == (said and f"dbrdist-launch: {said}")
        if writer is not None:
            writer.beat(7, {})
            raw = (tmp_path / "page").read_bytes() if words.endswith("page") else os.pread(page, 16, 0)
            assert struct.unpack("=qq", raw[:16]) == (1, 7)
    for descriptor in (page, other):
        os.close(descriptor)


def test_fields_are_written_ten_times_a_second_at_most(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    (tmp_path / "page").write_bytes(bytes(4096))
    writer = heartbeat._Writer(str(tmp_path / "page"))
    writer.beat(0, {"a": 0})
    began = now[0]
    for after, seen in ((0.1 - STEP, 0), (0.1 + STEP, 2), (0.15, 2), (0.25, 4)):
        now[0] = began + after
        writer.beat(writer.step + 1, {"a": writer.count})
        assert page_of(writer) == (writer.count, writer.step, {"a": seen})
    for step, kept in ((None, 4), (0.5, 0), ("x", -1), (1 << 70, (1 << 63) - 1), (-(1 << 70), -(1 << 63))):
        writer.beat(step, {})
        assert page_of(writer)[1] == kept


class Page(bytearray):
    """A page that keeps how long its fields were said to be while they were written."""

    lengths = ()

    def __setitem__(self, at, value):
        self.lengths = (*self.lengths, struct.unpack_from("=I", self, 28)[0])
        super().__setitem__(at, value)


@pytest.fixture
def writer(tmp_path):
    (tmp_path / "page").write_bytes(bytes(heartbeat.PAGE_BYTES))
    one = heartbeat._Writer(str(tmp_path / "page"))
    one.page = Page(heartbeat.PAGE_BYTES)
    return one


def test_a_reader_sees_whole_fields_or_none(writer):
    writer.write_fields({"a": 1})
    writer.write_fields({"b": "long"})
    assert writer.page.lengths == (0, 0) and heartbeat.read(writer.page).fields == {"b": "long"}
    room = heartbeat.PAGE_BYTES - 32
    for length, is_written in ((room - 9, True), (room - 8, False)):
        before = heartbeat.read(writer.page).fields
        fields = {"a": "x" * length}
        writer.write_fields(fields)
        assert (len(json.dumps(fields)) <= room) is is_written
        assert heartbeat.read(writer.page).fields == (fields if is_written else before)
    loop = []
    loop.append(loop)
    for odd in ({"a": loop}, {(1,): 2}):
        writer.write_fields(odd)
        assert heartbeat.read(writer.page).fields == {"a": "x" * (room - 9)}
    writer.write_fields({"a": {3}})
    assert heartbeat.read(writer.page).fields == {"a": "{3}"}


@pytest.mark.parametrize("data", [b"[1]", b"{", b"[" * 4000, b"\xff"])
def test_fields_that_are_being_written_are_left_out(data):
    page = bytearray(heartbeat.PAGE_BYTES)
    page[32 : 32 + len(data)] = data
    struct.pack_into("=qqd", page, 0, 3, 4, 5.0)
    for length in (0, len(data), heartbeat.PAGE_BYTES - 31, 1 << 31):
        struct.pack_into("=I", page, 28, length)
        assert heartbeat.read(page) == (3, 4, 5.0, False, {})


def test_a_rank_that_has_not_told_a_step_has_none(writer):
    assert (writer.count, writer.step) == (0, -1)
    writer.beat(None, {})
    assert heartbeat.read(writer.page)[:2] == (1, -1)
    writer.pause()
    assert heartbeat.read(writer.page).paused
    for number, (step, found) in enumerate(
        ((7, 7), (0.5, 0), (-1.5, -1), ("8", 8), ("x", -1), (float("nan"), -1), (float("inf"), -1), ([], -1),
         (1 << 70, (1 << 63) - 1), (-1 << 70, -(1 << 63)), (True, 1)), 2,
    ):  # fmt: skip
        writer.beat(step, {})
        assert heartbeat.read(writer.page)[:2] == (number, found) and not heartbeat.read(writer.page).paused
