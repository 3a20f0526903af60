"""Which variables travel to the ranks on other hosts: a stated list, and no secrets."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

from ..errors import LaunchError

FORWARDED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHON*",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TMPDIR",
    "TZ",
    "LANG",
    "LC_*",
    "OMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "KMP_*",
    "GOMP_*",
    "DNNL_*",
    "ONEDNN_*",
    "CUDA_*",
    "NVIDIA_*",
    "CUPY_*",
    "NCCL_*",
    "UCX_*",
    "FI_*",
    "MPICH_*",
    "MPIR_*",
    "I_MPI_*",
    "OMPI_*",
    "OPAL_*",
    "PMIX_*",
    "PRTE_*",
    "MPI4PY_*",
    "DBRDIST_*",
    "XDG_CACHE_HOME",
)
# Never forwarded by a pattern; --env NAME=VALUE passes such a value on purpose.
_SECRET = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.I)
# Facts about the process that the launcher itself is: they would be lies elsewhere.
_OWN = re.compile(
    r"^(PMI_|PMIX_(RANK|NAMESPACE|SERVER)|OMPI_COMM_WORLD_|OMPI_UNIVERSE|MPI_LOCAL|SLURM_|DBRDIST_(LAUNCH|HEARTBEAT|RESTART))"
)
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def forwarded_names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names out of an environment that the list covers, sorted; shell functions and secrets are not among them."""
    return tuple(
        sorted(
            name
            for name in environment
            if _NAME.match(name)
            and not _SECRET.search(name)
            and not _OWN.match(name)
            and any(fnmatch.fnmatchcase(name, pattern) for pattern in FORWARDED)
        )
    )


def parse_settings(settings: tuple[str, ...]) -> dict[str, str]:
    """K=V words of --env; a value may hold anything but a zero byte."""
    parsed = {}
    for setting in settings:
        name, sign, value = setting.partition("=")
        if not sign or not _NAME.match(name):
            raise LaunchError(f"--env {setting!r}: expected NAME=VALUE, with letters, digits and _ in the name")
        parsed[name] = value
    return parsed
