"""The size of buckets, from measured times."""

import json
import socket
import threading

import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.gradients import bandwidth


def test_a_line_is_found_again():
    sizes = [1 << 14, 1 << 18, 1 << 21]
    line = bandwidth.fit(sizes, [1e-4 + 1e-9 * n for n in sizes])
    np.testing.assert_allclose(line, (1e-4, 1e-9), rtol=1e-6)
    assert line.bucket_bytes() == pytest.approx(19e5, rel=1e-5)  # 0.1 ms of 2 ms


def test_noise_gives_no_negative_numbers():
    assert bandwidth.fit([1, 10], [2.0, 1.0]).seconds_per_byte == 0
    assert bandwidth.fit([1, 10], [1.0, 20.0]).latency_seconds == 0


def test_buckets_stay_within_bounds():
    assert bandwidth.Line(0.0, 1e-9).bucket_bytes() == 1 << 18
    assert bandwidth.Line(1.0, 0.0).bucket_bytes() == 1 << 25


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"latency_seconds": 1}', '{"latency_seconds": NaN, "seconds_per_byte": 1}']
)
def test_a_file_that_is_not_ours_is_measured_anew(tmp_path, text):
    path = tmp_path / "line.json"
    path.write_text(text)
    assert bandwidth._load(str(path)) is None
    bandwidth._keep(str(path), bandwidth.Line(1.0, 2.0), "here: 1")
    assert bandwidth._load(str(path)) == (1.0, 2.0)
    assert json.loads(path.read_text())["cluster"] == "here: 1"
    assert [p.name for p in tmp_path.iterdir()] == ["line.json"]


def test_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    bandwidth._keep(str(tmp_path / "file" / "x" / "y.json"), bandwidth.Line(1.0, 2.0), "here: 1")


def test_clusters_go_by_name_hosts_and_ranks():
    assert bandwidth._cluster(["node17", "node4", "node17", "node4"]) == "node#: 2 2"
    assert bandwidth._cluster(["gpu-1-2"]) == "gpu-#-#: 1"


class Timed:
    """A communicator whose reductions take 0.1 ms and a nanosecond for each byte; only rank 0 has times."""

    def __init__(self, comm):
        self.comm, self.rank, self.asked, self.reducer = comm, comm.rank, [], self
        self.allgather_obj, self.bcast_obj = comm.allgather_obj, comm.bcast_obj

    def between_hosts(self):
        return " over sockets"

    def time_reduction(self, num_bytes):
        self.asked.append(num_bytes)
        noise = [5.0, 0.0, 1.0][len(self.asked) % 3]
        return 1e-4 + 1e-9 * num_bytes + noise if self.rank == 0 else 0.0


def test_the_size_of_buckets_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    kept, keep = [], bandwidth._keep
    monkeypatch.setattr(bandwidth, "_keep", lambda *args: (kept.append(threading.current_thread().name), keep(*args)))

    def body(comm):
        timed = Timed(comm)
        return bandwidth.bucket_bytes(timed), bandwidth.bucket_bytes(timed), timed.asked

    for first, again, asked in run_threads(2, body, timeout_seconds=60):
        assert first == again == pytest.approx(19e5, rel=1e-5)  # 0.1 ms of 2 ms
        assert asked == [1 << 14] * 3 + [1 << 18] * 3 + [1 << 21] * 3
    assert kept == ["rank 0"]
    (path,) = (tmp_path / "dbrdist").iterdir()
    assert json.loads(path.read_text())["cluster"] == "node#: 2 over sockets"
