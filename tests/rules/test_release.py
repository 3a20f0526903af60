"""The files of a release agree with each other: versions, requirements, contents of the source archive."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import dbrdist

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RECIPE = (ROOT / "packaging/conda/meta.yaml").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def recipe() -> dict:
    """The recipe as conda reads it, with its template expressions replaced."""
    text = re.sub(r"^{%.*%}$", "", RECIPE, flags=re.M)
    text = text.replace("{{ compiler('c') }}", "compiler_c").replace("{{ PYTHON }}", "python")
    return yaml.safe_load(text.replace("{{ name|lower }}", "dbrdist").replace("{{ version }}", "0"))


def name_of(requirement: str) -> str:
    return re.split(r"[ <>=!;\[]", requirement.lower())[0]


def test_every_file_has_the_same_version():
    version = dbrdist.__version__
    assert PROJECT["project"]["version"] == version
    assert CITATION["version"] == version
    assert re.search(r'set version = "(.*)"', RECIPE)[1] == version
    assert f"dbrdist[mpich,image]=={version}" in (ROOT / "packaging/Dockerfile").read_text()


def test_the_conda_recipe_requires_what_pip_requires():
    pip = {name_of(r) for r in PROJECT["project"]["dependencies"]}
    assert {name_of(r) for r in recipe()["requirements"]["run"]} - {"python"} == pip
    built = {name_of(r) for r in PROJECT["build-system"]["requires"]}
    assert {name_of(r) for r in recipe()["requirements"]["host"]} - {"python", "pip"} == built
    points = {f"{name} = {target}" for name, target in PROJECT["project"]["scripts"].items()}
    assert set(recipe()["build"]["entry_points"]) == points


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
