"""Small image files and tar shards for tests; the tar files are made by the standard library."""

import io
import tarfile

import numpy as np

from dbrdist.datasets.image import images


def picture(seed, height=24, width=32):
    """A smooth picture (H, W, 3) of uint8."""
    rng = np.random.default_rng(seed)
    y, x = np.ogrid[:height, :width]
    waves = [np.sin(rng.random() * y / 9 + rng.random() * 6) + np.cos(rng.random() * x / 9) for _ in range(3)]
    return (127 + 60 * np.stack(waves, -1)).astype(np.uint8)


def jpeg(seed, height=24, width=32):
    return images.encode_jpeg(picture(seed, height, width), 90)


def class_folders(root, counts=(("ant", 3), ("bee", 2))):
    """JPEGs in one folder per class; no two are equal."""
    for c, (name, count) in enumerate(counts):
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.jpg").write_bytes(jpeg(100 * c + i))
    return root


def tar(path, members, **options):
    """A tar file of (name, data)."""
    with tarfile.open(path, "w", **options) as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path
