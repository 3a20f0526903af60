"""Jobs with events, with metrics, and jobs that Python starts."""

import json
import os
import re
import urllib.request

import dbrdist_launch
import pytest
from support import launch, popen


def strict(line):
    """JSON as every language reads it: no NaN, no half surrogate pairs."""
    found = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    json.dumps(found, ensure_ascii=False).encode()
    return found


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
