"""The command `dbrdist-data`: indexes, checks and shrinks datasets of images before they are trained on."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click
import numpy as np

from dbrdist.cli.refuse import WRONG
from dbrdist.core import thread_pools
from dbrdist.datasets.index import ImageIndex, open_images, read_index, write_index
from dbrdist.datasets.index_format import FILE_NAME, VERSION
from dbrdist.datasets.scan import scan
from dbrdist.datasets.shards import Found, check_images, prepare_shards
from dbrdist.errors import DbrdistError

_SECONDS = 10.0  # between two words on how far it is
_MAX_NAMED = 1000


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Index, check and shrink datasets of images.

    ROOT is a folder with one folder of images per class, a folder of tar shards in WebDataset's layout, or the file of
    an index.
    """


_ROOT = click.argument("root", metavar="ROOT")
_THREADS = click.option("--threads", type=click.IntRange(1, 1024), help="Number of threads; one per core by default.")


@command.command()
@_ROOT
@click.option("--to", metavar="FILE", help="Where to write the index; by default in ROOT, where training finds it.")
def build(root: str, to: str | None) -> None:
    """Scan ROOT and write its index, so that no run has to scan it again."""
    contents = scan(root)
    path = os.path.join(root, FILE_NAME) if to is None else to
    write_index(path, contents)
    print("\n".join([*_description(open_images(path)), f"wrote {path}, {_size(os.path.getsize(path))}"]))


@command.command()
@_ROOT
@_THREADS
def check(root: str, threads: int | None) -> int:
    """Decode all images of ROOT and list what cannot be read. Ends with 1 if there is any."""
    return _report(check_images(open_images(root), threads or thread_pools.num_cores(), _Progress()), "good")


@command.command()
@_ROOT
@click.argument("out", metavar="OUT")
@click.option("--size", type=click.IntRange(1, 65536), default=256, show_default=True, help="Shorter side in pixels.")
@click.option("--quality", type=click.IntRange(1, 100), default=90, show_default=True, help="Quality of the JPEGs.")
@click.option("--shard-megabytes", type=click.IntRange(1), default=256, show_default=True, help="Size of a shard.")
@_THREADS
def prepare(root: str, out: str, size: int, quality: int, shard_megabytes: int, threads: int | None) -> int:
    """Write smaller copies of the images of ROOT as tar shards with an index into the folder OUT.

    What cannot be decoded is listed and left out; the command then ends with 1.
    """
    found = prepare_shards(
        open_images(root),
        out,
        size=size,
        quality=quality,
        shard_bytes=shard_megabytes * 1_000_000,
        num_threads=threads or thread_pools.num_cores(),
        progress=_Progress(),
    )
    if found.num_good:
        print("\n".join(_description(open_images(out))))
    return _report(found, f"written to {out}")


@command.command()
@_ROOT
def info(root: str) -> None:
    """Say what is in ROOT, and whether its index is up to date."""
    path = os.path.join(root, FILE_NAME) if os.path.isdir(root) else root
    if not os.path.isfile(path):
        print("\n".join([*_description(open_images(root)), "no index: every run scans it once"]))
        return
    index = read_index(path)
    state = index.changed() or "up to date"
    size = _size(os.path.getsize(path))
    print("\n".join([*_description(index), f"index {path}, version {VERSION}, {size}: {state}"]))


def _description(index: ImageIndex) -> list[str]:
    per_class = np.bincount(index.labels, minlength=len(index.classes))
    place = _counted(len(index.shards), "tar shard") if index.shards else "class folders"
    size = index.num_bytes()
    return [
        f"{index.root}: {_counted(len(index), 'image')} in {place}" + ("" if size is None else f", {_size(size)}"),
        f"{_counted(len(index.classes), 'class')} of {per_class.min():,} to {per_class.max():,} images: "
        + _some(index.classes),
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:3], "...", names[-1]])


def _size(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes" if num_bytes < 1e6 else f"{num_bytes / 1e6:,.1f} MB"


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}{'es' if noun.endswith('s') else 's'}"


def _report(found: Found, done: str) -> int:
    """Name what is bad, and give the exit code."""
    for words in found.bad[:_MAX_NAMED]:
        print(words)
    print(f"{_counted(found.num_good, 'image')} {done}, {len(found.bad):,} bad")
    return 1 if found.bad else 0


class _Progress:
    """Says now and then how far it is, and how long the rest will take."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said >= _SECONDS:
            self._said = now
            rest = (now - self._began) * (total - done) / done
            print(f"{done:,} of {total:,} images, {rest:,.0f} s left", file=sys.stderr, flush=True)


def run(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code. What a user can mend is one sentence and code 2."""
    try:
        code: Any = command.main(arguments, prog_name="dbrdist-data", standalone_mode=False)
    except click.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return WRONG
    except (DbrdistError, OSError, ValueError) as error:
        print(f"dbrdist-data: {error}", file=sys.stderr)
        return WRONG
    return code if isinstance(code, int) else 0


def main() -> None:
    """Run the command and end with its code."""
    sys.exit(run())


if __name__ == "__main__":
    main()
