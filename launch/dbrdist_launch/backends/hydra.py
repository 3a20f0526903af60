"""mpiexec of MPICH and of Intel MPI."""

from __future__ import annotations

from .job import Job


def command(starter: str, job: Job, program: list[str]) -> list[str]:
    """The command line of mpiexec.hydra for a job."""
    words = [starter, "-n", str(job.ranks)]
    if job.hosts:
        words += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in job.hosts), "-launcher", "ssh"]
        if job.ssh:
            words += ["-launcher-exec", job.ssh]
        # Hydra's default forwards the whole environment, with whatever secrets stand in it.
        words += ["-genvlist", ",".join(job.forward)] if job.forward else ["-genvnone"]
    if job.interface:
        words += ["-iface", job.interface]
    if job.bind != "none":
        words += ["-bind-to", job.bind]
    return [*words, *job.extra, *program]


def environment(job: Job) -> dict[str, str]:
    """What mpiexec itself needs in its environment."""
    if not job.hosts:
        return {}
    # -genvlist of MPICH 5.0.2 overlooks the last variable of mpiexec's environment: let that be one that nobody needs.
    last = {"DBRDIST_LAUNCH_LAST": "1"}
    return {"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(job.ssh_options), **last} if job.ssh_options else last
