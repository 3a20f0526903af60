"""docs/architecture.md, made from the import rules and the first lines of all files.

python tests/rules/architecture_page.py --write    # after files were added, moved or described anew
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

from tests.rules import test_imports_of_launcher as launcher
from tests.rules.test_imports import BELOW, FILES, PACKAGE, WITHIN, module_of, own_imports

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
HEAD = """# Architecture

This page is for people who change dbrdist. `python tests/rules/architecture_page.py --write` makes it from the import
rules in `tests/rules/test_imports.py` and `test_imports_of_launcher.py`, and from the first line of each file. A test
keeps it current.

A *room* is a folder of `dbrdist/`, a *package* a folder in a room. A file imports its own package and packages below
it: never upward, never in a ring, never inside a function. Calls upward happen through callbacks that are handed down.
The hard rooms have pages of their own: [core](../dbrdist/core/README.md) and [comm](../dbrdist/comm/README.md). The
words that are used for one thing only are in [tests/rules/test_glossary.py](../tests/rules/test_glossary.py). To add an
operation, read [operations.md](operations.md).

"""


ADDING = Path(__file__).with_name("architecture_ways.md").read_text(encoding="utf-8")


@functools.cache
def first_line(path: Path) -> str:
    """The first sentence or line of a file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = " ".join(text.split("\n\n")[0].split())
    return line.replace("|", "\\|")


def levels(below: dict[str, set[str]]) -> dict[str, int]:
    """The level of each room or package: one above the highest of those that it may import."""

    @functools.cache
    def level(name: str) -> int:
        return 1 + max((level(b) for b in below[name] if b in below), default=-1)

    return {name: level(name) for name in below}


def rooms_of(names: set[str]) -> set[str]:
    """Rooms that are named as a whole or by one of their packages."""
    return {name.split(".")[0] for name in names}


def table_of_rooms() -> list[str]:
    """The rooms from the lowest to the highest."""
    below = {room: rooms_of(names) for room, names in BELOW.items()}
    lines = ["| level | room | what is in it | imports |", "|---|---|---|---|"]
    for room, level in sorted(levels(below).items(), key=lambda item: (item[1], item[0])):
        file = PACKAGE / f"{room}.py" if room == "errors" else PACKAGE / room / "__init__.py"
        names = ", ".join(sorted(below[room])) or "-"
        lines.append(f"| {level} | `{room}` | {first_line(file)} | {names} |")
    return lines


def protocols() -> list[str]:
    """The protocols: what one package wants of objects that another one makes."""
    lines = ["| protocol | in | what it is |", "|---|---|---|"]
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                words = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                lines.append(f"| `{node.name}` | {path.relative_to(PACKAGE)} | {words} |")
    return lines


def packages(room: str) -> list[str]:
    """The packages of a room and their files."""
    below = {name: names for name, names in WITHIN.items() if name.startswith(room + ".")}
    lines = [f"## {room}", "", "| level | package | what is in it | imports of this room |", "|---|---|---|---|"]
    in_order = sorted(levels(below).items(), key=lambda item: (item[1], item[0]))
    for name, level in in_order:
        short = name.removeprefix(room + ".")
        folder = PACKAGE / room / short
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        names = ", ".join(sorted(n.removeprefix(room + ".") for n in below[name])) or "-"
        lines.append(f"| {level} | `{short}` | {first_line(file)} | {names} |")
    for name, _ in in_order:
        folder = PACKAGE / room / name.removeprefix(room + ".")
        if folder.is_dir():
            lines += ["", f"### {room}/{folder.name}", "", *files(folder)]
    return lines


def files(folder: Path) -> list[str]:
    """The files of one folder."""
    return table_of_files(folder, sorted(folder.rglob("*.py")))


def table_of_files(folder: Path, paths: list[Path]) -> list[str]:
    """Files of a folder and below, with what they are for."""
    lines = ["| file | first line |", "|---|---|"]
    for path in paths:
        if path.name != "__init__.py":
            lines.append(f"| {path.relative_to(folder)} | {first_line(path)} |")
    return lines


def packages_of_launcher() -> list[str]:
    """The packages of dbrdist-launch and their files."""
    lines = ["## dbrdist-launch", "", "Its packages are in `launch/dbrdist_launch`, for it runs without dbrdist.", ""]
    lines += ["| level | package | what is in it | imports |", "|---|---|---|---|"]
    in_order = sorted(levels(launcher.WITHIN).items(), key=lambda item: (item[1], item[0]))
    folders = {name: launcher.LAUNCHER / name.replace(".", "/") for name, _ in in_order}
    folders[launcher.GROUND] = launcher.LAUNCHER
    for name, level in in_order:
        names = ", ".join(sorted(launcher.WITHIN[name])) or "-"
        lines.append(f"| {level} | `{name}` | {first_line(folders[name] / '__init__.py')} | {names} |")
    for name, _ in in_order:
        paths = [path for path in launcher.FILES if path.parent == folders[name]]
        lines += ["", f"### {name.replace('.', '/')}", "", *table_of_files(folders[name], paths)]
    return lines


def size() -> list[str]:
    """The figures that show whether the structure keeps up with the code."""
    folders = {path.parent for path in (*FILES, *launcher.FILES)}
    flat = sorted(((len(list(folder.glob("*.py"))), folder) for folder in folders), reverse=True)
    largest = ", ".join(f"{folder.relative_to(PACKAGE.parent)} {number}" for number, folder in flat[:4])
    arrows = {(module_of(path), module) for path in FILES for module, _ in own_imports(path)}
    comm = {(a.split(".")[1], b.split(".")[1]) for a, b in arrows if min(a.count("."), b.count(".")) > 0
            and a.split(".")[0] == b.split(".")[0] == "comm"}  # fmt: skip
    in_comm = levels({name: names for name, names in WITHIN.items() if name.startswith("comm.")})
    num_arrows = sum(a != b for a, b in comm)
    num_files = len(FILES) + len(launcher.FILES)
    return [
        f"{num_files} files in {len(folders)} folders; the largest flat folders: {largest}. Seen from its folder, "
        f"`comm` has {len(in_comm)} packages on {max(in_comm.values()) + 1} levels with {num_arrows} arrows between "
        "them.",
    ]


def page() -> str:
    """The whole page."""
    parts = [HEAD + ADDING + "## Rooms", "", *table_of_rooms(), "", *size(), "", "## Protocols", "", *protocols(), ""]
    for room in ("core", "kernels", "datasets", "comm", "cli"):
        parts += [*packages(room), ""]
    for room in ("functions", "links", "optimizers", "models", "training", "compat"):
        parts += [f"## {room}", "", *files(PACKAGE / room), ""]
    parts += [*packages_of_launcher(), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
