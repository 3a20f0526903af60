"""Tests of dbrdist.datasets.image.index_format."""

from __future__ import annotations

import numpy as np

from dbrdist.datasets.image import index_format


def test_sizes_of_images_in_shards_fit_their_column():
    assert np.dtype(dict(index_format.IN_SHARDS)["sizes"]).itemsize == 4
    assert np.iinfo("u4").max == index_format.MAX_IMAGE_BYTES
