"""Start jobs from Python: the options of `dbrdist-launch` as keyword arguments, the end of the job as a value."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .launcher.preparation.settings import LaunchSettings
from .launcher.records import scratch

# As `python -m dbrdist_launch`, without the working folder among the places of modules: `queue.py` may lie there. It
# asks the ranks to save and stop when the process that waits for it has been killed.
_MAIN = """
import sys
sys.path[:1] = []
sys.path.append({!r})
from dbrdist_launch import linux
from dbrdist_launch.signals import signal
linux.die_with_parent({}, signal.SIGTERM)
from dbrdist_launch.main import main
main()
"""
_PLACE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    code: int  # as in the table of exit codes
    state: str  # done, stopped, failed, or refused where nothing was started
    failure: dict[str, Any] | None  # the first cause, as in status.json
    attempts: list[dict[str, Any]] = field(default_factory=list)
    stdout: str | None = None  # with `capture`
    stderr: str | None = None


class JobError(RuntimeError):
    """A job that `run(..., check=True)` started did not end well; `result` tells how."""

    def __init__(self, text: str, result: Result) -> None:
        super().__init__(text)
        self.result = result


def run(
    command: Sequence[str | os.PathLike[str]] | str,
    *,
    capture: bool = False,
    check: bool = False,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Result:
    """Run a command as an MPI job, in a launcher of its own, and wait for its end.

    `command` is a list of words, or one word. `options` are those of the command line: `ranks=4, max_restarts=3,
    env={"SEED": "7", "HOME": None}, inject=False`, where None passes a variable on as it is. With `capture` the result
    holds the output as text; with `check` a job that does not end with code 0 raises `JobError`. `environment` replaces
    that of this process. A KeyboardInterrupt, or another exception while this waits, asks the ranks to save and stop,
    and is raised once they have; one more stops them. If this process is killed, they are asked to as well.

        result = dbrdist_launch.run(["python", "train.py"], ranks=4, log_dir="logs")
        print(result.code, result.failure and result.failure["rank"])
    """
    words = [command] if isinstance(command, str) else [os.fspath(word) for word in command]
    with scratch.folder("dbrdist-launch-run-") as folder:
        status = os.path.join(folder, "status.json")
        options = {**options, "record": options.get("record") or status}
        pipe = subprocess.PIPE if capture else None
        with subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(_PLACE, os.getpid()), *arguments(options), "--", *words],
            env=dict(os.environ if environment is None else environment), stdout=pipe, stderr=pipe,
        ) as child:  # fmt: skip
            out, err = _communicate(child)
        result = _result(child.returncode, str(options["record"]), _text(out), _text(err))
    if check and result.code != 0:
        raise JobError(_why(result), result)
    return result


def _communicate(child: subprocess.Popen[bytes]) -> tuple[bytes | None, bytes | None]:
    """What the launcher writes, until it has ended: an exception does not kill it while its ranks save."""
    try:
        return child.communicate()
    except BaseException:
        # From a terminal the launcher has the Ctrl-C itself, and a second one would end it at once.
        child.send_signal(signal.SIGTERM)
        while child.poll() is None:
            try:
                child.communicate()
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
        raise


def _text(data: bytes | None) -> str | None:
    """Every byte of it: ends of lines stay as they are, and what is no UTF-8 becomes an escape that is written back."""
    return None if data is None else data.decode("utf-8", "surrogateescape")


def arguments(options: Mapping[str, Any]) -> list[str]:
    """The words of the command line for options by their names; TypeError for a name that there is not."""
    known = {found.name: found for found in fields(LaunchSettings) if found.name != "command"}
    words: list[str] = []
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"run() has no option {name!r}; expected one of {', '.join(sorted(known))}")
        names = known[name].metadata["names"] or (f"--{name.replace('_', '-')}",)
        if value is None:
            continue
        if isinstance(value, bool):
            yes, _, no = names[0].partition("/")
            words += [yes] if value else [no] if no else []
        elif isinstance(value, Mapping):
            parts = (
                str(key) if part is None else f"{key}={part}" for key, part in value.items()
            )  # None: as it is here
            words += [word for part in parts for word in (names[-1], part)]
        elif isinstance(value, (list, tuple)):
            words += [word for part in value for word in (names[-1], str(part))]
        else:
            words += [names[-1], str(value)]
    return words


def _result(returncode: int, path: str, out: str | None, err: str | None) -> Result:
    code = returncode if returncode >= 0 else 128 - returncode
    try:
        with open(path) as file:
            status = json.load(file)
    except (OSError, ValueError):
        status = {"state": "refused", "failure": None, "attempts": []}
    return Result(code, status["state"], status["failure"], status["attempts"], out, err)


def _why(result: Result) -> str:
    failure = result.failure
    if failure is None:
        return f"the job ended with exit code {result.code} ({result.state})"
    who = f"rank {failure['rank']} on {failure['host']}" if failure["rank"] is not None else "the job"
    return f"{who} failed first ({failure['kind']}): {failure['message']}"
