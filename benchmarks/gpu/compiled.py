"""dbrdist's eager and captured steps beside PyTorch's compiled ones, offline, in at most 8 minutes.

    python benchmarks/gpu/compiled.py                  # logs, summary.json and records in $OUT, or in result/gpu

The mode 'default' of torch.compile comes first for all networks, then 'max-autotune', which takes minutes to compile a
ResNet-50; ``all.py`` measures PyTorch eager.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

import jobs
from jobs import Job, python

STEPS = "benchmarks/gpu/steps.py"
# networks, batches, type, and seconds in the modes default and max-autotune
CASES = (
    ("resnet50", ("128",), "float16", 90, 150),
    ("transformer", ("16",), "float16", 50, 60),
    ("resnet20", ("128",), "float32", 40, 60),
    ("mlp", ("8",), "float32", 25, 25),
    ("lstm", ("20",), "float16", 40, 40),
    ("resnet50", ("16",), "float16", 70, 90),
)


def peers(on: str, torch: list[str]) -> list[Job]:
    """A job for each network and mode."""
    few = ["--graph", "--record", "--rounds", "3", "--seconds", "0.3", "--on", "cupy" if on == "cupy" else "numpy"]
    return [
        Job(
            f"{model} {batches[0]} {mode}",
            python(STEPS, "--models", model, "--batches", *batches, "--dtype", dtype, *torch, "--compile", mode,
                   "--name", f"compiled-{model}-{batches[0]}-{mode}", *few),
            seconds[k],
        )
        for k, mode in enumerate(("default", "max-autotune"))
        for model, batches, dtype, *seconds in CASES
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", help="the folder of logs, summary and records; default: $OUT, or result/gpu")
    parser.add_argument("--seconds", type=float, default=470.0, help="for all together")
    parser.add_argument("--on", choices=["cupy", "stand-in"], default="cupy", help="stand-in: a check of this command")
    parser.add_argument("--torch-python", help="interpreter that has PyTorch; default: this one")
    args = parser.parse_args()
    if not args.torch_python and not importlib.util.find_spec("torch"):
        sys.exit("compiled.py compares with PyTorch, which is not installed here; name its interpreter: --torch-python")
    torch = ["--torch-python", args.torch_python] if args.torch_python else ["--torch"]
    check = [] if args.on != "cupy" else jobs.checks()
    sys.exit(jobs.run([*check, *peers(args.on, torch)], jobs.folder_of(args.out), args.seconds) > 0)


if __name__ == "__main__":
    main()
