"""Events as lines of JSON, metrics for Prometheus, and jobs that Python starts."""

import json
import os
import re
import urllib.error
import urllib.request

import dbrdist_launch
import pytest
from dbrdist_launch import api
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.records.metrics import Metrics
from dbrdist_launch.launcher.streams.events import Events
from support import launch, popen


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


def test_events_that_cannot_be_written_are_a_sentence(tmp_path):
    events = Events(str(tmp_path / "nowhere" / "x"), "mine")
    events.tell("one")
    events.close()
    assert (
        events.problem == f"--events {str(tmp_path / 'nowhere' / 'x')!r} cannot be written: No such file or directory"
    )
    Events().tell("nothing")


@pytest.mark.programs
@pytest.mark.mpiexec
def test_the_events_of_a_job(tmp_path):
    path = tmp_path / "events"
    program = 'import os, sys; sys.exit(3 if os.environ["DBRDIST_RESTART"] == "0" and os.environ["RANK"] == "1" else 0)'
    words = ["--events", path, "--max-restarts", 1, "--backoff", 0.01, "--name", "mine", "python", "-c", program]
    assert launch("-n", 2, *words).returncode == 0
    found = [strict(line) for line in path.read_text().splitlines()]
    kinds = [one["event"] for one in found]
    assert kinds[:2] == ["job_started", "attempt_started"] and kinds[-2:] == ["attempt_ended", "job_ended"]
    assert kinds.count("attempt_started") == 2 and kinds.count("rank_started") == 4 and "waiting" in kinds
    assert {one["job"] for one in found} == {"mine"}
    (failure,) = [one for one in found if one["event"] == "failure"]
    assert (failure["rank"], failure["code"], failure["kind"]) == (1, 3, "exit")
    assert [one["code"] for one in found if one["event"] == "attempt_ended"] == [3, 0]
    assert (found[-1]["state"], found[-1]["code"]) == ("done", 0)


def read(metrics, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}{path}", timeout=20) as answer:
        return answer.read().decode()


def test_metrics_are_served_in_prometheus_format():
    metrics = Metrics("0", 'a"\\\n')
    try:
        rank = Rank(3, "vm", channel=None, step=7, count=2, beat_at=1.0, fields={"loss": 0.5, "words": "x", "total": 9})
        rank.take_output("out", b"12345")
        metrics.ranks, metrics.size, metrics.restarts = {3: rank}, 4, 2
        text = read(metrics)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(metrics, "/")
    finally:
        metrics.close()
    labels = r'job_name="a\\"\\\\\?",rank="3",host="vm"'
    for pattern in (
        r'dbrdist_launch_ranks\{job_name="a\\"\\\\\?"\} 4.0', rf"dbrdist_launch_rank_step\{{{labels}\}} 7.0",
        rf"dbrdist_launch_rank_output_bytes_total\{{{labels}\}} 5.0", rf'_rank_field\{{{labels},field="loss"\}} 0.5',
        r"dbrdist_launch_restarts_total\{.*\} 2.0", rf"dbrdist_launch_rank_running\{{{labels}\}} 1.0",
    ):  # fmt: skip
        assert re.search(f"(?m){pattern}$", text), text
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) dbrdist_launch_\w+ .+|dbrdist_launch_\w+\{[^\n]*\} [\d.e+-]+", line), line
    assert 'field="words"' not in text


@pytest.mark.parametrize("place", ["", "x", "70000", "1.2.3.4", "²"])
def test_a_place_that_cannot_be_listened_at_is_refused(place):
    with pytest.raises(LaunchError, match="--metrics"):
        Metrics(place, "job")


@pytest.mark.programs
@pytest.mark.mpiexec
def test_the_metrics_of_a_job_that_runs(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    process = popen("-n", 2, "--metrics", port, "sh", "-c", "echo up; read line < go", cwd=tmp_path)
    os.mkfifo(tmp_path / "go")
    for _ in range(2):
        process.stdout.readline()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        assert re.search(r'dbrdist_launch_ranks_running\{job_name=".*"\} [12].0', answer.read().decode())
    process.terminate()
    process.communicate(timeout=40)


# ---- from Python ----------------------------------------------------------------------------------------------------


def test_options_become_the_words_of_the_command_line():
    words = api.arguments({
        "ranks": 4, "env": ["A=1", "B"], "quiet": True, "only_env": False, "inject": False, "view": None, "show": "0-1",
        "max_restarts": 3, "port": 0,
    })  # fmt: skip
    assert words == [
        "--ranks", "4", "--env", "A=1", "--env", "B", "--quiet", "--no-inject", "--show-ranks", "0-1",
        "--max-restarts", "3", "--port", "0",
    ]  # fmt: skip
    with pytest.raises(TypeError, match=r"run\(\) has no option 'rank'; expected one of backend, .*ranks"):
        api.arguments({"rank": 1})
    assert not hasattr(dbrdist_launch, "nothing") and dbrdist_launch.run is api.run


@pytest.mark.programs
@pytest.mark.mpiexec
def test_a_job_is_run_from_python():
    result = dbrdist_launch.run(["python", "-c", "print('hello'); raise SystemExit(0)"], ranks=2, capture=True)
    assert (result.code, result.state, result.failure) == (0, "done", None) and result.stdout.count("hello") == 2
    with pytest.raises(dbrdist_launch.JobError, match=r"rank 0 on .* failed first \(exit\): exit code 5") as caught:
        dbrdist_launch.run(["sh", "-c", "exit 5"], ranks=1, capture=True, check=True)
    assert caught.value.result.code == 5 and caught.value.result.attempts[0]["code"] == 5
    refused = dbrdist_launch.run("/nowhere/program", ranks=1, capture=True)
    assert (refused.code, refused.state) == (127, "refused") and "was not found" in refused.stderr
