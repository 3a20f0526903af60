"""What a newcomer waits for: from installing a wheel to an own network trained on two ranks, by the first tutorial.

A new virtual environment gets the wheel with its extras, without pip's cache, and then every file and every command of
``docs/tutorials/own-images.md`` in order. What is not counted: reading, and building the wheel, which a release does.
Goal: 5 minutes.

    python benchmarks/tutorial.py --record             # about 2 minutes
    python benchmarks/tutorial.py dbrdist-0.1.0-cp311-cp311-linux_x86_64.whl
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(harness.ROOT / "tests" / "rules"))
import tutorials  # blocks of pages, as the tests run them

PAGE = tutorials.FOLDER / "own-images.md"
EXTRAS = "mpich,image,onnx"


def timed(command: list[str] | str, folder: Path, env: dict[str, str]) -> float:
    """Seconds of a command, which must succeed."""
    began = time.perf_counter()
    done = subprocess.run(
        command, shell=isinstance(command, str), cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return time.perf_counter() - began


def built_wheel(folder: Path) -> Path:
    """A wheel of this checkout."""
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(harness.ROOT)]
    subprocess.run(words, check=True)
    return next(folder.glob("dbrdist-*.whl"))


def follow(wheel: Path, folder: Path) -> dict[str, Any]:
    """Install the wheel and run the page; seconds of the installation, of each command, and together."""
    venv, work = folder / "venv", folder / "work"
    work.mkdir()
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["PATH"] = os.pathsep.join([str(venv / "bin"), env["PATH"]])
    made = timed([sys.executable, "-m", "venv", str(venv)], folder, env)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir", f"{wheel}[{EXTRAS}]"]
    installed = timed(pip, folder, env)
    commands: dict[str, float] = {}
    for block in tutorials.blocks(PAGE):
        if block.file:
            (work / block.file).write_text(block.text)
        for command in block.commands:
            commands[command] = timed(command, work, env)
            print(f"{commands[command]:7.1f} s  {command}", flush=True)
    return {
        "venv_seconds": made,
        "install_seconds": installed,
        "commands": commands,
        "seconds": made + installed + sum(commands.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", nargs="?", type=Path, help="default: one of this checkout, built before")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = args.wheel.resolve() if args.wheel else built_wheel(folder)
        found = follow(wheel, folder)
    print(f"{found['install_seconds']:7.1f} s  pip install; {found['seconds']:.0f} s together")
    if args.record:
        print(harness.record("tutorial", {"page": PAGE.name, "extras": EXTRAS}, found))


if __name__ == "__main__":
    main()
