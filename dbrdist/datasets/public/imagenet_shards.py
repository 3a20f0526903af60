"""ImageNet's tars as tar shards: one for each class, with the images as they are and the numbers of their classes."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np

from dbrdist.core.files.serializer import write_atomically
from dbrdist.datasets.image.images import PNG
from dbrdist.datasets.image.index import read_index, write_index
from dbrdist.datasets.image.index_format import FILE_NAME
from dbrdist.datasets.image.scan import scan
from dbrdist.datasets.image.tar import TarWriter, key_and_extension
from dbrdist.errors import DatasetError

ENDING = ".tar"


def write_shard(
    folder: str, wnid: str, label: int, tar: tarfile.TarFile, images: Iterable[tarfile.TarInfo]
) -> None:  # fmt: skip
    """Write the images of a class to its shard, which has its name only when it is whole."""

    def fill(file: BinaryIO) -> None:
        shard, keys = TarWriter(file), set()
        for number, image in enumerate(sorted(images, key=lambda m: os.path.basename(m.name))):
            source: Any = tar.extractfile(image)
            data = source.read()
            if len(data) != image.size:
                raise DatasetError(f"{tar.name}: the tar ends within {image.name}; download it again")
            key, _ = key_and_extension(os.fsencode(f"{wnid}/{os.path.basename(image.name)}"))
            key += b"-%d" % number if key in keys else b""  # a.png beside a.jpg
            keys.add(key)
            shard.add(key + (b".png" if data.startswith(PNG) else b".jpg"), data)
            shard.add(key + b".cls", b"%d" % label)
        shard.close()

    write_atomically(os.path.join(folder, wnid + ENDING), fill)


def write_index_of(folder: str, classes: list[str]) -> None:
    """Write the index of a folder of shards, which names all classes, those without images too."""
    write_index(os.path.join(folder, FILE_NAME), scan(folder)._replace(classes=classes))


def num_images(folder: str) -> int:
    """How many images the index of a folder has."""
    return len(read_index(os.path.join(folder, FILE_NAME)))


def remove_remains(folder: str) -> None:
    """Remove what a killed process had begun to write."""
    for name in os.listdir(folder):
        if f"{ENDING}.tmp-" in name:
            os.remove(os.path.join(folder, name))


def kind_of(folder: str) -> str | None:
    """What a folder holds, or began to: `tar shards` or `class folders`; None for neither."""
    names = [name for name in os.listdir(folder) if not name.startswith(".")]
    if any(name.endswith(ENDING) for name in names):
        return "tar shards"
    return "class folders" if any(os.path.isdir(os.path.join(folder, name)) for name in names) else None


def sizes_in(folder: str) -> dict[str, tuple[int, int]]:
    """How many images each class has, and of how many bytes, by the index; nothing without one."""
    path = os.path.join(folder, FILE_NAME)
    if not os.path.exists(path):
        return {}
    index = read_index(path)
    changed = index.changed()
    others = {name for name in os.listdir(folder) if name.endswith(ENDING)} - {shard.name for shard in index.shards}
    if changed is None and others:
        changed = f"{min(others)} is not in its index"
    if changed:
        raise DatasetError(f"{folder}: it is there already, but changed since it was made: {changed}; move it away")
    counts = np.bincount(index.labels, minlength=len(index.classes))
    sizes = np.bincount(index.labels, index.sizes, minlength=len(index.classes))
    return {name: (int(count), int(size)) for name, count, size in zip(index.classes, counts, sizes)}
