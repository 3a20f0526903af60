"""The hosts of a job over its restarts: probing them, setting lost ones aside, taking them back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from ... import limits
from ...backends import hosts as hosts_module
from ...backends.job import Host
from ...errors import LaunchError


class HostPool:
    """Which hosts an attempt may use. Times are on the monotonic clock, in seconds."""

    def __init__(
        self,
        hosts: tuple[Host, ...],
        probe: Callable[[list[str]], dict[str, str]],
        cooldown_seconds: float,
        discovery: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        most_failures: int | None = None,
    ) -> None:
        self.hosts, self.probe, self.cooldown_seconds, self.clock = hosts, probe, cooldown_seconds, clock
        self.discovery = discovery
        self.aside: dict[str, tuple[float, str]] = {}  # name -> (until when, why)
        self.losses: dict[str, int] = {}  # name -> how often it did not answer
        self.most_failures = most_failures
        self.history: dict[str, list[str]] = {}  # name -> why, for each failure that began there

    def discover(self) -> None:
        """Take the hosts that the user's script prints, one `name:slots` a line; keep the old ones when it fails."""
        if self.discovery is None:
            return
        try:
            child = subprocess.run(
                [self.discovery], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"--host-discovery {self.discovery!r} cannot be run: {error}") from error
        if child.returncode != 0:
            raise LaunchError(
                f"--host-discovery {self.discovery!r} ended with exit code {child.returncode}: {child.stderr.strip()}"
            )
        found = [line.strip() for line in child.stdout.splitlines() if line.strip()]
        if found:
            self.hosts = hosts_module.parse_list(",".join(found))

    def after_failure(self) -> tuple[list[str], list[str]]:
        """Probe the hosts; (names newly lost, names that came back)."""
        now = self.clock()
        due = [h.name for h in self.hosts if h.name not in self.aside or self.aside[h.name][0] <= now]
        unreachable = self.probe(due)
        came_back = [name for name in due if name in self.aside and name not in unreachable]
        for name in came_back:
            del self.aside[name]
        lost = [name for name in due if name in unreachable]
        for name in lost:
            self.losses[name] = self.losses.get(name, 0) + 1
            self.aside[name] = (now + self.cooldown_of(name), unreachable[name])
        return lost, came_back

    def cooldown_of(self, name: str) -> float:
        """For how long a host is set aside: twice as long at each loss."""
        return float(self.cooldown_seconds * 2 ** (self.losses.get(name, 1) - 1))

    def note_failure(self, name: str | None, why: str) -> None:
        """A failure began on a host."""
        if name is not None and any(host.name == name for host in self.hosts):
            self.history.setdefault(name, []).append(why)

    def is_given_up(self, name: str) -> bool:
        """Whether too many failures began on a host for it to be used again."""
        return self.most_failures is not None and len(self.history.get(name, ())) >= self.most_failures

    def available(self) -> tuple[Host, ...]:
        """The hosts that are not set aside."""
        return tuple(host for host in self.hosts if host.name not in self.aside and not self.is_given_up(host.name))


def probe_by_ssh(names: list[str], agent: str | None, options: tuple[str, ...]) -> dict[str, str]:
    """name -> why, for the hosts where `ssh host true` fails; all are asked at once, for at most two seconds or so."""
    started = {}
    for name in names:
        if not hosts_module.is_local(name):
            ours = () if agent else ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={limits.PROBE_SECONDS:.0f}")
            words = [agent or "ssh", *options, *ours]
            try:
                started[name] = subprocess.Popen(
                    [*words, name, "true"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                )
            except OSError as error:
                return dict.fromkeys(names, f"{words[0]}: {error.strerror}")
    until = time.monotonic() + limits.PROBE_SECONDS + 1.0
    unreachable = {}
    for name, process in started.items():
        try:
            _, err = process.communicate(timeout=max(0.1, until - time.monotonic()))
            if process.returncode != 0:
                said = err.decode(errors="replace").strip().splitlines()
                unreachable[name] = said[-1] if said else f"ssh ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            unreachable[name] = f"no answer within {limits.PROBE_SECONDS + 1:.0f} s"
    return unreachable
