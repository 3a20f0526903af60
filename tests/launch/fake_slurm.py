"""Slurm for real on the hosts of a FakeCluster: munge, slurmctld beside the launcher, one slurmd per node.

As root: `python tests/launch/fake_slurm.py 2 -- bash` gives a shell in which srun and sbatch work.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fake_cluster

_TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
_PMIX = pathlib.Path("/usr/lib/x86_64-linux-gnu/pmix2/lib")
_SETTINGS = """ClusterName=fake
SlurmctldHost={host}({subnet}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool.%n
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=requeue_setup_env_fail,sched_interval=2
MpiDefault=none
ReturnToService=2
KillWait=10
SlurmdTimeout=10
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=node[0-{last}] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=15 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
SlurmdParameters=config_overrides
"""


def missing():
    """Why Slurm cannot be had here, or None."""
    reason = fake_cluster.missing()
    if reason is not None:
        return reason
    absent = [name for name in _TOOLS if shutil.which(name) is None]
    return f"Slurm needs {', '.join(absent)}: run .ci/launch, which installs them" if absent else None


def has_pmix():
    """Whether srun's PMIx plugin finds its library (.ci/launch makes the link that Debian's package lacks)."""
    return (_PMIX / "libpmix.so").exists()


class FakeSlurm(fake_cluster.FakeCluster):
    """A cluster with Slurm; `environment` holds what its commands need."""

    def __init__(self, number):
        super().__init__(number)
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.slurm = {}
        try:
            self._start_slurm()
        except BaseException:
            self.close()
            raise

    def _start_slurm(self):
        text = _SETTINGS.format(
            host=os.uname().nodename.split(".")[0], subnet=fake_cluster.SUBNET, folder=self.folder, last=self.number - 1
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")  # private to each node
        script = (
            "mkdir -p /run/munge /run/slurm/state && "
            "dd if=/dev/urandom of=/run/munge/key bs=1024 count=1 status=none && "
            "chmod 400 /run/munge/key && chown -R munge: /run/munge && chmod 755 /run/munge"
        )
        fake_cluster._run(*self.inside("sh", "-c", script))
        for i in range(self.number):
            fake_cluster._run(*self.inside("mkdir", "-p", f"/run/slurm/spool.node{i}"))
        files = [f"--{name}-file=/run/munge/{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", self.inside("runuser", "-u", "munge", "--", "munged", "--foreground", *files))
        self._wait_until(self.inside("sh", "-c", "munge -n | unmunge"))
        self._daemon("slurmctld", self.inside("slurmctld", "-D", "-c"))
        for i in range(self.number):
            self.start_slurmd(i)
        self.wait_for_idle()

    def wait_for_idle(self):
        """Wait until all nodes are up and free; a node that Slurm thinks of as down is told to resume."""
        resume = f"scancel --user=root; scontrol update nodename=node[0-{self.number - 1}] state=resume 2>/dev/null"
        idle = f"test $(sinfo -h -N -p low -t idle | wc -l) = {self.number}"
        self._wait_until(self.inside("sh", "-c", f"{idle} || {{ {resume}; {idle}; }}"))

    def start_slurmd(self, i):
        """Start (again) the Slurm daemon of a node."""
        self._daemon(f"slurmd{i}", self.on_node(i, "slurmd", "-D", "-N", f"node{i}"))

    def _daemon(self, name, words):
        with open(self.folder / f"{name}.out", "ab") as log:
            self.slurm[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **self.environment},
            )  # fmt: skip

    def _wait_until(self, words, seconds=30.0):
        until = time.monotonic() + seconds
        while True:
            found = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **self.environment})
            if found.returncode == 0:
                return
            if time.monotonic() > until:
                logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))
                raise RuntimeError(f"{words[-1]}: {found.stdout}{found.stderr}\n{logs}")
            time.sleep(0.2)

    def kill_node(self, i):
        super().kill_node(i)
        if f"slurmd{i}" in self.slurm:
            self.slurm[f"slurmd{i}"].wait()

    def restart_node(self, i):
        super().restart_node(i)
        self.start_slurmd(i)

    def close(self):
        for process in getattr(self, "slurm", {}).values():
            process.terminate()
        for process in getattr(self, "slurm", {}).values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        super().close()


def main():
    with FakeSlurm(int(sys.argv[1])) as cluster:
        command = sys.argv[sys.argv.index("--") + 1 :]
        environment = {**os.environ, **cluster.environment, "FAKE_CLUSTER": str(cluster.folder)}
        sys.exit(subprocess.run(cluster.inside(*command), env=environment).returncode)


if __name__ == "__main__":
    main()
