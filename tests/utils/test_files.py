"""Tests of dbrdist.utils.files."""

import os

from dbrdist import utils


def test_folders():
    with utils.tempdir(prefix="mine") as path:
        open(os.path.join(path, "file"), "w").close()
        assert os.path.basename(path).startswith("mine")
    assert not os.path.exists(path)
