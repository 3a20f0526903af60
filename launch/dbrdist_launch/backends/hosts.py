"""Where the ranks go: host lists from the command line, files and batch systems."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Mapping

from ..errors import LaunchError
from ..wire import whole
from .job import Host

# A name reaches ssh's command line: nothing that could be an option or mean something to a shell.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z"
_OPERATOR_FILES = (
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
)


def checked(name: str, slots: str | int, where: str = "--hosts") -> Host:
    """A host, or a refusal of what cannot be one."""
    if not re.match(_NAME, name):
        raise LaunchError(
            f"{where}: {name!r} is not a host name; expected letters, digits, '.', '-' and '_', as in a:2,b:2"
        )
    number = whole(str(slots))
    if not number:
        raise LaunchError(f"{where}: {name}:{slots}: expected a number of slots of at least 1 after the colon")
    return Host(name, number)


def parse_list(text: str) -> tuple[Host, ...]:
    """a:2,b:2 or a,b; a host named twice has the sum of its slots."""
    parts = [part.rpartition(":") if ":" in part else (part, "", "1") for part in text.split(",")]
    return _merged([checked(name, slots) for name, _, slots in parts])


def parse_file(path: str, say: Callable[[str], None] = lambda text: None) -> tuple[Host, ...]:
    """A host file: `a`, `a:2` (MPICH), `a slots=2` (Open MPI), `a 2`, or one line per slot; # starts a comment.

    Words that are not used here are said once.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise LaunchError(f"--hostfile {path!r} cannot be read: {error}") from error
    found, unused = [], []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            name, _, slots = words[0].partition(":")
            for word in words[1:]:
                if word.startswith("slots=") or whole(word) is not None:
                    slots = word.removeprefix("slots=")
                elif not word.startswith("max_slots=") and word not in unused:
                    unused.append(word)
            found.append(checked(name, slots or 1, f"{path}:{number}"))
    if not found:
        raise LaunchError(f"--hostfile {path!r} names no hosts")
    if unused:
        say(f"{path}: {', '.join(unused[:5])} not used here; set a user or a port in ssh's configuration")
    return _merged(found)


def _merged(hosts: list[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def of_environment(environment: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """The hosts that a batch system or the MPI Operator gave us; () on an ordinary machine. Slurm is read elsewhere."""
    if environment.get("PBS_NODEFILE") and os.path.exists(environment["PBS_NODEFILE"]):
        return parse_file(environment["PBS_NODEFILE"])
    if environment.get("LSB_DJOB_HOSTFILE") and os.path.exists(environment["LSB_DJOB_HOSTFILE"]):
        return parse_file(environment["LSB_DJOB_HOSTFILE"])
    if environment.get("LSB_MCPU_HOSTS"):
        words = environment["LSB_MCPU_HOSTS"].split()
        return _merged([checked(name, slots, "LSB_MCPU_HOSTS") for name, slots in zip(words[::2], words[1::2])])
    if environment.get("PE_HOSTFILE") and os.path.exists(environment["PE_HOSTFILE"]):  # of Grid Engine
        with open(environment["PE_HOSTFILE"]) as file:
            rows = [line.split() for line in file if line.strip()]
        return _merged([checked(row[0], row[1] if len(row) > 1 else 1, environment["PE_HOSTFILE"]) for row in rows])
    for name in _OPERATOR_FILES:
        if environment.get(name) and os.path.exists(environment[name]):
            return parse_file(environment[name])
    return ()


def expand(text: str) -> list[str]:
    """Slurm's short form of node names: n[1-3,07],login -> n1 n2 n3 n07 login."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        match = re.match(r"^([^\[]*)\[([^\]]*)\](.*)$", part)
        if not match:
            names.append(part)
            continue
        for piece in match[2].split(","):
            first, _, last = piece.partition("-")
            if whole(first) is None or whole(last or first) is None or int(last or first) - int(first) > 1 << 20:
                raise LaunchError(f"Slurm's node names {text!r}: expected a form such as n[1-3,07],login")
            for number in range(int(first), int(last or first) + 1):
                names += expand(f"{match[1]}{number:0{len(first)}d}{match[3]}")
    return names


def place(hosts: tuple[Host, ...], ranks: int | None, per_host: int | None) -> tuple[tuple[Host, ...], int]:
    """(hosts with the ranks that each one gets, in order; number of ranks)."""
    if per_host is not None:
        hosts = tuple(Host(host.name, per_host) for host in hosts)
    slots = sum(host.slots for host in hosts)
    wanted = slots if ranks is None else ranks
    if wanted > slots:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"{wanted} ranks do not fit into {slots} slots ({listed}); give the hosts more slots, as in "
            f"--hosts {hosts[0].name}:{-(-wanted // len(hosts))},..., or use --per-host"
        )
    placed, left = [], wanted
    for host in hosts:
        if left:
            placed.append(Host(host.name, min(host.slots, left)))
            left -= placed[-1].slots
    return tuple(placed), wanted


def resolve(name: str) -> str | None:
    """The address of a host: by the system's names, then by an alias in ssh's configuration."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return None


def is_local(name: str) -> bool:
    """Whether a name means this machine: its address can be bound here."""
    if name in ("localhost", os.uname().nodename):
        return True
    address = resolve(name)
    if address is None:
        return False
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
        return True
    except OSError:
        return False


def own_address_towards(name: str) -> str | None:
    """Our address on the interface that leads to a host; nothing is sent."""
    address = resolve(name)
    if address is None:
        return None
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_addresses() -> tuple[str, ...]:
    """The IPv4 addresses of this host's interfaces, loopback last: for ranks that will be we do not know where."""
    found = []
    for _, name in socket.if_nameindex():
        try:
            found.append(address_of_interface(name))
        except LaunchError:
            continue  # an interface without an address
    return tuple(sorted(found, key=lambda address: address.startswith("127.")))


def address_of_interface(name: str) -> str:
    """The IPv4 address of an interface such as eth0; an address stands for itself."""
    import fcntl
    import struct

    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, name)
            return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            known = ", ".join(interface for _, interface in socket.if_nameindex())
            raise LaunchError(f"--interface {name!r}: {error.strerror}; interfaces of this host: {known}") from error
    return socket.inet_ntoa(answer[20:24])
