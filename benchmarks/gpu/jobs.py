"""Jobs one after the other within a time limit: each has its own log, and the summary is written after each of them.

A job that takes longer than it may is asked to end (SIGTERM, after which benchmarks record what they have), and killed
some seconds later with all that it started. So nothing hangs, and an interruption leaves everything before it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_GRACE_SECONDS = 8.0  # between SIGTERM and SIGKILL
_LEAST_SECONDS = 5.0  # with less time left, a job is not begun


class Job(NamedTuple):
    """A command with its limit."""

    name: str
    command: Sequence[str]
    seconds: float
    is_needed: bool = False  # whether the others are left out where it fails


def folder_of(out: str | None) -> Path:
    """Where logs, the summary and records go: ``out``, the environment's OUT, or ``result/gpu``."""
    return Path(out or os.environ.get("OUT") or ROOT / "result" / "gpu").resolve()


def run(jobs: Sequence[Job], out: Path, seconds: float) -> int:
    """Do the jobs in order; the number of those that failed."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    results: list[dict[str, Any]] = []
    is_over = ""
    for job in jobs:
        left = end - time.monotonic() - _GRACE_SECONDS
        if is_over or left < _LEAST_SECONDS:
            results.append({"name": job.name, "status": "left out", "why": is_over or "no time was left"})
        else:
            results.append(_done(job, out, min(job.seconds, left)))
            if job.is_needed and results[-1]["status"] != "passed":
                is_over = f"{job.name} has not passed"
        _write(out, results)
        last = {"seconds": 0.0, **results[-1]}
        print("{name:<28} {status:<10} {seconds:7.1f} s  {why}".format(**last).rstrip(), flush=True)
    print(f"everything is in {out}", flush=True)
    return sum(result["status"] not in ("passed", "left out") for result in results) + bool(is_over)


def _done(job: Job, out: Path, limit: float) -> dict[str, Any]:
    """Run a job with its own log; its result."""
    path = out / f"{job.name.replace(' ', '-')}.log"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "launch"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {
        **os.environ,
        "PYTHONPATH": paths,
        "PYTHONUNBUFFERED": "1",
        "DBRDIST_RECORDS": str(out / "records"),
        "OUT": str(out),
    }
    began = time.monotonic()
    with path.open("wb") as log:
        process = subprocess.Popen(
            list(job.command), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        except BaseException:
            _end(process)
            raise
        _end(process)
    status = "too long" if code is None else "passed" if code == 0 else "failed"
    tail = path.read_text(errors="replace").strip().splitlines()[-1:]
    return {
        "name": job.name, "status": status, "seconds": round(time.monotonic() - began, 1), "code": code,
        "limit_seconds": round(limit, 1), "why": "" if status == "passed" else " ".join(tail)[:200],
        "command": " ".join(job.command), "log": path.name,
    }  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask what is left of a job to end, and kill it if it does not."""
    for number, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, 60.0)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):  # all have ended
            process.poll()
            return
        end = time.monotonic() + seconds
        while _has_members(process) and time.monotonic() < end:
            time.sleep(0.02)


def _has_members(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # or it stays a zombie of the group
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _write(out: Path, results: list[dict[str, Any]]) -> None:
    part = out / "summary.json.part"
    part.write_text(json.dumps({"jobs": results}, indent=2) + "\n")
    part.replace(out / "summary.json")


def checks() -> list[Job]:
    """Whether there is a GPU, without which nothing else begins; and each of its libraries, by the command."""
    words = "from dbrdist.core.array.gpu import presence; presence.require_gpu(); print(presence.num_gpus(), 'GPUs')"
    return [
        Job("check", python("-c", words), 60, is_needed=True),
        Job("check of libraries", python("-m", "dbrdist.cli.train", "--check-gpu"), 60),
    ]


def python(*words: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *words]
