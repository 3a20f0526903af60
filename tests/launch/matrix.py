"""The table of failures: every kind in every place, with time to end, exit code, and whether the cause is named.

    sudo python tests/launch/matrix.py [--only mpich,hosts-mpich] [--kinds oom,cable] [--json FILE]

A place that cannot be had here is left out, with the reason below the table.
"""

import argparse
import json
import pathlib
import platform
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from setups import KINDS, Setup


def named(kind, run):
    """Whether the report names the cause."""
    if kind.kind is None:
        return run.code == kind.code
    failure = run.failure or {}
    found = (failure.get("kind"), failure.get("code"), run.code) == (kind.kind, kind.code, kind.code)
    rank = {"host": 2, "cable": 2}.get(kind.name, 1)
    return found and failure.get("rank") == rank and kind.words in failure["message"]


def cell(kind, run):
    code = "killed" if run.code == -9 else run.code
    return f"{run.seconds:.1f} s, {code}, {'yes' if named(kind, run) else 'NO'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(Setup.NAMES))
    parser.add_argument("--kinds", default=",".join(kind.name for kind in KINDS))
    parser.add_argument("--json", help="write the figures there too")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if kind.name in options.kinds.split(",")]
    cells, left_out, bad = {}, [], 0
    for name in options.only.split(","):
        reason = Setup.missing(name)
        if reason is not None:
            left_out.append(f"{name}: {reason}")
            continue
        setup = Setup(name)
        try:
            for kind in kinds:
                if kind.hosts_only and setup.cluster is None:
                    cells[kind.name, name] = "-"
                    continue
                run = setup.fail(kind)
                cells[kind.name, name] = cell(kind, run)
                print(f"{name} {kind.name}: {cell(kind, run)}", file=sys.stderr, flush=True)
                if not named(kind, run):
                    bad += 1
                    print(f"{run.failure}\n{run.text[-3000:]}", file=sys.stderr, flush=True)
                setup.recover(kind)
        finally:
            setup.close()
    places = [name for name in options.only.split(",") if any(key[1] == name for key in cells)]
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.system()} {platform.release()}, Python {platform.python_version()}; "
    )
    print(
        "each cell: seconds from the failure to the end of the launcher, its exit code, whether the report is right\n"
    )
    print("| failure | " + " | ".join(places) + " |\n|---" * 1 + "|---" * len(places) + "|")
    for kind in kinds:
        print(f"| {kind.text} | " + " | ".join(cells.get((kind.name, name), "") for name in places) + " |")
    for line in left_out:
        print(f"\nNot tried here: {line}")
    if options.json:
        content = {"date": time.strftime("%Y-%m-%d"), "cells": {f"{k}/{p}": text for (k, p), text in cells.items()}}
        pathlib.Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
