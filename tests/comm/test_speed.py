"""The size of buckets, from measured times."""

import json

import numpy as np
import pytest

from dbrdist.comm import speed


def test_a_line_is_found_again():
    sizes = [1 << 14, 1 << 18, 1 << 21]
    line = speed.fit(sizes, [1e-4 + 1e-9 * n for n in sizes])
    np.testing.assert_allclose(line, (1e-4, 1e-9), rtol=1e-6)
    assert line.bucket_bytes() == pytest.approx(19e5, rel=1e-5)  # 0.1 ms of 2 ms


def test_noise_gives_no_negative_numbers():
    assert speed.fit([1, 10], [2.0, 1.0]).seconds_per_byte == 0
    assert speed.fit([1, 10], [1.0, 20.0]).latency_seconds == 0


def test_buckets_stay_within_bounds():
    assert speed.Line(0.0, 1e-9).bucket_bytes() == 1 << 18
    assert speed.Line(1.0, 0.0).bucket_bytes() == 1 << 25


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"latency_seconds": 1}', '{"latency_seconds": NaN, "seconds_per_byte": 1}']
)
def test_a_file_that_is_not_ours_is_measured_anew(tmp_path, text):
    path = tmp_path / "line.json"
    path.write_text(text)
    assert speed._load(str(path)) is None
    speed._keep(str(path), speed.Line(1.0, 2.0), "here: 1")
    assert speed._load(str(path)) == (1.0, 2.0)
    assert json.loads(path.read_text())["cluster"] == "here: 1"
    assert [p.name for p in tmp_path.iterdir()] == ["line.json"]


def test_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    speed._keep(str(tmp_path / "file" / "x" / "y.json"), speed.Line(1.0, 2.0), "here: 1")


def test_clusters_go_by_name_hosts_and_ranks():
    assert speed._cluster(["node17", "node4", "node17", "node4"]) == "node#: 2 2"
    assert speed._cluster(["gpu-1-2"]) == "gpu-#-#: 1"
