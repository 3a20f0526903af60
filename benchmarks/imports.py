"""Time of `import dbrdist, dbrdist.functions, dbrdist.links` beyond NumPy's own import. Goal: at most 0.25 s.

Fresh interpreters, alternately with NumPy alone and with NumPy and dbrdist; the difference of each pair counts.

    python benchmarks/imports.py --record

With ``--against PYTHON`` two installations are compared, this one and that of the other interpreter: processor time of
the import beyond NumPy's, in turns, and the interval of 95 % of their ratio. Goal: below 1.03.

    python benchmarks/imports.py --against OTHER/bin/python --repeats 40 --record
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import harness

GOAL_SECONDS = 0.25
GOAL_RATIO = 1.03
STATEMENTS = {
    "numpy": "import numpy",
    "dbrdist": "import numpy, dbrdist, dbrdist.functions, dbrdist.links",
}
UNWANTED = ("mpi4py", "cupy", "pydantic", "rich", "click", "yaml")
PROGRAM = """
import sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
import json
import dbrdist
print(json.dumps({{
    "seconds": seconds,
    "versions": {{"python": sys.version.split()[0], "numpy": numpy.__version__, "dbrdist": dbrdist.__version__}},
    "unwanted": [name for name in {unwanted!r} if name in sys.modules],
}}))
"""


def sample(statement: str) -> dict[str, Any]:
    """Run the statement in a fresh interpreter: seconds, versions, and what it loaded that it should not."""
    program = PROGRAM.format(statement=statement, unwanted=UNWANTED)
    paths = os.pathsep.join([str(harness.ROOT), str(harness.ROOT / "launch")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


CPU_PROGRAM = """
import time, numpy
start = time.process_time()
{statement}
print(time.process_time() - start)
"""


def cpu_seconds(python: str, statement: str) -> float:
    """Processor time of the statement beyond NumPy's import, in an installation."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [python, "-c", CPU_PROGRAM.format(statement=statement)]
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd="/", env=env)
    return float(done.stdout)


def compare(other: str, repeats: int) -> dict[str, Any]:
    """Two installations in turns, for each statement."""
    results: dict[str, Any] = {}
    for statement in ("import dbrdist", STATEMENTS["dbrdist"]):
        samples: dict[str, list[float]] = {sys.executable: [], other: []}
        for python in samples:
            cpu_seconds(python, statement)  # fills the caches of files
        for k in range(repeats):
            for python in (list(samples), list(samples)[::-1])[k % 2]:
                samples[python].append(cpu_seconds(python, statement))
        own, others = samples[sys.executable], samples[other]
        found = harness.paired_ratio(others, own)
        print(f"{statement}: {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}] of the other's; "
              f"{statistics.median(own) * 1e3:.1f} and {statistics.median(others) * 1e3:.1f} ms")  # fmt: skip
        results[statement] = {**found, "own": harness.summarize(own), "other": harness.summarize(others)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--against", metavar="PYTHON", help="the interpreter of another installation")
    args = parser.parse_args()
    if args.against:
        results = compare(args.against, args.repeats)
        if args.record:
            settings = {"num_repeats": args.repeats, "goal_ratio": GOAL_RATIO}
            print(harness.record("imports-compared", settings, results))
        return
    for statement in STATEMENTS.values():
        about = sample(statement)  # fills the caches of files and of compiled modules
    samples: dict[str, list[float]] = {label: [] for label in STATEMENTS}
    for _ in range(args.repeats):
        for label, statement in STATEMENTS.items():
            samples[label].append(sample(statement)["seconds"])
    samples["beyond_numpy"] = [ours - numpy for ours, numpy in zip(samples["dbrdist"], samples["numpy"])]
    results = {label: harness.summarize(s) for label, s in samples.items()}
    results["unwanted_modules"] = about["unwanted"]
    for label in samples:
        r = results[label]
        print(f"{label:<13} {r['median_seconds'] * 1e3:7.1f} ms  ({r['min_seconds'] * 1e3:.1f} to "
              f"{r['max_seconds'] * 1e3:.1f})")  # fmt: skip
    print(f"{'goal':<13} {GOAL_SECONDS * 1e3:7.1f} ms")
    print("loads", ", ".join(about["unwanted"]) or f"none of {', '.join(UNWANTED)}")
    if args.record:
        settings = {"statements": STATEMENTS, "num_repeats": args.repeats, "goal_seconds": GOAL_SECONDS}
        print(harness.record("imports", settings, results, about["versions"]))


if __name__ == "__main__":
    main()
