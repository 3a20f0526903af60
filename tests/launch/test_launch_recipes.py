"""The recipes, as far as they can be run here: batch scripts on fake hosts and Slurm, the rest read."""

import os
import pathlib
import subprocess
import sys

import fake_cluster
import fake_slurm
import pytest
import yaml
from dbrdist_launch.cli import launch
from support import PROGRAMS, ROOT, environment

RECIPES = ROOT / "launch" / "recipes"


@pytest.fixture
def venv(tmp_path):
    """What a user's environment has in bin: activate, dbrdist-launch, dbrdist-train (one that counts), mpiexec."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    here = pathlib.Path(sys.executable).parent
    (folder / "activate").write_text(f'PATH="{folder}:$PATH"\n')
    check = "import sys; assert sys.argv[1:] == ['--resume', 'c.yaml'], sys.argv"
    train = f"{check}; from runpy import run_path; run_path({str(PROGRAMS / 'counting.py')!r})"
    scripts = {
        "dbrdist-launch": f'#!/bin/sh\nPYTHONPATH={ROOT / "launch"} exec {sys.executable} -m dbrdist_launch "$@"\n',
        "dbrdist-train": f"#!{sys.executable}\n{train}\n",
        "mpiexec": f'#!/bin/sh\nexec {here / "mpiexec"} "$@"\n',
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder.parent


def settings(tmp_path, venv, **more):
    return environment("recipes", VENV=str(venv), TEST_FOLDER=str(tmp_path), TEST_STEPS="30", **more)


@pytest.mark.launch_system
@pytest.mark.mpiexec
@pytest.mark.parametrize("name", ["slurm-srun.sbatch", "slurm-mpiexec.sbatch"])
def test_slurm_recipes_run(tmp_path, venv, name):
    if fake_slurm.missing():
        pytest.skip(fake_slurm.missing())
    # The settings of the test reach the ranks by a prefix that the launcher forwards.
    train = venv / "bin" / "dbrdist-train"
    values = f"import os; os.environ.update(TEST_FOLDER={str(tmp_path)!r}, TEST_STEPS='30'); import sys"
    train.write_text(train.read_text().replace("import sys", values, 1))
    with fake_slurm.FakeSlurm(2) as slurm:
        words = slurm.inside("sbatch", "--wait", "-D", tmp_path, "-o", tmp_path / "out", RECIPES / name, "c.yaml")
        env = {**settings(tmp_path, venv), **slurm.environment}
        child = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90)
        out = (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""
    assert child.returncode == 0, child.stderr + out
    assert "done with 4" in out
    assert list(tmp_path.glob("runs/*/rank-3.log"))


@pytest.mark.launch_system
@pytest.mark.mpiexec
def test_pbs_recipe_runs(tmp_path, venv):
    if fake_cluster.missing():
        pytest.skip(fake_cluster.missing())
    (tmp_path / "nodes").write_text("node0\nnode0\nnode1\nnode1\n")
    with fake_cluster.FakeCluster(2) as cluster:
        env = settings(
            tmp_path, venv, PBS_NODEFILE=str(tmp_path / "nodes"), PBS_O_WORKDIR=str(tmp_path), PBS_JOBID="7.server",
            LAUNCH_OPTIONS=f"--ssh {cluster.ssh} --env TEST_FOLDER={tmp_path} --env TEST_STEPS=30", CONFIG="c.yaml",
        )  # fmt: skip
        words = cluster.inside("bash", RECIPES / "pbs.sh")
        child = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "done with 4" in child.stdout
    assert (tmp_path / "runs" / "7.server" / "rank-2.log").exists()


def test_manifest_is_an_mpijob_whose_command_parses():
    manifest = yaml.safe_load((RECIPES / "mpijob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    launcher = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["command"] == ["dbrdist-launch"]
    context = launch.make_context("dbrdist-launch", list(launcher["args"]))
    assert context.params["command"] == ("dbrdist-train", "--resume", "/data/config.yaml")
    worker = manifest["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == 2222


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
