"""Two hosts on one machine, for measurements between them: namespaces joined by one cable, of any speed.

Each host has a network, a name, System V memory, /dev/shm, /etc/hosts and half of the cores of its own, so that MPI,
gloo and dbrdist take its processes for those of another machine. Cores that hosts share give a wrong picture: the
kernel wakes who waits for the network where the packets arrive, so that the threads of both hosts gathered on one core
and made one of two ranks 300 ms late in a step of 1.8 s. (A machine with one core shares it.) It needs Linux, root,
iproute2 and util-linux. What holds the namespaces is a process that ends with this one, whatever ends it: nothing is
left behind, and no file is written. As a program it runs a command on the first host, with the launcher that mpiexec
needs to reach the second:

    python benchmarks/two_hosts.py --rate 1gbit -- ping -c 3 node1
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("node0", "node1")
INTERFACE = "eth0"
CACHE = "/dev/shm/cache"  # XDG_CACHE_HOME of the ranks: what they measure is for one cable
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PARTS = ("-n", "-m", "-u", "-i")  # network, mounts, name, System V memory
_TOOLS = {"ip": "iproute2", "tc": "iproute2", **dict.fromkeys(("unshare", "nsenter", "taskset"), "util-linux")}
_LAUNCHER = "/dev/shm/enter"  # on the first host, in a /dev/shm of its own


def refusal() -> str:
    """Why there cannot be two hosts here, or nothing."""
    if not sys.platform.startswith("linux"):
        return f"two hosts on one machine need Linux (network namespaces), this is {sys.platform}"
    if os.geteuid() != 0:
        return "two hosts on one machine need root (network namespaces): run this as root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({_TOOLS[tool] for tool in missing}))
        return f"two hosts on one machine need the programs {', '.join(missing)}: install {packages}"
    trial = "ip link add t0 type veth peer name t1 && tc qdisc add dev t0 root tbf rate 1gbit burst 256kb latency 50ms"
    done = subprocess.run(["unshare", *_PARTS, "sh", "-c", trial], capture_output=True, text=True)
    return f"two hosts on one machine: the system refuses them: {done.stderr.strip()}" if done.returncode else ""


class TwoHosts:
    """The hosts ``node0`` and ``node1``; a context manager.

    Args:
        rate: of the cable in each direction, as ``tc`` writes it (``1gbit``); None is as fast as memory.

    Raises:
        SystemExit: where namespaces cannot be had; says why.
    """

    def __init__(self, rate: str | None = None) -> None:
        if reason := refusal():
            raise SystemExit(reason)
        self._holders: list[subprocess.Popen[str]] = []
        try:
            self._build()
            self.set_rate(rate)
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        for _ in NAMES:
            self._holders.append(_holder())
        other = self._holders[1].pid
        self._in(0, f"ip link add eth0 type veth peer name eth0 netns {other}")
        hosts = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in zip(_ADDRESSES, NAMES))
        for i, (name, address) in enumerate(zip(NAMES, _ADDRESSES)):
            self._in(i, f"hostname {name} && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && "
                        "ip link set lo up && "
                        f"ip addr add {address}/24 dev eth0 && ip link set eth0 up && "
                        f"printf '{hosts}' > /dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts")  # fmt: skip
        for i in range(len(NAMES)):  # MPI takes no interface that is not up yet
            self._in(i, "until [ $(cat /sys/class/net/eth0/operstate) = up ]; do sleep 0.01; done")
        # mpiexec calls it as ssh: options, the host, a command
        enter = f'while [ "$1" != {NAMES[1]} ]; do shift; done; shift\nexec nsenter -t {other} {" ".join(_PARTS)} '
        enter += f'--wd="$PWD" {" ".join(_cores_of(1))} sh -c "$*"'
        self._in(0, f"cat > {_LAUNCHER} <<'END'\n#!/bin/sh\n{enter}\nEND\nchmod +x {_LAUNCHER}")

    def inside(self, number: int) -> list[str]:
        """The words before a command that runs it on a host."""
        return ["nsenter", "-t", str(self._holders[number].pid), *_PARTS, f"--wd={os.getcwd()}", *_cores_of(number)]

    def _in(self, number: int, script: str) -> None:
        done = subprocess.run([*self.inside(number), "sh", "-c", script], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{NAMES[number]}: {script!r} failed: {done.stderr.strip()}")

    def set_rate(self, rate: str | None) -> None:
        """Give the cable another speed, in each direction."""
        for number in range(len(NAMES)):
            self._in(number, "tc qdisc del dev eth0 root 2>/dev/null; true")
            if rate is not None:
                self._in(number, f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 50ms")

    def mpiexec(self, program: str, num_ranks: int) -> list[str]:
        """The words that start ranks on both hosts, the first half on ``node0``, and one more where they are odd."""
        counts = (num_ranks - num_ranks // 2, num_ranks // 2)
        places = ",".join(f"{name}:{n}" for name, n in zip(NAMES, counts))
        launcher = ["-launcher", "ssh", "-launcher-exec", _LAUNCHER, "-hosts", places]
        return [*self.inside(0), program, *launcher, "-n", str(num_ranks)]

    def close(self) -> None:
        """End the namespaces, which go with the last process in them."""
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait()

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _cores_of(number: int) -> list[str]:
    """The words before a command that give it a host's half of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return ["taskset", "-c", ",".join(map(str, cores[half:] if number else cores[: half or 1]))]


def _holder() -> subprocess.Popen[str]:
    """A process in namespaces of its own, which ends when this one does."""
    process = subprocess.Popen(
        ["unshare", *_PARTS, "--propagation", "private", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which closes
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def sent_bytes() -> int:
    """What this host has sent over the cable so far, with all headers."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", help="of the cable, as tc writes it: 1gbit; default as fast as memory")
    parser.add_argument("command", nargs="+", help="runs on node0")
    args = parser.parse_args()
    with TwoHosts(args.rate) as hosts:
        raise SystemExit(subprocess.run([*hosts.inside(0), *args.command]).returncode)


if __name__ == "__main__":
    main()
