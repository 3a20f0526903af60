"""The doctor: findings with what to do, exit 1 if a job would fail, and a measured network."""

import json
import sys

import pytest
from dbrdist_launch.backends.job import Host
from dbrdist_launch.doctor import checks, record
from dbrdist_launch.doctor.cli import _allocation
from dbrdist_launch.doctor.fit import allreduce_seconds, latency_and_bandwidth, parse_count
from facts import FACTS, said
from support import ROOT, environment

pytestmark = pytest.mark.slow


def test_a_sound_host_has_only_good_findings():
    levels, _ = said(checks.memory_and_limits, FACTS, 8)
    assert {level for level, _ in levels} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "expected", "words"),
    [
        ({"shm_free_bytes": 1 << 20}, ("FAIL", "shared memory"), "--shm-size"),
        ({"shm_bytes": 64 << 20}, ("warn", "shared memory"), "67.1 MB"),
        ({"files": 1024}, ("warn", "open files"), "ulimit -n"),
        ({"infiniband": ["mlx5_0"], "memlock": 65536}, ("warn", "locked memory"), "ulimit -l unlimited"),
        ({"infiniband": ["mlx5_0"]}, ("warn", "fork"), "RDMAV_FORK_SAFE"),
        ({"cores": 2}, ("warn", "cores"), "8 ranks on 2 cores"),
        ({"gpus": 4}, ("warn", "GPUs"), "4 for 8 ranks"),
    ],
)
def test_what_is_wrong_with_a_host_is_named_with_what_to_do(changes, expected, words):
    levels, text = said(checks.memory_and_limits, {**FACTS, **changes}, 8)
    assert expected in levels
    assert words in text


def test_hosts_that_differ_are_named():
    other = {**FACTS, "host": "b", "python": "3.12.1", "packages": {"numpy": "2.4", "mpi4py": "4.1"}}
    levels, text = said(checks.alike, FACTS, other)
    assert levels == [("FAIL", "alike"), ("FAIL", "alike")]
    assert "b has Python 3.12.1, a 3.11.7" in text and "mpi4py: b 4.1, a not installed" in text
    assert said(checks.alike, FACTS, {**FACTS, "host": "b"})[0] == [("ok", "alike")]


def test_clock_offset_counts_beyond_its_doubt():
    assert said(checks.clock, "b", 5.0, 0.1)[0] == [("warn", "clock")]
    assert said(checks.clock, "b", 1.05, 0.1)[0] == [("ok", "clock")]


def test_world_of_one_fails_and_slow_interface_warns():
    job = {"size": 1, "hosts": ["a"], "library": "x", "thread_level": 3, "thread_multiple": 3}
    assert said(checks.mpi_job, job, 2)[0] == [("FAIL", "MPI job")]
    entry = {"latency_seconds": 1e-6, "bandwidth_bytes_per_second": 1e9, "ranks": 2}
    entry.update({f"allreduce_{key}": value for key, value in list(entry.items())[:2]})
    levels, text = said(checks.network, entry, ["10.0.0.1"], [FACTS])
    assert levels[-1] == ("warn", "interface") and "--interface ib0" in text


def test_fit_finds_latency_and_bandwidth_again():
    points = [(size, 5e-6 + size / 2e9) for size in (8, 512, 32768, 1 << 20, 4 << 20)]
    latency, bandwidth = latency_and_bandwidth(points)
    assert latency == pytest.approx(5e-6, rel=1e-6)
    assert bandwidth == pytest.approx(2e9, rel=1e-6)


def test_scaling_follows_the_ring():
    """Closed forms: on two ranks the bytes travel once each way; on many they travel nearly twice."""
    assert allreduce_seconds(10**8, 2, 1e-5, 1e9, 2) == pytest.approx(1e-5 + 0.1)
    assert allreduce_seconds(10**8, 4, 1e-5, 1e9, 2) == pytest.approx(3e-5 + 0.15)
    assert allreduce_seconds(10**8, 10**6, 0.0, 1e9, 2) == pytest.approx(0.2, rel=1e-5)
    assert [parse_count(text) for text in ("25.6M", "7B", "100", "2k")] == [25_600_000, 7 * 10**9, 100, 2000]
    for wrong in ("", "M", "-1", "x", "1e99", "nan"):
        with pytest.raises((ValueError, KeyError)):
            parse_count(wrong)


def test_a_model_is_predicted_in_words():
    entry = {"ranks": 2, "allreduce_latency_seconds": 0.0, "allreduce_bandwidth_bytes_per_second": 1e9}
    _, text = said(checks.model, entry, 25_000_000)
    assert "2 ranks exchange 100 MB of gradients in 0.1 s: 90 % efficiency needs steps of 1 s, 50 % of 0.2 s" in text


@pytest.mark.mpiexec
def test_doctor_on_this_machine(tmp_path, monkeypatch):
    import subprocess

    env = environment("doctor", DBRDIST_NETWORK_FILE=str(tmp_path / "network.json"))
    words = [
        sys.executable,
        "-m",
        "dbrdist_launch",
        "doctor",
        "--model",
        "25.6M",
        "--json",
        str(tmp_path / "found.json"),
    ]
    child = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "a job can run here" in child.stdout
    levels = {(e["title"], e["level"]) for e in json.loads((tmp_path / "found.json").read_text())["entries"]}
    assert {("MPI library", "ok"), ("mpiexec", "ok"), ("MPI job", "ok"), ("threads", "ok")} <= levels
    import os

    monkeypatch.setenv("DBRDIST_NETWORK_FILE", str(tmp_path / "network.json"))
    entry = record.read([os.uname().nodename])
    assert entry["ranks"] == 2 and entry["bandwidth_bytes_per_second"] > 1e6


@pytest.mark.programs
def test_doctor_refuses_an_mpiexec_that_does_not_fit(tmp_path):
    import subprocess

    fake = tmp_path / "mpiexec"
    fake.write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 4.1.4'\n")
    fake.chmod(0o755)
    words = [sys.executable, "-m", "dbrdist_launch", "doctor", "--mpiexec", str(fake)]
    child = subprocess.run(words, env=environment("doctor"), capture_output=True, text=True, timeout=60)
    assert child.returncode == 1
    assert "FAIL  mpiexec" in child.stdout


def test_the_doctor_looks_at_the_allocation_in_which_it_stands(tmp_path, monkeypatch):
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    for name in ("PBS_NODEFILE", "HYDRA_HOST_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "nodes"))
        assert _allocation(None, None) == (Host("n1", 2), Host("n2", 2))
        monkeypatch.delenv(name)
    for name, value in (("SLURM_JOB_ID", "1"), ("SLURM_JOB_NODELIST", "n[1-2]"), ("SLURM_TASKS_PER_NODE", "2(x2)")):
        monkeypatch.setenv(name, value)
    assert _allocation(None, None) == (Host("n1", 2), Host("n2", 2))
    assert _allocation("a:3", None) == (Host("a", 3),)
