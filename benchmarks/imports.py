"""Time of `import dbrdist, dbrdist.functions, dbrdist.links` beyond NumPy's own import. Goal: at most 0.25 s.

Fresh interpreters, alternately with NumPy alone and with NumPy and dbrdist; the difference of each pair counts.

    python benchmarks/imports.py --record
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import harness

GOAL_SECONDS = 0.25
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    for statement in STATEMENTS.values():
        about = sample(statement)  # fills the caches of files and of compiled modules
    samples: dict[str, list[float]] = {label: [] for label in STATEMENTS}
    for _ in range(args.repeats):
        for label, statement in STATEMENTS.items():
            samples[label].append(sample(statement)["seconds"])
    samples["beyond_numpy"] = [ours - numpy for ours, numpy in zip(samples["dbrdist"], samples["numpy"])]
    results: dict[str, Any] = {label: harness.summarize(s) for label, s in samples.items()}
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
