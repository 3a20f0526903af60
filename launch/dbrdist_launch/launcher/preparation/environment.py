"""Which variables the ranks get, on every backend alike: all but secrets and what is true of one machine or job only.

Where mpiexec starts ranks on its own machine they inherit its environment, as they would without us. Everywhere else
the names that `forwarded` gives are passed on by mpiexec's or srun's own means, with the same values as here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping

from ...errors import LaunchError

# Patterns are compiled at their first use: a job on this machine alone needs few of them.
# Never forwarded by themselves; --env NAME passes such a value on purpose.
_SECRET = r"(?i)SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH(_|$)|COOKIE"
# Facts about this machine, this terminal or this login: they would be lies elsewhere.
_MACHINE = (
    r"^(HOSTNAME|HOSTTYPE|HOST|PWD|OLDPWD|SHLVL|_|TERM.*|COLUMNS|LINES|DISPLAY|WAYLAND_.*|XAUTHORITY|TTY|WINDOWID"
    r"|SSH_.*|XDG_(RUNTIME_DIR|SESSION_.*|SEAT|VTNR)|DBUS_.*|GPG_AGENT_INFO|INVOCATION_ID|JOURNAL_STREAM|MAIL"
    r"|STY|TMUX.*|KRB5CCNAME|BASH_.*|KUBERNETES_.*|NOTIFY_SOCKET)$"
)
# Facts about the process that the launcher itself is, as a rank or a batch script of some job.
_OWN = (
    r"^(PMI_|PMI2_|PMIX_(RANK|NAMESPACE|SERVER|ID|MCA_mca_base)|OMPI_COMM_WORLD_|OMPI_UNIVERSE|OMPI_APP_CTX|MPI_LOCAL"
    r"|SLURM|SBATCH_|SRUN_|PBS_|LSB_|LS_|FLUX_|HYDRA_|HYDI_|MPIR_CVAR_CH3_PORT|PRTE_(LAUNCHED|JOBID)"
    r"|DBRDIST_(LAUNCH|HEARTBEAT|RESTART)|(LOCAL_)?RANK$|(LOCAL_)?WORLD_SIZE$)"
)
# Left from an outer launch, these would tell a rank somebody else's number.
_STALE = re.compile(
    r"^(PMI_(RANK|SIZE|FD|ID|PORT)|PMIX_(RANK|NAMESPACE|SERVER_URI.*)|OMPI_COMM_WORLD_.*|MPI_LOCAL(RANKID|NRANKS)"
    r"|DBRDIST_LAUNCH|DBRDIST_LAUNCH_(CHANNEL|TOKEN|EVENTS|INJECTED_PYTHONPATH)|DBRDIST_HEARTBEAT)$"
)
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_ALWAYS = ("PATH", "HOME")


def forwarded(environment: Mapping[str, str], wanted: Iterable[str] = (), only: bool = False) -> tuple[str, ...]:
    """The names that are passed on, sorted; `wanted` are names and patterns of --env, `only` leaves out all others."""
    patterns = [*wanted, *(_ALWAYS if only else ())]
    return tuple(sorted(name for name in environment if _travels(name, patterns, only)))


def _travels(name: str, patterns: list[str], only: bool) -> bool:
    if not _NAME.match(name) or _STALE.match(name):
        return False  # a shell's functions are no variables
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        return name in patterns or not re.search(_SECRET, name)
    return not only and not re.search(_SECRET, name) and not re.match(_MACHINE, name) and not re.match(_OWN, name)


def secrets(environment: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """The names that look like secrets and are not passed on."""
    return sorted(
        name for name in environment if re.search(_SECRET, name) and not re.match(_OWN, name) and name not in names
    )


def without_stale(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what an outer launch left in it."""
    return {name: value for name, value in environment.items() if not _STALE.match(name)}


def parse_settings(settings: Iterable[str], environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(values of NAME=VALUE, names and patterns of the other words of --env)."""
    values, names = {}, []
    for setting in settings:
        name, sign, value = setting.partition("=")
        if sign and _NAME.match(name):
            values[name] = value
        elif not sign and _NAME.match(name.replace("*", "x").replace("?", "x")):
            if _NAME.match(name) and name not in environment:
                raise LaunchError(f"--env {name}: this variable is not set here; --env {name}=VALUE gives it a value")
            names.append(name)
        else:
            raise LaunchError(
                f"--env {setting!r}: expected NAME=VALUE, NAME or 'PREFIX*', with letters, digits and _ in the name"
            )
    return values, names
