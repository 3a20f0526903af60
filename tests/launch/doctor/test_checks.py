"""Checks of the doctor at their bounds."""

import json

import pytest
from dbrdist_launch.doctor import checks
from dbrdist_launch.doctor.findings import Findings
from facts import FACTS, said


@pytest.mark.parametrize(
    ("changes", "level", "title"),
    [
        ({"shm_free_bytes": checks._SHM_FAIL}, "ok", "shared memory"),
        ({"shm_free_bytes": checks._SHM_FAIL - 1}, "FAIL", "shared memory"),
        ({"shm_bytes": checks._SHM_WARN}, "ok", "shared memory"),
        ({"shm_bytes": checks._SHM_WARN - 1}, "warn", "shared memory"),
        ({"files": checks._FILES_WARN}, "ok", "open files"),
        ({"files": checks._FILES_WARN - 1}, "warn", "open files"),
        ({"files": -1}, "ok", "open files"),
        ({"gpus": 8}, "ok", "GPUs"),
        ({"gpus": 7}, "warn", "GPUs"),
        ({"cores": 7}, "warn", "cores"),
    ],
)
def test_bounds_of_the_doctors_findings(changes, level, title):
    assert (level, title) in said(checks.memory_and_limits, {**FACTS, **changes}, 8)[0]
    levels, _ = said(checks.memory_and_limits, {**FACTS, "infiniband": ["x"], "fork_safe": "1"}, 8)
    assert levels == [("ok", "shared memory"), ("ok", "open files")]


def test_what_is_said_of_a_machine(capsys):
    """The whole of it, in good order and in bad."""
    found = Findings()
    checks.memory_and_limits(found, FACTS, 8)
    bad = {
        "shm_bytes": 64 << 20,
        "shm_free_bytes": 1 << 20,
        "files": 1024,
        "memlock": 65536,
        "infiniband": ["m0", "m1"],
    }
    checks.memory_and_limits(found, {**FACTS, **bad, "gpus": 2, "cores": 2}, 4)
    shm = "containers get 64 MB by default: docker run --shm-size=8g, in Kubernetes an emptyDir of medium Memory"
    assert [tuple(row.values()) for row in found.entries][:6] == [
        ("ok", "shared memory", "a: /dev/shm has 8.59 GB, 8.59 GB free", ""),
        ("ok", "open files", "a: at most 65536", ""),
        ("ok", "fork", "a: no InfiniBand; forking is safe for MPI over shared memory and TCP", ""),
        ("FAIL", "shared memory", "a: /dev/shm has 67.1 MB, 1.05 MB free: MPI and data loaders will fail", shm),
        ("warn", "open files", "a: at most 1024", "ulimit -n 16384, or LimitNOFILE= in the daemon's unit"),
        ("warn", "locked memory", "a: only 65.5 KB, with InfiniBand (m0, m1)",
         "ulimit -l unlimited (in /etc/security/limits.conf, and in the unit of slurmd or sshd)"),
    ]  # fmt: skip
    assert [tuple(row.values()) for row in found.entries][6:8] == [
        ("warn", "fork",
         "a: InfiniBand (m0, m1) and no RDMAV_FORK_SAFE: a forked data loader may corrupt messages",
         "start loaders with spawn (as dbrdist does), or set RDMAV_FORK_SAFE=1"),
        ("warn", "cores", "a: 4 ranks on 2 cores", found.entries[7]["what_to_do"]),
    ]  # fmt: skip


def test_clocks_and_hosts_at_their_bounds():
    warn = checks._CLOCK_WARN_SECONDS
    assert said(checks.clock, "b", -warn - 0.25, 0.25)[0] == [("ok", "clock")]
    assert said(checks.clock, "b", -warn - 0.26, 0.25)[0] == [("warn", "clock")]
    other = {**FACTS, "host": "b", "system": "Linux 7"}
    assert said(checks.alike, FACTS, other)[0] == [("warn", "alike")]
    assert said(checks.alike, FACTS, {**FACTS, "packages": {"numpy": "2.5"}})[0] == [("warn", "alike")]
    assert said(checks.alike, FACTS, {**FACTS, "executable": "/w"})[0] == [("FAIL", "alike"), ("ok", "alike")]


def test_what_is_said_of_clocks_and_of_a_small_job():
    """The whole of it: level, title, words, and what to do."""
    found = Findings()
    checks.clock(found, "b", 1.2504, 0.25)
    checks.clock(found, "b", -1.2496, 0.25)
    job = {"size": 2, "hosts": ["a", "b", "a"], "library": "MPICH 4", "thread_level": 3, "thread_multiple": 3}
    checks.mpi_job(found, job, 2)
    checks.mpi_job(found, {**job, "thread_level": 2}, 2)
    checks.mpi_job(found, {**job, "size": 1}, 2)
    ok_threads = ("ok", "threads", "MPI offers THREAD_MULTIPLE", "")
    ok_job = ("ok", "MPI job", "2 ranks on a, b: MPICH 4", "")
    rows = [tuple(row.values()) for row in found.entries]
    assert rows == [
        ("warn", "clock", "b: +1.250 s from this machine's clock (to within 0.250 s)",
         "run chrony or ntpd: times in logs and of files differ between hosts"),
        ("ok", "clock", "b: -1.250 s from this machine's clock (to within 0.250 s)", ""),
        ok_job, ok_threads, ok_job,
        ("warn", "threads", "MPI does not offer THREAD_MULTIPLE: communication cannot overlap with computation",
         "use an MPI built with --enable-thread-multiple (the wheels are)"),
        ("FAIL", "MPI job", "2 ranks were asked for, but each has an MPI world of size 1",
         "mpiexec and the MPI library do not match; see `dbrdist-launch -n 2 --print -- python x.py`"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.5, "0.5 B"), (999, "999 B"), (1000, "1 KB"), (2_345_678, "2.35 MB"), (1e9, "1 GB"), (5e12, "5 TB")],
)
def test_amounts_of_bytes(number, text):
    assert checks._bytes(number) == text


def test_the_measured_speed_is_said():
    findings = Findings()
    entry = {
        "ranks": 4, "latency_seconds": 1.5e-6, "bandwidth_bytes_per_second": 12e9, "allreduce_latency_seconds": 3e-6,
        "allreduce_bandwidth_bytes_per_second": 5e9, "interface": "eth0",
    }  # fmt: skip
    facts = [{"host": "a", "interfaces": [{"name": n, "address": f"10.0.0.{k}", "speed": speed} for k, (n, speed) in
              enumerate((("eth0", 1000), ("eth1", 1000), ("ib0", None)))]}]  # fmt: skip
    checks.network(findings, entry, ["10.0.0.0", "10.0.0.2", "10.9.9.9"], facts)
    said = json.dumps(findings.as_dict())
    assert "MPI's TCP connections on a use eth0 (10.0.0.0, 1000 Mbit/s)" in said and "a faster one" not in said
    assert "on a use ib0 (10.0.0.2)" in said and "on ? use 10.9.9.9 (10.9.9.9)" in said
    facts[0]["interfaces"][1]["speed"] = 1001
    checks.network(findings, entry, ["10.0.0.0"], facts)
    assert "a has a faster interface: eth1 (1001 Mbit/s)" in json.dumps(findings.as_dict())
    assert "between two ranks: latency 1.5 us, bandwidth 12 GB/s" in said
    assert "over 4 ranks: latency 3.0 us, bandwidth 5 GB/s" in said
