"""Runs pytest in several processes, each with its part of the files: ``python tests/parts.py 3 tests --quick``.

pytest-xdist lets each worker collect all tests and send three reports of each, which takes more than most tests do.
Here a process collects its own files alone, and nothing is sent. The output of the first part is shown as it comes,
that of the others behind it. The exit code is the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
APART = {"gpu", "mpi"}  # folders in which pytest looks only where they are named
# Which marks leave a file out by a `-m` of the Makefile, where the file as a whole bears one of them.
LEFT_OUT = {"not slow": "slow|programs|mpiexec", "not programs": "programs|mpiexec"}
NO_TESTS = 5  # pytest's exit code, here of a part that had none of the chosen tests


def divided(sizes: Iterable[tuple[str, int]], num_parts: int) -> list[set[str]]:
    """Names in parts of about the same sum of sizes: the largest first, each to the part that has least so far."""
    parts: list[set[str]] = [set() for _ in range(num_parts)]
    sums = [0] * num_parts
    for name, size in sorted(sizes, key=lambda item: (-item[1], item[0])):
        k = sums.index(min(sums))
        parts[k].add(name)
        sums[k] += size
    return parts


def part(words: str) -> str:
    """``K/N`` as it is, with K from 1 to N."""
    k, _, num_parts = words.partition("/")
    if not (k.isdecimal() and num_parts.isdecimal() and 1 <= int(k) <= int(num_parts)):
        raise argparse.ArgumentTypeError(f"expected K/N with K from 1 to N, got {words!r}")
    return words


@functools.cache
def is_left_out(path: Path, markexpr: str) -> bool:
    """Whether a `-m` of the Makefile leaves out all tests of a file: the file as a whole bears one of the marks."""
    marks = LEFT_OUT.get(markexpr)
    return marks is not None and bool(
        re.search(rf"^pytestmark = .*pytest\.mark\.(?:{marks})\b", path.read_text(), re.MULTILINE)
    )


def size(path: Path, markexpr: str) -> int:
    """What a test file counts in a part: its length, or nothing if its tests do not run unless they are named."""
    is_apart = path.relative_to(HERE).parts[0] in APART or is_left_out(path, markexpr)
    return 0 if is_apart else path.stat().st_size


@functools.cache
def files_of(part: str, markexpr: str = "") -> set[str]:
    """The test files of the part ``K/N``, from 1, of those that a `-m` leaves."""
    k, num_parts = map(int, part.split("/"))
    return divided(((str(p), size(p, markexpr)) for p in HERE.rglob("test_*.py")), num_parts)[k - 1]


def main(words: Sequence[str]) -> int:
    """Run all parts; the exit code."""
    num_parts, arguments = int(words[0]), words[1:]
    command = [sys.executable, "-m", "pytest", *arguments, "--part"]
    with contextlib.ExitStack() as stack:
        outputs = [None, *(stack.enter_context(tempfile.TemporaryFile()) for _ in range(num_parts - 1))]
        started = [subprocess.Popen([*command, f"{k + 1}/{num_parts}"], stdout=f) for k, f in enumerate(outputs)]
        for process in started:
            stack.callback(process.kill)
        codes = set()
        for process, output in zip(started, outputs):
            code = process.wait()
            codes.add(code if code >= 0 else 128 - code)  # of a signal as a shell gives it: it is no success
            if output is not None:
                output.seek(0)
                shutil.copyfileobj(output, sys.stdout.buffer)
                sys.stdout.flush()
    return max(codes - {NO_TESTS}, default=NO_TESTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
