"""Events as lines of JSON."""

import json
import time

import pytest
from dbrdist_launch.launcher.streams.events import Events


def strict(line):
    """JSON as every language reads it: no NaN, no half surrogate pairs."""
    found = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    json.dumps(found, ensure_ascii=False).encode()
    return found


def test_events_are_valid_json_whatever_they_hold(tmp_path):
    events = Events(str(tmp_path / "events"), "mine")
    events.tell("one", message="a\udcffb", loss=float("nan"), deep={"x": [float("inf"), (1, 2)]}, lone="\ud800")
    events.close()
    one = strict((tmp_path / "events").read_text())
    assert one.pop("time") > 1e9
    assert one.pop("lone").isascii()
    assert one == {"event": "one", "job": "mine", "message": "a\\xffb", "loss": None, "deep": {"x": [None, [1, 2]]}}


def test_times_are_milliseconds(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1234567890.12345678)
    events = Events(str(tmp_path / "events"), "mine")
    events.tell("one")
    events.tell("two", code=3)
    events.close()
    assert not events._thread.is_alive()
    assert (tmp_path / "events").read_text() == (
        '{"time": 1234567890.123, "event": "one", "job": "mine"}\n'
        '{"time": 1234567890.123, "event": "two", "job": "mine", "code": 3}\n'
    )


def test_events_that_cannot_be_written_are_a_sentence(tmp_path):
    events = Events(str(tmp_path / "nowhere" / "x"), "mine")
    events.tell("one")
    events.close()
    assert (
        events.problem == f"--events {str(tmp_path / 'nowhere' / 'x')!r} cannot be written: No such file or directory"
    )
    Events().tell("nothing")
