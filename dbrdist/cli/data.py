"""The command `dbrdist-data`: indexes, checks and shrinks datasets of images before they are trained on."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take their time
    from dbrdist_launch import entry

    entry.data()

import os
import sys
import time

import click
import numpy as np
from dbrdist_launch import entry

from dbrdist.cli.output.console import Console
from dbrdist.cli.output.interrupts import Group, call
from dbrdist.cli.output.refuse import WRONG
from dbrdist.cli.output.warned import Warned
from dbrdist.cli.output.words import said
from dbrdist.core.array import thread_pools
from dbrdist.datasets.image.index import ImageIndex, open_images, read_index, write_index
from dbrdist.datasets.image.index_format import FILE_NAME, VERSION
from dbrdist.datasets.image.scan import ignored_files, scan
from dbrdist.datasets.image.shards import Found, check_images, prepare_shards
from dbrdist.datasets.public.imagenet import extract
from dbrdist.errors import DbrdistError

_SECONDS = 10.0  # between two words on how far it is
_MAX_NAMED = 1000


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
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
    _print("\n".join([*_description(open_images(path)), f"wrote {path}, {_size(os.path.getsize(path))}"]))


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
        _print("\n".join(_description(open_images(out))))
    return _report(found, f"written to {out}")


@command.command()
@click.argument("train", metavar="TRAIN.tar")
@click.argument("val", metavar="VAL.tar")
@_ROOT
@click.option(
    "--labels", metavar="FILE", help="Classes of the validation images: the development kit, or lines of NAME WNID."
)
@click.option("--shards", is_flag=True, help="Make a tar shard for each class, with an index, instead of folders.")
@click.option("--any", "is_any", is_flag=True, help="Take tars other than those of ILSVRC 2012: no sizes, no counts.")
@click.option("--no-checksums", is_flag=True, help="Compare sizes and counts, but not the MD5 of both tars.")
def imagenet(
    train: str, val: str, root: str, labels: str | None, shards: bool, is_any: bool, no_checksums: bool
) -> int:
    """Extract ImageNet's tars to ROOT/train/WNID/ and ROOT/val/WNID/, or to tar shards.

    The same command continues after an interruption. What is no image is listed and left out.
    """
    last = [time.monotonic()]

    def say(words: str) -> None:
        if not words.startswith(("train: ", "val: ")) or time.monotonic() - last[0] >= _SECONDS:
            last[0] = time.monotonic()
            print(words, file=sys.stderr, flush=True)

    checked = {"is_official": not is_any, "checksums": not no_checksums}
    made = extract(train, val, root, labels, shards=shards, say=say, **checked)
    for skipped in made.skipped[:_MAX_NAMED]:
        _print(f"{skipped.tar}: {skipped.name} {skipped.reason} and was left out")
    if made.odd:
        images = f"{_counted(len(made.odd), 'image')} beginning as neither JPEG nor PNG, {made.odd[0]} for one"
        _print(f"{images}: dbrdist-data check {root}/train and {root}/val name those that cannot be read")
    _print(
        f"{root}: {_counted(made.num_train, 'training image')} and {_counted(made.num_val, 'validation image')} of "
        f"{_counted(made.num_classes, 'class')}, {len(made.skipped):,} entries left out"
    )
    return 0


@command.command()
@_ROOT
def info(root: str) -> None:
    """Say what is in ROOT, and whether its index is up to date."""
    path = os.path.join(root, FILE_NAME) if os.path.isdir(root) else root
    if not os.path.isfile(path):
        _print("\n".join([*_description(open_images(root)), *_ignored(root), "no index: every run scans it once"]))
        return
    index = read_index(path)
    state = index.changed() or "up to date"
    size = _size(os.path.getsize(path))
    about = f"index {path}, version {VERSION}, {size}: {state}"
    _print("\n".join([*_description(index), *_ignored(index.root), about]))


def _description(index: ImageIndex) -> list[str]:
    per_class = np.bincount(index.labels, minlength=len(index.classes))
    place = _counted(len(index.shards), "tar shard") if index.shards else "class folders"
    size = index.num_bytes()
    return [
        f"{index.root}: {_counted(len(index), 'image')} in {place}" + ("" if size is None else f", {_size(size)}"),
        f"{_counted(len(index.classes), 'class')} of {per_class.min():,} to {per_class.max():,} images: "
        + _some(index.classes),
    ]


def _ignored(root: str | os.PathLike[str]) -> list[str]:
    """A line on the files that are no images of the dataset, if there are any."""
    if not os.path.isdir(root):
        return []
    endings, below = ignored_files(os.fspath(root))
    parts = [f"{n:,} with {ending}" for ending, n in sorted(endings.items(), key=lambda pair: -pair[1])]
    parts += [f"{below:,} in folders below the class folders"] if below else []
    number = sum(endings.values()) + below
    return [f"{_counted(number, 'file')} ignored: {', '.join(parts)}"] if number else []


def _print(words: str) -> None:
    """Print, also names of files that are no UTF-8."""
    print(words.encode(errors="backslashreplace").decode())


def _some(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:3], "...", names[-1]])


def _size(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes" if num_bytes < 1e6 else f"{num_bytes / 1e6:,.1f} MB"


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}{'es' if noun.endswith('s') else 's'}"


def _report(found: Found, done: str) -> int:
    """Name what is bad, and give the exit code."""
    for words in found.bad[:_MAX_NAMED]:
        _print(words)
    _print(f"{_counted(found.num_good, 'image')} {done}, {len(found.bad):,} bad")
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
        with Warned(0, Console()).listening():
            code = call(command, arguments, prog_name="dbrdist-data")
    except (click.Abort, KeyboardInterrupt):
        print("dbrdist-data: interrupted", file=sys.stderr)
        return entry.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return WRONG
    except (DbrdistError, OSError, ValueError, EOFError) as error:
        print(f"dbrdist-data: {said(error)}", file=sys.stderr)
        return WRONG
    return code if isinstance(code, int) else 0


def main() -> None:
    """Run the command and end with its code."""
    entry.protect_streams()
    sys.exit(run())
