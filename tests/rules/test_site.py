"""The documentation site: its links lead somewhere, and its search answers ten frequent questions at the first hit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.comm.jobs import ROOT

sys.path.insert(0, str(ROOT / "packaging" / "site"))
import build

sys.path.pop(0)

# What people ask, and the section that answers it.
QUESTIONS = {
    "how do I freeze layers": "answers.html#how-do-i-freeze-layers",
    "freeze layer": "answers.html#how-do-i-freeze-layers",
    "early stopping": "answers.html#how-do-i-stop-early",
    "mixed precision in my own loop": "answers.html#how-do-i-use-mixed-precision",
    "warm-up and cosine schedule in a script": "answers.html#how-do-i-warm-up",
    "weights and biases mlflow": "answers.html#how-do-i-log-to",
    "onnx export": ("answers.html#how-do-i-export", "export.html#onnx-export"),
    "weights into pytorch": ("answers.html#how-do-i-export", "export.html#weights-for-pytorch"),
    "what does this argument mean": "answers.html#what-does-an-argument-mean",
    "own dataset class": "answers.html#how-do-i-write-my-own-dataset",
    "learning rate finder": ("answers.html#how-do-i-find", "train.html#learning-rate-finder"),
    "batch size finder": ("answers.html#how-do-i-find", "train.html#batch-size-finder"),
    "slurm": ("answers.html#how-do-i-run-on-a-slurm", "tutorials/slurm.html"),
    "windows macos": "answers.html#does-it-work-on-windows",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site without the reference, which takes longer."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("material", reason="the extra docs is not installed")
    patch = pytest.MonkeyPatch()
    patch.setattr(build, "SITE", tmp_path_factory.mktemp("site"))
    yield build.build(with_reference=False)
    patch.undo()


def search(site):
    """The site's search as its pages run it: titles count a thousand times as much as text."""
    lunr = pytest.importorskip("lunr")
    documents = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text", "boost": 1}]
    return lunr.lunr("location", fields, [d for d in documents if d["title"]])


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.filterwarnings("ignore")
def test_links_and_ten_questions(site):
    assert build.broken(site) == []
    index = search(site)
    wrong = {}
    for question, answers in QUESTIONS.items():
        hits = [hit["ref"] for hit in index.search(question)]
        if not hits or not hits[0].startswith(answers):
            wrong[question] = hits[:4]
    assert wrong == {}
    text = (site / "index.html").read_text()
    assert "https://fonts" not in text and "dark mode" in text.lower()


def test_a_second_make_docs_installs_nothing(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    environment = tmp_path / "venv"
    (environment / "bin").mkdir(parents=True)
    words = ["make", "--dry-run", "docs", f"VENV={environment}"]
    first = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pip install" in first
    for name in re.findall(rf"(?<={re.escape(str(environment))}/)\.\w+", first + " " + f"{environment}/.ready"):
        (environment / name).touch()
    second = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pip" not in second and "packaging/site/build.py" in second


def test_every_page_is_in_the_navigation_or_an_example():
    shown = {place for _, places in build.NAV for place in places}
    missing = [p for p in build.sources() if p not in shown and not p.startswith(("api/", "examples/"))]
    assert missing == []
    assert shown <= set(build.sources())


def test_links_out_of_the_site_become_words(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("[x](b.md#c) [y](no.py) ![z](p.png)\n```\n[x](b.md)\n```\n")
    for name in ("b.md", "p.png"):
        (tmp_path / name).touch()
    places = {(tmp_path / "b.md"): "down/b.md", (tmp_path / "p.png"): "p.png"}
    found = build.with_links("a.md", page, places)
    assert found == "[x](down/b.md#c) y ![z](p.png)\n```\n[x](b.md)\n```\n"


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#x">1</a><a href="b.html#y"></a><a href="c.html"></a><p id="q">')
    (tmp_path / "b.html").write_text('<p id="x"><a href="https://no.invalid/"></a><img src="no.png">')
    assert build.broken(tmp_path) == ["a.html: b.html#y: no such anchor", "a.html: c.html", "b.html: no.png"]
