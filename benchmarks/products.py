"""Products of float32 matrices by oneDNN's two implementations: the measurements behind a table in onednn_matmul.py.

For each layout of a (rows, depth) and b (depth, columns) and each of some sizes, the least processor time of one thread
for the product by the library's own choice (in pieces and packed, as dbrdist calls it) and by ``gemm:jit:f32``. The
table ``_GEMM_SHAPES`` should name the classes in which the second is faster.

    python benchmarks/products.py --record
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

from dbrdist.kernels.cpu import onednn_matmul

SIZES = 64, 256, 768, 3072
LONG = 12544  # rows or depth of 1x1 convolutions
MOST = 3e9  # multiplications
LAYOUTS = {True: "rows", False: "columns"}


def shapes() -> list[tuple[int, int, int]]:
    """Rows, depth and columns."""
    sizes = itertools.product((*SIZES, LONG), (*SIZES, LONG), SIZES)
    return [s for s in sizes if 1 << 21 < s[0] * s[1] * s[2] < MOST and s[:2] != (LONG, LONG)]


def ways(a: Any, b: Any, y: Any) -> dict[str, Callable[[], None]]:
    """The product by the library's choice, and by ``gemm:jit:f32``."""
    gemm = onednn_matmul.build(a, b, y, implementation=onednn_matmul.GEMM)
    usual = onednn_matmul.plan_by_default(a, b, y)
    return {"default": lambda: usual(a, b, y), "gemm": lambda: gemm.on(a, b, y)}


def least_times(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Seconds of the thread's processor time, the least of several, alternating."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row for each shape and layout."""
    rng, rows = np.random.default_rng(0), []
    for (m, k, n), a_in_rows, b_in_rows in itertools.product(shapes(), LAYOUTS, LAYOUTS):
        a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
        a, b = a if a_in_rows else np.asfortranarray(a), b if b_in_rows else np.asfortranarray(b)
        times = least_times(ways(a, b, np.empty((m, n), np.float32)), max(repeats, int(repeats * 2e7 / (m * k * n))))
        rows.append(
            {
                "rows": m, "depth": k, "columns": n, "a": LAYOUTS[a_in_rows], "b": LAYOUTS[b_in_rows],
                "ratio": round(times["gemm"] / times["default"], 3), "is_chosen": onednn_matmul.is_for_gemm(a, b),
                "gflops": round(2e-9 * m * k * n / min(times.values()), 1),
            }
        )  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each layout the median ratio of what the table takes and leaves."""
    found: dict[str, Any] = {}
    for row in rows:
        for chosen in (True, False):
            name = f"a in {row['a']}, b in {row['b']}: {'taken' if chosen else 'left'}"
            if row["is_chosen"] == chosen:
                found.setdefault(name, []).append(row["ratio"])
    return {
        n: {"count": len(r), "median": statistics.median(r), "least": min(r), "most": max(r)} for n, r in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    rows = measure(args.repeats)
    found = summary(rows)
    for name, numbers in sorted(found.items()):
        print(f"{name:<40} {numbers}")
    if args.record:
        results = {"summary": found, "rows": rows}
        print(harness.record("products", {"repeats": args.repeats}, results, {"numpy": np.__version__}))


if __name__ == "__main__":
    main()
