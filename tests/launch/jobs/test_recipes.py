"""The recipes, as far as they can be run here: batch scripts on fake hosts and Slurm, the rest read."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import fake_cluster
import pytest
import yaml
from dbrdist_launch.launcher.cli import launch
from support import ROOT, attempts_in, environment

from dbrdist.cli.running import rehearsal

pytestmark = pytest.mark.slow

RECIPES = ROOT / "launch" / "recipes"
CONFIG = """model: {name: mlp, units: [32]}
data: digits
batch: 64
epochs: 3
optimizer: {name: momentum_sgd, lr: 0.1}
out: trained
"""


@pytest.fixture
def venv(tmp_path):
    """What a user's environment has in bin: activate, dbrdist-launch, dbrdist-train, mpiexec; all of this checkout.

    Beside it lies a configuration. The launcher takes the dbrdist-train beside its interpreter, where there is one; by
    PYTHONPATH that is this checkout's too.
    """
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    here = pathlib.Path(sys.executable).parent
    (folder / "activate").write_text(f'PATH="{folder}:$PATH"\n')
    scripts = {
        "dbrdist-launch": f'#!/bin/sh\nexec {sys.executable} -m dbrdist_launch "$@"\n',
        "dbrdist-train": f"#!{sys.executable}\nfrom dbrdist.cli.train import main\n\nmain()\n",
        "mpiexec": f'#!/bin/sh\nexec {here / "mpiexec"} "$@"\n',
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return folder.parent


def settings(venv, **more):
    return environment("recipes", VENV=str(venv), PYTHONPATH=f"{ROOT}:{ROOT / 'launch'}", **more)


def recipe_words(first, *more):
    """A recipe by its name, or options of sbatch and a script."""
    return [RECIPES / first if str(first).endswith(".sbatch") else first, *more]


def submit(slurm, tmp_path, venv, recipe, *arguments):
    """Submit a recipe and wait for its end: (exit code, output, what Slurm says of the job).

    `sbatch --wait` would look after 2, 10, 42 and 74 seconds.
    """
    env = {**settings(venv), **slurm.environment}
    words = [
        "sbatch",
        "--parsable",
        "-D",
        tmp_path,
        "-o",
        tmp_path / "out",
        *recipe_words(recipe, *arguments),
    ]
    job = subprocess.run(slurm.inside(*words), cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True).stdout.strip()
    show = slurm.inside("scontrol", "show", "job", "--oneliner", job)
    until, state = time.monotonic() + 90, ""
    while not re.search("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)", state) and time.monotonic() < until:
        time.sleep(0.3)
        state = subprocess.run(show, env=env, capture_output=True, text=True).stdout
    subprocess.run(slurm.inside("scancel", job), env=env, capture_output=True)
    out = (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""
    return int(re.search(r"ExitCode=(\d+)", state)[1]), out, state


def assert_trained(tmp_path, log_dir, ranks=4):
    """The training went to its end on so many ranks, learned something and left what it must."""
    summary = json.loads((tmp_path / "trained" / "summary.json").read_text())
    assert (summary["status"], summary["epochs"], summary["num_ranks"]) == ("finished", 3.0, ranks)
    assert summary["metrics"]["validation/main/accuracy"] > 0.8
    assert list((tmp_path / "trained").glob("snapshot*"))
    assert "finished: 3 epochs" in (log_dir / "latest" / "attempt-0" / "rank-0.out").read_text()
    attempts = attempts_in(log_dir)
    assert [(attempt["code"], attempt["failure"]) for attempt in attempts] == [(0, None)]


@pytest.mark.launch_system
@pytest.mark.mpiexec
@pytest.mark.parametrize("name", ["slurm-srun.sbatch", "slurm-mpiexec.sbatch"])
def test_slurm_recipes_train(slurm, tmp_path, venv, name):
    code, out, state = submit(slurm, tmp_path, venv, name, "c.yaml")
    assert code == 0, out + state
    assert "JobState=COMPLETED" in state and "Restarts=0" in state
    assert "finished: 3 epochs" in out
    (log_dir,) = tmp_path.glob("runs/*")
    assert_trained(tmp_path, log_dir)


@pytest.mark.launch_system
@pytest.mark.mpiexec
@pytest.mark.parametrize("name", ["slurm-srun.sbatch", "slurm-mpiexec.sbatch"])
def test_slurm_recipe_that_fails_by_itself_stays_out_of_the_queue(slurm, tmp_path, venv, name):
    code, out, state = submit(slurm, tmp_path, venv, name, "missing.yaml")
    assert code == 2, out + state
    assert "JobState=FAILED" in state and "ExitCode=2:0" in state and "Restarts=0" in state
    assert "missing.yaml: the configuration cannot be read" in out
    assert "is not requeued: the program itself failed" in out


IMAGES = """extends: {base}
model: {{name: resnet18, num_classes: 4}}
data: {{name: image_folder, root: data, train: train, test: test, resize: [40, 40]}}
transforms:
  train: [{{name: random_crop, size: 32}}, random_flip, {{name: normalize, mean: [0.5], std: [0.25]}}]
  test: [{{name: center_crop, size: 32}}, {{name: normalize, mean: [0.5], std: [0.25]}}]
