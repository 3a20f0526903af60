"""All tests on a GPU, then dbrdist's benchmarks beside PyTorch eager, offline, in at most 8 minutes.

    python benchmarks/gpu/all.py                       # logs, summary.json and records in $OUT, or in result/gpu
    python benchmarks/gpu/all.py --out FOLDER --seconds 300
    python benchmarks/gpu/all.py --on stand-in         # without a GPU: does it start, and does it end in time?

``compiled.py`` does the same for PyTorch's compiled steps. Each job has a limit of its own, and what it has done by
then is kept: see ``jobs.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

import jobs
from jobs import Job, python

STEPS = "benchmarks/gpu/steps.py"


def tests(on: str) -> list[Job]:
    """The files of tests/gpu, on several processors where pytest-xdist is installed."""
    together = ["-n", "8", "--dist", "loadfile"] if importlib.util.find_spec("xdist") else []
    tiny = ["tests/gpu/test_gpu_flat.py", "tests/gpu/test_gpu_devices.py"] if on != "cupy" else ["tests/gpu"]
    where = [] if on == "cupy" else ["--on", on]
    command = python("-m", "pytest", *tiny, *where, "-v", "-p", "no:cacheprovider", "--tb=short", *together)
    return [Job("tests", command, 230)]


def benchmarks(on: str, torch: list[str]) -> list[Job]:
    """What is measured, the most telling first."""
    if on != "cupy":
        few = ["--record", "--rounds", "1", "--seconds", "0", "--on", "numpy"]
        return [
            Job(
                "small float32",
                python(STEPS, "--models", "mlp", "--name", "small-float32", *torch, "--graph", *few),
                60,
            ),
            Job("memory", python("benchmarks/gpu/memory.py", *few), 30),
        ]
    few = ["--record", "--rounds", "3", "--seconds", "0.3"]
    beside = [*torch, "--graph", *few]
    return [
        _steps("resnet50", "float16", 110, *beside, batches=("16", "128", "256")),
        _steps("mlp resnet20", "float32", 50, *beside),
        _steps("lstm transformer", "float16", 60, *beside),
        Job("memory", python("benchmarks/gpu/memory.py", *few), 30),
        _steps("resnet50", "float32", 60, *beside, batches=("16", "64")),
    ]


def _steps(models: str, dtype: str, seconds: float, *words: str, batches: tuple[str, ...] = ()) -> Job:
    name = f"{models} {dtype}"
    of_batches = ["--batches", *batches] if batches else []
    chosen = ["--models", *models.split(), *of_batches, "--dtype", dtype, "--name", name.replace(" ", "-")]
    return Job(name, python(STEPS, *chosen, *words), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", help="the folder of logs, summary and records; default: $OUT, or result/gpu")
    parser.add_argument("--seconds", type=float, default=470.0, help="for all together")
    parser.add_argument("--only", choices=["tests", "benchmarks"])
    parser.add_argument("--on", choices=["cupy", "stand-in"], default="cupy", help="stand-in: a check of this command")
    parser.add_argument("--torch-python", help="interpreter that has PyTorch; default: this one, if it does")
    args = parser.parse_args()
    torch = ["--torch-python", args.torch_python] if args.torch_python else []
    if not torch and importlib.util.find_spec("torch"):
        torch = ["--torch"]
    todo = [] if args.on != "cupy" else jobs.checks()
    todo += tests(args.on) if args.only != "benchmarks" else []
    todo += benchmarks(args.on, torch) if args.only != "tests" else []
    sys.exit(jobs.run(todo, jobs.folder_of(args.out), args.seconds) > 0)


if __name__ == "__main__":
    main()
