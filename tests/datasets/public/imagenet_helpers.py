"""Small tars of the layout of ImageNet's, for tests."""

from __future__ import annotations

import io
import os
import tarfile

import numpy as np
import pytest

from dbrdist.cli import data
from dbrdist.datasets.public import imagenet_labels

CLASSES = ("n01440764", "n01443537", "n15075141")
TRAIN = {wnid: {f"{wnid}_{i}.JPEG": f"{wnid} {i}".encode() * (i + 1) for i in range(3)} for wnid in CLASSES}
VAL = {f"ILSVRC2012_val_{i:08d}.JPEG": f"image {i}".encode() * i for i in range(1, 6)}
OF_VAL = dict(zip(VAL, (CLASSES[k] for k in (2, 0, 0, 1, 2))))


def tar_of(files):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in files if isinstance(files, list) else files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


CLASS_TARS = {f"{w}.tar": tar_of(files) for w, files in TRAIN.items()}
WHOLE = tar_of(CLASS_TARS)
LABELS = "".join(f"{name} {wnid}\n" for name, wnid in OF_VAL.items())


def extract(tars, *words, labels="labels.txt"):
    options = [] if labels is None else ["--labels", str(tars / labels)]
    paths = [str(tars / name) for name in ("train.tar", "val.tar", "root")]
    return data.run(["imagenet", *paths, "--any", *options, *words])


def check(root):
    for wnid in CLASSES:
        assert {p.name: p.read_bytes() for p in (root / "train" / wnid).iterdir()} == TRAIN[wnid]
        expected = {name: VAL[name] for name in VAL if OF_VAL[name] == wnid}
        assert {p.name: p.read_bytes() for p in (root / "val" / wnid).iterdir()} == expected
    assert sorted(os.listdir(root)) == ["train", "val"]


def kit(ids=(3, 1, 1, 2, 3), order=(0, 1, 2), compressed=True):
    """A development kit, whose meta.mat SciPy has written; WordNet ids have numbers from 1 on in any order."""
    scipy_io = pytest.importorskip("scipy.io")
    synsets = np.zeros(
        (3, 1), [(name, object) for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "wnid_children")]
    )
    for row, k in enumerate(order):
        synsets[row, 0] = (float(k + 1), CLASSES[k], "some, words", "a longer description", np.zeros((0, 0)))
    mat = io.BytesIO()
    scipy_io.savemat(mat, {"synsets": synsets}, do_compression=compressed)
    truth = "".join(f"{i}\n" for i in ids).encode()
    folder = "ILSVRC2012_devkit_t12/data"
    return tar_of({f"{folder}/meta.mat": mat.getvalue(), f"{folder}/{imagenet_labels._GROUND_TRUTH}": truth})
