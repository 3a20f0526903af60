"""Builds the documentation site in site/VERSION, and checks its links; needs no network.

    python packaging/site/build.py [--without-reference]

Pages of docs/ keep their places, README.md becomes the first page, and the READMEs of examples/ become pages as well.
Links to other files of the repository become plain names, since the repository's address is not known yet.
"""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SITE = ROOT / "site"
# The reference: modules whose docstrings are shown in full.
REFERENCE = ("functions", "links", "optimizers", "training", "training.extensions", "onnx")
NAV = [
    ("Home", ["index.md"]),
    ("Tutorials", ["tutorials/README.md", "tutorials/own-images.md", "tutorials/slurm.md", "tutorials/from-pytorch.md",
                   "tutorials/from-chainer.md", "tutorials/large-batches.md"]),
    ("Guides", ["answers.md", "train.md", "data.md", "launch.md", "communicators.md", "reproducible.md",
                "gpu.md", "inference.md", "export.md", "onnx-operators.md", "profiling.md", "watch.md", "pytorch.md",
                "chainer.md", "examples/README.md"]),
    ("Project", ["versions.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md",
                 "MAINTAINERS.md", "figures.md", "gpu-status.md", "architecture.md", "operations.md"]),
]  # fmt: skip
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def sources() -> dict[str, Path]:
    """The pages of the site: their places in it, and their files."""
    found = {str(p.relative_to(ROOT / "docs")): p for p in (ROOT / "docs").rglob("*.md")}
    found |= {p.name: p for p in ROOT.glob("*.md") if p.name != "README.md"}
    found |= {str(p.relative_to(ROOT)): p for p in (ROOT / "examples").rglob("README.md")}
    return {"index.md": ROOT / "README.md", **found}


def with_links(place: str, path: Path, places: dict[Path, str]) -> str:
    """A page's text, with its links as the site has them."""

    def link(found: re.Match[str]) -> str:
        bang, words, target = found.groups()
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve()
        if file.is_dir() and (file / "README.md") in places:
            file = file / "README.md"
        if file not in places:
            return found[0] if bang else words
        to = os.path.relpath(places[file], os.path.dirname(place) or ".")
        return f"{bang}[{words}]({to}{'#' + anchor if anchor else ''})"

    text = path.read_text()
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def gather(folder: Path, with_reference: bool) -> None:
    """Write all pages, pictures and the configuration into a folder."""
    pages = sources()
    docs = folder / "pages"
    places = {path.resolve(): place for place, path in pages.items()}
    for file in (ROOT / "docs").rglob("*"):
        if file.suffix in (".png", ".ipynb", ".svg"):
            places[file.resolve()] = str(file.relative_to(ROOT / "docs"))
            target = docs / file.relative_to(ROOT / "docs")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    for place, path in pages.items():
        target = docs / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(with_links(place, path, places))
    nav: list[object] = [{title: entries if len(entries) > 1 else entries[0]} for title, entries in NAV]
    api = sorted(p for p in pages if p.startswith("api/"))
    nav.append({"API": api})
    if with_reference:
        (docs / "reference").mkdir()
        for name in REFERENCE:
            (docs / "reference" / f"{name}.md").write_text(f"# dbrdist.{name}\n\n::: dbrdist.{name}\n")
        nav.append({"Reference": [f"reference/{name}.md" for name in REFERENCE]})
    config = yaml.safe_load((Path(__file__).parent / "mkdocs.yml").read_text())
    if not with_reference:
        config["plugins"] = [p for p in config["plugins"] if not (isinstance(p, dict) and "mkdocstrings" in p)]
    shown = {entry for section in nav for entries in section.values() for entry in  # type: ignore[attr-defined]
             ([entries] if isinstance(entries, str) else entries)}  # fmt: skip
    config |= {"docs_dir": str(docs), "site_dir": str(SITE / VERSION), "nav": nav}
    config["not_in_nav"] = "\n".join(f"/{place}" for place in pages if place not in shown)
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))


class _Page(html.parser.HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for value in (values.get("id"), values.get("name")) if value}
        self.links += [value for value in (values.get("href"), values.get("src")) if value]


def broken(site: Path) -> list[str]:
    """Links of a site to pages, files or anchors that are not there, and to other servers' scripts and styles."""
    pages: dict[Path, _Page] = {}
    for path in site.rglob("*.html"):
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text())
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists():
                found.append(f"{path.relative_to(site.resolve())}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors and anchor != "__top":
                found.append(f"{path.relative_to(site.resolve())}: {link}: no such anchor")
    return sorted(set(found))


def build(with_reference: bool = True) -> Path:
    """Build the site of this version; its folder."""
    with tempfile.TemporaryDirectory() as name:
        gather(Path(name), with_reference)
        env = {
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "launch"))),
        }
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", f"{name}/mkdocs.yml"]
        subprocess.run(command, check=True, env=env)
    versions = sorted(p.name for p in SITE.iterdir() if p.is_dir())
    entries = [{"version": v, "title": v, "aliases": ["latest"] if v == VERSION else []} for v in versions]
    (SITE / "versions.json").write_text(json.dumps(entries))
    (SITE / "index.html").write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={VERSION}/index.html">\n'
    )
    return SITE / VERSION


def main() -> None:
    site = build("--without-reference" not in sys.argv)
    problems = broken(site)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{site / 'index.html'}: {len(list(site.rglob('*.html')))} pages, {len(problems)} broken links")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
