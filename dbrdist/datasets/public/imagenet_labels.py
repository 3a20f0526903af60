"""The classes of ImageNet's validation images, by the development kit or by a text file of the user's."""

from __future__ import annotations

import lzma
import os
import re
import tarfile
import zlib

from dbrdist.datasets.image.scan import EXTENSIONS
from dbrdist.datasets.public import matlab
from dbrdist.errors import DatasetError

_WNID = re.compile(r"n[0-9]{8}")
_VAL_NUMBER = re.compile(r"_val_([0-9]{8})\.")
_GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_COLUMNS = {"imageid", "image", "image_id", "filename", "file", "name", "id", "path"}  # of the header of a table
_ASKS = "give --labels ILSVRC2012_devkit_t12.tar.gz, the development kit, or a text file with lines of NAME WNID"


def read_labels(path: str | None, names: list[str], classes: list[str]) -> dict[str, str]:
    """The class of each validation image, by name; ``names`` and ``classes`` are sorted."""
    if path is None:
        raise DatasetError(f"expected the classes of the validation images, which their tar does not have: {_ASKS}")
    if os.path.isdir(path):
        raise DatasetError(f"{path}: expected a file with the classes of the validation images, got a folder: {_ASKS}")
    found = _from_kit(path, names) if _is_tar(path) else _from_text(path, names, classes)
    missing = [name for name in names if name not in found]
    if missing:
        raise DatasetError(
            f"{path}: {len(missing):,} of {len(names):,} validation images have no label, {missing[0]} for one; "
            "give the file that belongs to this tar"
        )
    unknown = sorted({found[name] for name in names} - set(classes))
    if unknown:
        raise DatasetError(
            f"{path}: expected classes of the training tar, got {unknown[0]}, which it does not have; give the file "
            "and the tar of the same data set"
        )
    return {name: found[name] for name in names}


def _is_tar(path: str) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (EOFError, zlib.error, lzma.LZMAError):  # compressed, and damaged
        return True


# ---- the development kit ---------------------------------------------------------------------------------------------


def _from_kit(path: str, names: list[str]) -> dict[str, str]:
    """Classes by the development kit: numbers in the order of the images, and what they mean in ``meta.mat``."""
    wanted: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                name = os.path.basename(member.name)
                if name in (_GROUND_TRUTH, "meta.mat") and member.isfile():
                    wanted[name] = tar.extractfile(member).read()  # type: ignore[union-attr]
        for name in (_GROUND_TRUTH, "meta.mat"):
            if name not in wanted:
                raise DatasetError(f"{path}: expected the development kit of ILSVRC 2012, but there is no {name} in it")
        wnids = _wnids(wanted[_GROUND_TRUTH], wanted["meta.mat"])
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{path}: the development kit is damaged: {error}; download it again") from error
    numbers = [_VAL_NUMBER.search(name) for name in names]
    places = [int(n[1]) - 1 for n in numbers if n] if all(numbers) else list(range(len(names)))
    if len(wnids) < len(names) or not all(0 <= place < len(wnids) for place in places):
        raise DatasetError(
            f"{path}: it has classes of {len(wnids):,} validation images, expected {len(names):,}; give the kit that "
            "belongs to this tar"
        )
    return {name: wnids[place] for name, place in zip(names, places)}


def _wnids(truth: bytes, meta: bytes) -> list[str]:
    """The class of each image, in the order of the images."""
    try:
        by_id = {int(s["ILSVRC2012_ID"].item()): str(s["WNID"]) for s in matlab.read(meta)["synsets"]}
        ids = [int(word) for word in truth.split()]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"meta.mat has no classes with ILSVRC2012_ID and WNID ({error!r})") from error
    if unknown := sorted(set(ids) - set(by_id)):
        raise ValueError(f"{_GROUND_TRUTH} has the number {unknown[0]}, which is that of no class in meta.mat")
    return [by_id[i] for i in ids]


# ---- a text file -----------------------------------------------------------------------------------------------------


def _from_text(path: str, names: list[str], classes: list[str]) -> dict[str, str]:
    lines = _lines(path)
    if lines and all(len(words) == 1 for _, words in lines):
        return _in_order(path, [words[0] for _, words in lines], names)
    known, stems = set(names), {os.path.splitext(name)[0]: name for name in names}
    found: dict[str, str] = {}
    numbers: list[int] = []
    for number, words in lines:
        name = os.path.basename(words[0])
        name = name if name in known or name.lower().endswith(EXTENSIONS) else stems.get(name, f"{name}.JPEG")
        wnid = _class_of(words[1:], classes, numbers)
        if wnid is None:
            raise DatasetError(
                f"{path}:{number}: expected an image and its class, NAME WNID, got {' '.join(words)!r:.80}; {_ASKS}"
            )
        if found.setdefault(name, wnid) != wnid:
            raise DatasetError(
                f"{path}:{number}: {name} has two classes, {found[name]} and {wnid}; expected one: remove a line"
            )
    if numbers and (min(numbers) or max(numbers) >= len(classes)):
        raise DatasetError(
            f"{path}: expected numbers of the sorted classes, from 0 to {len(classes) - 1:,}, got {min(numbers):,} to "
            f"{max(numbers):,}: if they begin at 1 or follow another order, write WNIDs instead, such as {classes[0]}"
        )
    return found


def _lines(path: str) -> list[tuple[int, list[str]]]:
    """The words of each line with its number, without comments, the header of a table, and the commands of a script."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        split = [(number, re.split(r"[\s,;\"']+", line.strip(" \t\r\n,;\"'"))) for number, line in enumerate(file, 1)]
    lines = [(number, words) for number, words in split if words[0] and not words[0].startswith("#")]
    if lines and lines[0][1][0].lower() in _COLUMNS:
        del lines[0]
    moves = [(number, words[1:]) for number, words in lines if words[0] == "mv" and len(words) == 3]
    return moves or lines


def _in_order(path: str, words: list[str], names: list[str]) -> dict[str, str]:
    """Lines of WNIDs in the order of the names, or of paths WNID/NAME."""
    if all(word.isdecimal() for word in words):
        raise DatasetError(
            f"{path}: expected a WNID beside each image, got numbers alone, which say nothing without meta.mat: give "
            "--labels ILSVRC2012_devkit_t12.tar.gz, the development kit that both come from"
        )
    paths = [word.split("/") for word in words]
    if all(len(parts) > 1 and _WNID.fullmatch(parts[-2]) for parts in paths):
        return {parts[-1]: parts[-2] for parts in paths}
    if odd := [word for word in words if not _WNID.fullmatch(word)]:
        raise DatasetError(f"{path}: expected an image and its class, NAME WNID, got {odd[0]!r:.80}; {_ASKS}")
    if len(words) != len(names):
        raise DatasetError(
            f"{path}: expected a line for each of {len(names):,} validation images, got {len(words):,}; give the file "
            "that belongs to this tar"
        )
    return dict(zip(names, words))


def _class_of(words: list[str], classes: list[str], numbers: list[int]) -> str | None:
    """The class that a line names, as WNID or number, alone or before boxes; numbers are noted."""
    if words and words[0].isdecimal():
        numbers.append(int(words[0]))
        return classes[min(numbers[-1], len(classes) - 1)]  # what is out of range is refused at the end
    wnids = {word.strip("/") for word in words if _WNID.fullmatch(word.strip("/"))}
    return wnids.pop() if len(wnids) == 1 and _WNID.fullmatch(words[0].strip("/")) else None
