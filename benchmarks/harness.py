"""Alternating measurements, so that all candidates see the same machine.

Each candidate lives in its own process (its own interpreter and environment); the parent asks one after another for a
timed sample, round after round. A benchmark script is both sides: run plainly it is the parent; with ``--worker`` it
calls :func:`serve` with its cases. This file needs the standard library alone, so that a peer's environment can run it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = Path(os.environ.get("DBRDIST_RECORDS") or ROOT / "benchmarks" / "records")  # the folder of records


# ---- worker ---------------------------------------------------------------------------------------------------------


def serve(cases: dict[str, Callable[..., Callable[[], Any]]]) -> None:
    """Answer requests on standard input until it ends: one JSON object a line, one answer a line.

    ``make`` builds a case and runs it twice, ``time`` gives a sample in seconds per call, ``free`` forgets it,
    ``about`` gives versions and memory. ``cases`` maps names to factories; what a factory returns is timed.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    made: dict[int, Callable[[], Any]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _answer(request, cases, made)
        except Exception as e:
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(request: dict[str, Any], cases: dict[str, Any], made: dict[int, Any]) -> dict[str, Any]:
    kind, number = request["kind"], request.get("number", 0)
    if kind == "make":
        run = made[number] = cases[request["case"]](**request["arguments"])
        start = time.perf_counter()
        run()
        first = time.perf_counter() - start
        run()
        more = {"device_peak_bytes": run.peak_bytes()} if hasattr(run, "peak_bytes") else {}
        return {"first_seconds": first, **more}
    if kind == "time":
        clock = time.process_time if request.get("is_cpu_time") else time.perf_counter
        return {"seconds": _sample(made[number], request["min_seconds"], request["calls"], clock)}
    if kind == "free":
        del made[number]
        return {}
    return {
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {
            "python": platform.python_version(),
            **{n: sys.modules[n].__version__ for n in ("numpy", "torch", "cupy", "dbrdist") if n in sys.modules},
            **_ways(),
        },
    }


def _ways() -> dict[str, bool]:
    """Whether dbrdist is compiled, where this process has loaded it."""
    call = sys.modules.get("dbrdist.core.tape.call")
    return {} if call is None else {"is_compiled": not str(call.__file__).endswith(".py")}


def _sample(
    run: Callable[[], Any], min_seconds: float, calls: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The median over groups of ``calls`` calls, for at least ``min_seconds``, after one call to warm the caches.

    A case with a clock of its own, such as a GPU's, brings a method ``sample`` of this meaning.
    """
    if hasattr(run, "sample"):
        return float(run.sample(min_seconds, calls))
    run()
    times = []
    end = clock() + min_seconds
    while not times or clock() < end:
        start = clock()
        for _ in range(calls):
            run()
        times.append((clock() - start) / calls)
    return statistics.median(times)


# ---- parent ---------------------------------------------------------------------------------------------------------


def is_installed() -> bool:
    """True if this interpreter has dbrdist from elsewhere than the checkout: as users have it, compiled."""
    found = importlib.util.find_spec("dbrdist")
    return found is not None and ROOT not in Path(str(found.origin)).parents[1:2]


class Worker:
    """A process that serves one side of a benchmark script: ``python script --worker side``.

    It takes dbrdist from the checkout, or with ``installed`` from where its interpreter finds it.
    """

    def __init__(
        self,
        python: str,
        script: str,
        side: str,
        num_threads: int = 1,
        env: dict[str, str] | None = None,
        installed: bool = False,
    ):
        threads = {n: str(num_threads) for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        first = [str(ROOT / "benchmarks")] if installed else [str(ROOT), str(ROOT / "benchmarks")]
        paths = os.pathsep.join([*first, os.environ.get("PYTHONPATH", "")]).rstrip(":")
        self.side = side
        self.made: dict[str, Any] = {}  # the answer to the last make
        self._count = 0
        self._process = subprocess.Popen(
            [python, os.path.abspath(script), "--worker", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **threads, "PYTHONPATH": paths, **(env or {})},
        )

    def ask(self, kind: str, **request: Any) -> dict[str, Any]:
        """One request and its answer; RuntimeError where the worker failed or is gone."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps({"kind": kind, **request}) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self.side}: expected an answer to {kind!r}, but the process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"worker {self.side}: {answer['error']}")
        return answer

    def make(self, case: str, **arguments: Any) -> int:
        """Build a case and run it twice; its number."""
        self._count += 1
        self.made = self.ask("make", number=self._count, case=case, arguments=arguments)
        return self._count

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def compare(
    workers: dict[str, Worker],
    case: str,
    *,
    num_rounds: int = 7,
    min_seconds: float = 0.2,
    calls: int = 1,
    arguments: dict[str, Any] | None = None,
    is_cpu_time: bool = False,
) -> dict[str, dict[str, Any]]:
    """Times of one case on each worker: median, least and greatest over the rounds, and all samples, in seconds.

    ``is_cpu_time``: time of the processor, which other work on the machine disturbs less.
    """
    numbers = {label: w.make(case, **(arguments or {})) for label, w in workers.items()}
    more = {label: {k: v for k, v in w.made.items() if k == "device_peak_bytes" and v} for label, w in workers.items()}
    samples: dict[str, list[float]] = {label: [] for label in workers}
    for _ in range(num_rounds):
        for label, w in workers.items():
            time.sleep(0.03)  # let the last worker's caches and clocks settle
            request = {"min_seconds": min_seconds, "calls": calls, "is_cpu_time": is_cpu_time}
            samples[label].append(w.ask("time", number=numbers[label], **request)["seconds"])
    for label, w in workers.items():
        w.ask("free", number=numbers[label])
    return {label: {**summarize(s), **more[label]} for label, s in samples.items()}


def summarize(samples: list[float]) -> dict[str, Any]:
    """Median, extremes and the samples themselves, in seconds."""
    return {
        "median_seconds": statistics.median(samples),
        "min_seconds": min(samples),
        "max_seconds": max(samples),
        "samples": samples,
    }


def paired_ratio(other: list[float], own: list[float], num_draws: int = 2000) -> dict[str, float]:
    """The median over pairs of own time by the other's, with an interval of 95 % by resampling the pairs."""
    found = [b / a for a, b in zip(other, own)]
    draw = random.Random(0).choices
    medians = sorted(statistics.median(draw(found, k=len(found))) for _ in range(num_draws))
    low, high = (medians[round(share * (num_draws - 1))] for share in (0.025, 0.975))
    return {"ratio": statistics.median(found), "low": low, "high": high}


def commit() -> str:
    """The commit of the working tree, with ``+`` where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "HEAD") or "unknown") + ("+" if changed else "")


def machine() -> dict[str, Any]:
    """The processor, its number of cores in use, and the system."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((s.split(":", 1)[1].strip() for s in lines if s.startswith("model name")), model)
    except OSError:
        pass
    return {"cpu": model, "num_cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}


def record(name: str, settings: dict[str, Any], results: dict[str, Any], about: dict[str, Any] | None = None) -> Path:
    """Write ``benchmarks/records/NAME-DATE.json``: command, commit, machine, settings, results.

    A record of the same day is replaced if it is from the same machine; that of another stays, and this one gets a
    number behind its date.
    """
    RECORDS.mkdir(parents=True, exist_ok=True)
    here, stem = machine(), f"{name}-{date.today().isoformat()}"
    paths = (RECORDS / f"{stem}{'' if i == 1 else f'-{i}'}.json" for i in itertools.count(1))
    path = next(p for p in paths if not p.exists() or json.loads(p.read_text()).get("machine") == here)
    content = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "command": ["python", *(os.path.relpath(a, ROOT) if os.path.isfile(a) else a for a in _shown_arguments())],
        "commit": commit(),
        "machine": here,
        "load_average": [round(x, 2) for x in os.getloadavg()],  # over 1, 5 and 15 minutes: what else ran
        "settings": settings,
        "versions": about or {},
        "results": results,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _shown_arguments() -> list[str]:
    """The command line, with a peer's interpreter and folders of this machine by their names alone."""
    return [
        os.path.basename(a) if os.path.isabs(a) or (i and sys.argv[i - 1].endswith("-python")) else a
        for i, a in enumerate(sys.argv)
    ]
