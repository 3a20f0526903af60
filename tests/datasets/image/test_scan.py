"""Tests of dbrdist.datasets.image.scan."""

from __future__ import annotations

import warnings

import pytest

from dbrdist.cli import data
from dbrdist.datasets.image import folder, scan, tar
from dbrdist.errors import UsageWarning
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


def test_images_of_other_endings_in_class_folders_are_said(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    for name in ("0.jpg", "1.JFIF", "2.webp", "3.webp", "4.txt", ".5.webp"):
        (tmp_path / "a" / name).touch()
    with pytest.warns(UsageWarning, match=r".png are left out, 3 in all, such as '.*1.JFIF', '.*[23].webp'; convert"):
        assert len(scan.scan(tmp_path).labels) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert data.run(["check", str(tmp_path)]) == 1
    assert f"warning: {tmp_path}: images of other endings than .jpg, .jpeg, .png are" in capsys.readouterr().err
