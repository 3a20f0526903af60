"""mpiexec of Open MPI, versions 4 (orterun) and 5 (prterun)."""

from __future__ import annotations

import os

from .job import Job


def command(starter: str, major: int, job: Job, program: list[str]) -> list[str]:
    """The command line of Open MPI's mpiexec for a job."""
    words = [starter, "-n", str(job.ranks)]
    if os.getuid() == 0:  # the usual user of a container
        words.append("--allow-run-as-root")
    if job.hosts:
        words += ["--host", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
        for name in job.forward:
            words += ["-x", name]
    else:
        # Slots are counted by cores; more ranks than that are the caller's wish.
        words += ["--map-by", ":OVERSUBSCRIBE"] if major >= 5 else ["--oversubscribe"]
    words += ["--bind-to", job.bind]
    if job.interface:
        words += ["--mca", "btl_tcp_if_include", job.interface]
    return [*words, *job.extra, *program]


def environment(major: int, job: Job) -> dict[str, str]:
    """What mpiexec itself needs in its environment."""
    prefix = "PRTE_MCA_plm_ssh" if major >= 5 else "OMPI_MCA_plm_rsh"
    found = {}
    if job.hosts and (job.ssh or job.ssh_options):
        found[f"{prefix}_agent"] = " ".join([job.ssh or "ssh", *job.ssh_options])
    return found