metrics: []
batch: {{virtual_workers: 8, per_worker: 2}}
epochs: 3
threads: 0
out: trained
"""


@pytest.mark.launch_system
@pytest.mark.mpiexec
def test_an_imagenet_recipe_trains_on_eight_nodes(eight_nodes, tmp_path, venv):
    """Goyal's, of smaller images and batches; the script as it is but for one rank on each node and its time."""
    rehearsal.make_photographs(str(tmp_path / "data"))
    base = ROOT / "examples" / "imagenet" / "goyal2017.yaml"
    (tmp_path / "c.yaml").write_text(IMAGES.format(base=base))
    script = ROOT / "examples" / "imagenet" / "8-nodes.sbatch"
    words = ["--ntasks-per-node=1", "--cpus-per-task=1", script, "c.yaml", "optimizer.schedule=constant"]
    code, out, state = submit(eight_nodes, tmp_path, venv, *words)
    assert code == 0, out + state
    assert "JobState=COMPLETED" in state
    assert "NumNodes=8" in state
    summary = json.loads((tmp_path / "trained" / "summary.json").read_text())
    assert (summary["status"], summary["epochs"], summary["num_ranks"]) == ("finished", 3.0, 8)
    assert sorted(summary["hosts"]) == [f"node{i}" for i in range(8)]


@pytest.mark.launch_system
@pytest.mark.mpiexec
def test_pbs_recipe_trains(tmp_path, venv):
    if fake_cluster.missing():
        pytest.skip(fake_cluster.missing())
    (tmp_path / "nodes").write_text("node0\nnode0\nnode1\nnode1\n")
    with fake_cluster.FakeCluster(2) as cluster:
        env = settings(
            venv, PBS_NODEFILE=str(tmp_path / "nodes"), PBS_O_WORKDIR=str(tmp_path), PBS_JOBID="7.server",
            LAUNCH_OPTIONS=f"--ssh {cluster.ssh}", CONFIG="c.yaml",
        )  # fmt: skip
        words = cluster.inside("bash", RECIPES / "pbs.sh")
        child = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "finished: 3 epochs" in child.stdout
    assert_trained(tmp_path, tmp_path / "runs" / "7.server")


def test_manifest_is_an_mpijob_whose_command_parses():
    manifest = yaml.safe_load((RECIPES / "mpijob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    launcher = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["command"] == ["dbrdist-launch"]
    context = launch.make_context("dbrdist-launch", list(launcher["args"]))
    assert context.params["command"] == ("dbrdist-train", "--resume", "/data/config.yaml")
    worker = manifest["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == 2222


@pytest.mark.programs
def test_dockerfile_agrees_with_the_manifest_and_its_ssh_settings_are_valid(tmp_path):
    text = (RECIPES / "Dockerfile").read_text()
    for word in ("openssh-server", "mpiuser", "/home/mpiuser/.sshd_config", "[mpich", "Port 2222"):
        assert word in text
    printed = [part.split("'")[1] for part in text.split("printf ")[1:]]
    client, server = (piece.encode().decode("unicode_escape") for piece in printed)
    (tmp_path / "client").write_text(client)
    if not os.path.exists("/usr/sbin/sshd"):
        pytest.skip("the settings are checked by OpenSSH, which is not here")
    found = subprocess.run(
        ["ssh", "-G", "-F", tmp_path / "client", "x"], capture_output=True, text=True, check=True
    ).stdout
    assert "port 2222" in found and "stricthostkeychecking false" in found
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", key], check=True)
    (tmp_path / "server").write_text(server.replace("/home/mpiuser/.ssh/id_rsa", str(key)))
    os.makedirs("/run/sshd", exist_ok=True)
    checked = subprocess.run(["/usr/sbin/sshd", "-t", "-f", tmp_path / "server"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
