"""The doctor's probes: what is measured between ranks, beside a clock and a world of ours, and the facts of a host."""

import importlib.util
import json
import os
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from dbrdist_launch import doctor
from dbrdist_launch.doctor import host_probe


class World:
    """A world of three ranks in which nothing is sent."""

    def __init__(self, rank=0, size=3):
        self.rank, self.size, self.happened = rank, size, []

    def Send(self, buffer, to):
        self.happened.append(("send", len(buffer), to))

    def Recv(self, buffer, source):
        self.happened.append(("receive", len(buffer), source))

    def Allreduce(self, send, receive, operation):
        self.happened.append(("allreduce", len(send[0]), len(receive[0]), send[1], receive[1], operation))

    def Barrier(self):
        self.happened.append("barrier")

    def bcast(self, value):
        self.happened.append(value)
        return value

    def allgather(self, value):
        return [value, *({"b"} if isinstance(value, str) else [["10.0.0.2", "10.0.0.1"]])]


@pytest.fixture
def probe(monkeypatch):
    """The probe, with an MPI that is there in name only: the real one would begin here."""
    mpi = SimpleNamespace(
        BYTE="bytes", BOR="or", THREAD_MULTIPLE=3, COMM_WORLD=World(), Query_thread=lambda: 2,
        Get_library_version=lambda: "MPI 1\nmore", Get_processor_name=lambda: "a",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    spec = importlib.util.spec_from_file_location("probe", Path(doctor.__file__).parent / "mpi_probe.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("seconds", "repeats"), [(1.0, 5), (2.0**-5, 5), (2.0**-6, 9), (2.0**-7, 19), (2.0**-10, 153), (2.0**-20, 200)]
)
def test_an_action_is_repeated_for_a_moment_and_its_median_counts(probe, monkeypatch, seconds, repeats):
    """The first ones are slow; the one that is timed tells how often 0.15 s have room, from 5 to 200 times."""
    clock, calls = [100.0], []

    def action(buffer, other):
        count = len(calls) % (4 + repeats)
        calls.append((len(buffer), len(other)))
        clock[0] += 9.0 if count < 3 else seconds if count == 3 else seconds * (1 + (7 * count) % repeats)

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    world = World()
    found = probe.times(world, [8, 64], action)
    assert world.happened == ["barrier", repeats] * 2 and calls == [(8, 8)] * (4 + repeats) + [(64, 64)] * (4 + repeats)
    order = sorted(1 + (7 * count) % repeats for count in range(4, 4 + repeats))
    assert found == [(size, pytest.approx(seconds * order[repeats // 2], rel=1e-6)) for size in (8, 64)]


SIZES = [8, 64, 512, 4096, 32768, 262144, 1048576, 4194304]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_first_and_last_rank_play_and_all_reduce(probe, monkeypatch, capsys, rank):
    world = probe.MPI.COMM_WORLD = World(rank)

    def once(world, sizes, action):
        action(bytearray(3), bytearray(4))
        return [(size, 2.0 * size) for size in sizes]

    monkeypatch.setattr(probe, "times", once)
    monkeypatch.setattr(probe, "tcp_addresses", lambda: ["10.0.0.3", "10.0.0.1"])
    probe.main()
    played = {0: [("send", 3, 2), ("receive", 4, 2)], 1: [], 2: [("receive", 4, 0), ("send", 3, 0)]}[rank]
    assert world.happened == [*played, ("allreduce", 3, 4, "bytes", "bytes", "or")]
    out = capsys.readouterr().out
    assert (out != "") == (rank == 0)
    if out:
        assert json.loads(out) == {
            "size": 3, "library": "MPI 1", "thread_level": 2, "thread_multiple": 3, "hosts": ["a", "b"],
            "ping_pong": [[size, size] for size in SIZES], "allreduce": [[size, 2 * size] for size in SIZES],
            "tcp": ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
        }  # fmt: skip


def test_two_ranks_measure_and_one_that_is_alone_does_not(probe, monkeypatch, capsys):
    monkeypatch.setattr(probe, "times", lambda world, sizes, action: [])
    monkeypatch.setattr(probe, "tcp_addresses", list)
    probe.MPI.COMM_WORLD = World(0, 2)
    probe.main()
    assert {"ping_pong", "allreduce", "tcp"} < set(json.loads(capsys.readouterr().out))
    probe.MPI.COMM_WORLD = World(0, 1)
    probe.main()
    assert sorted(json.loads(capsys.readouterr().out)) == [
        "hosts",
        "library",
        "size",
        "thread_level",
        "thread_multiple",
    ]


def test_addresses_of_connections_that_leave_the_host(probe, monkeypatch):
    """Of this process, established, and not with itself; the kernel writes an address from its last byte on."""
    links = {"3": "socket:[11]", "4": "/dev/null", "5": "socket:[12]", "6": "socket:[13]", "7": "socket:[14]"}
    links["8"] = "socket:[16]"

    def readlink(path):
        if path not in (f"/proc/self/fd/{number}" for number in links):
            raise OSError
        return links[path.rpartition("/")[2]]

    rows = [
        ("0201000A", "0301000A", "01", 11), ("0201000A", "0401000A", "01", 12), ("0901000A", "0301000A", "0A", 13),
        ("0801000A", "0801000A", "01", 14), ("0701000A", "0301000A", "01", 15), ("0100007F", "0200007F", "01", 16),
    ]  # fmt: skip
    text = "heading\n" + "".join(
        f"{k}: {local}:1F90 {remote}:0016 {state} 0:0 00:0 0 0 0 {inode} 1\n"
        for k, (local, remote, state, inode) in enumerate(rows)
    )
    monkeypatch.setattr(probe.os, "listdir", lambda path: [*links, "9"] if path == "/proc/self/fd" else [])
    monkeypatch.setattr(probe.os, "readlink", readlink)
    monkeypatch.setattr(
        probe, "open", lambda path: StringIO(text if path == "/proc/self/net/tcp" else ""), raising=False
    )
    assert probe.tcp_addresses() == ["10.0.1.2"]


# ---- a host ---------------------------------------------------------------------------------------------------------


def test_the_facts_of_a_host(monkeypatch, capsys):
    monkeypatch.setattr(host_probe, "packages", lambda: {"numpy": "2"})
    monkeypatch.setattr(host_probe, "interfaces", lambda: ["eth0"])
    files = {"/proc/driver/nvidia/gpus/*": ["a", "b"], "/sys/class/infiniband/*": ["/x/mlx5_1", "/x/mlx5_0"]}
    limits = {host_probe.resource.RLIMIT_NOFILE: (1024, 4096), host_probe.resource.RLIMIT_MEMLOCK: (64, 128)}
    own = SimpleNamespace(
        statvfs=lambda path: SimpleNamespace(f_bsize=2, f_blocks=30, f_bavail=7), path=os.path,
        uname=lambda: SimpleNamespace(nodename="a", sysname="Linux", release="6.1"), environ={"RDMAV_FORK_SAFE": "1"},
        sched_getaffinity=lambda pid: {1, 2, 5},
    )  # fmt: skip
    monkeypatch.setattr(host_probe, "os", own)
    monkeypatch.setattr(host_probe, "glob", SimpleNamespace(glob=files.get))
    monkeypatch.setattr(host_probe.resource, "getrlimit", limits.get)
    monkeypatch.setattr(host_probe, "time", SimpleNamespace(time=lambda: 12.5))
    wanted = {
        "time": 12.5, "host": "a", "system": "Linux 6.1", "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable, "packages": {"numpy": "2"}, "cores": 3, "shm_bytes": 60, "shm_free_bytes": 14,
        "files": 1024, "memlock": 64, "gpus": 2, "infiniband": ["mlx5_0", "mlx5_1"], "fork_safe": "1",
        "interfaces": ["eth0"],
    }  # fmt: skip
    host_probe.main()
    assert json.loads(capsys.readouterr().out) == wanted
    own.environ = {"IBV_FORK_SAFE": "2"}
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/dev/shm")
    host_probe.main()
    assert json.loads(capsys.readouterr().out) == {**wanted, "shm_bytes": 0, "shm_free_bytes": 0, "fork_safe": "2"}


def test_packages_that_are_not_there_are_left_out(monkeypatch):
    versions = {"numpy": "2.4", "mpich": "5.0"}

    def version(name):
        if name not in versions:
            raise host_probe.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(host_probe.metadata, "version", version)
    assert host_probe.packages() == versions


def test_interfaces_have_their_address_and_a_speed_where_one_is_known(monkeypatch):
    speeds = {"eth0": "1000\n", "ib0": "-1\n", "odd": "x"}
    names = ["lo", "eth0", "ib0", "odd", "down", "x" * 15]

    def ioctl(descriptor, request, data):
        name = data.rstrip(b"\0").decode()
        assert request == 0x8915 and len(data) == 256  # SIOCGIFADDR
        if name == "down":
            raise OSError
        return bytes(20) + bytes((10, 0, 0, names.index(name))) + bytes(8)

    def read(path):
        name = path.split("/")[4]
        if name not in speeds:
            raise FileNotFoundError
        return StringIO(speeds[name])

    monkeypatch.setattr(host_probe.socket, "if_nameindex", lambda: list(enumerate([*names[:-1], "x" * 20])))
    monkeypatch.setattr("fcntl.ioctl", ioctl)
    monkeypatch.setattr(host_probe, "open", read, raising=False)
    assert host_probe.interfaces() == [
        {"name": "lo", "address": "10.0.0.0", "speed": None}, {"name": "eth0", "address": "10.0.0.1", "speed": 1000},
        {"name": "ib0", "address": "10.0.0.2", "speed": None}, {"name": "odd", "address": "10.0.0.3", "speed": None},
        {"name": "x" * 20, "address": "10.0.0.5", "speed": None},
    ]  # fmt: skip
