"""The files of a release agree with each other: versions, requirements, contents of the source archive."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import dbrdist

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RECIPE = (ROOT / "packaging/conda/meta.yaml").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


@pytest.fixture(scope="module")
def replay():
    """The program that runs the commands of the packaging files."""
    spec = importlib.util.spec_from_file_location("replay", ROOT / "packaging/replay.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(requirement: str) -> str:
    return re.split(r"[ <>=!;\[]", requirement.lower())[0]


def test_every_file_has_the_same_version():
    version = dbrdist.__version__
    assert PROJECT["project"]["version"] == version
    assert CITATION["version"] == version
    assert re.search(r'set version = "(.*)"', RECIPE)[1] == version
    assert f"dbrdist[mpich,image]=={version}" in (ROOT / "packaging/Dockerfile").read_text()


def test_the_conda_recipe_requires_what_pip_requires(replay):
    recipe = replay.recipe
    pip = {name_of(r) for r in PROJECT["project"]["dependencies"]}
    assert {name_of(r) for r in recipe()["requirements"]["run"]} - {"python"} == pip
    built = {name_of(r) for r in PROJECT["build-system"]["requires"]}
    assert {name_of(r) for r in recipe()["requirements"]["host"]} - {"python", "pip"} == built
    points = {f"{name} = {target}" for name, target in PROJECT["project"]["scripts"].items()}
    assert set(recipe()["build"]["entry_points"]) == points


def test_every_command_of_the_packaging_files_is_replayed(replay, tmp_path):
    docker, apptainer, conda = replay.docker(), replay.apptainer(), replay.conda()
    text = (ROOT / "packaging/Dockerfile").read_text()
    assert sum(not command.startswith(("cp ", "mpiexec ")) for command in docker) == text.count("RUN ") + text.count(
        "&&"
    )
    assert docker[-1].startswith("mpiexec -n 2 dbrdist-train --overwrite /opt/dbrdist/digits.yaml")
    definition = (ROOT / "packaging/dbrdist.def").read_text()
    body = definition[definition.index("%post") : definition.index("%runscript")]
    lines = [line for line in body.splitlines() if line.startswith("    ")]
    assert len(apptainer) == len(lines) + 1 and apptainer[0] == "cp -r . /src"
    assert [c for c in conda if "pip install . " in c] and conda[-1] == "dbrdist-launch --help"
    ours = {c.split()[0] for c in docker + apptainer if replay.is_left_out(c)}
    assert ours == {"apt-get", "useradd", "rm"}
    assert replay.local("rm -rf /wheels", tmp_path) == f"rm -rf {tmp_path}/wheels"
    assert replay.local("pip wheel -w /wheels /src", Path("X")) == "pip wheel -w X/wheels X/src"


@pytest.mark.programs
def test_a_program_that_is_missing_ends_the_replay_of_the_recipe(replay, tmp_path):
    (check,) = (command for command in replay.conda() if "test -x" in command and "dbrdist-train" in command)
    here = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (tmp_path / "python").symlink_to(sys.executable)
    assert subprocess.run(["bash", "-ec", check], env=here).returncode == 1
    (tmp_path / "dbrdist-train").symlink_to(sys.executable)
    assert subprocess.run(["bash", "-ec", check], env=here).returncode == 0


def test_the_source_archive_holds_everything_that_a_user_reads():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {p.name for p in ROOT.glob("*.md")} | {"CITATION.cff", "packaging", "LICENSE"} <= set(included)
    assert all((ROOT / name).exists() for name in included)


def test_type_checkers_read_the_annotations():
    assert (ROOT / "dbrdist/py.typed").exists()
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_no_address_is_invented():
    urls = set(re.findall(r"https?://[^\s)\"]+", RECIPE + (ROOT / "CITATION.cff").read_text()))
    assert urls == set() and "urls" not in PROJECT["project"]
    for page in ("SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff"):
        assert not re.search(r"[\w.]+@[\w.]+", (ROOT / page).read_text()), page
    assert "MAINTAINERS.md" in (ROOT / "SECURITY.md").read_text()


def test_issue_templates_have_the_head_that_trackers_read():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"):
        _, head, body = path.read_text().split("---\n", 2)
        assert set(yaml.safe_load(head)) == {"name", "about"} and body.strip()
