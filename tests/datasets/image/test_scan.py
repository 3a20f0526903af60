"""Tests of dbrdist.datasets.image.scan."""

from __future__ import annotations

import pytest

from dbrdist.datasets.image import folder, scan, tar
from tests.each import each


@each(
    **{"text, label": [
        (b"0", 0), (b" 17\n", 17), (b"999999", 999_999), (b"1000000", None), (b"", None), (b"-1", None), (b"1.5", None),
        (b"7" + b" " * 63, 7), (b"7" + b" " * 64, None), (b" " * 64 + b"7", None), (b"x", None), (b"0" * 63 + b"7", 7),
    ]}
)  # fmt: skip
def test_the_class_of_an_image_is_a_number_below_a_million(text, label, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(b"before" + text + b"5 behind")
    member = tar.Member(b"a.cls", 6, len(text), True)
    if label is None:
        with pytest.raises(folder.DatasetError, match=r"a class from 0 to 999,999 in 'a.cls', got b'.{0,20}'$"):
            scan._label(str(path), member)
    else:
        assert scan._label(str(path), member) == label
