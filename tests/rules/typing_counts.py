"""How much the annotations say, and how often objects reach into each other: counts per 1,000 lines.

``Any`` is counted where annotations use it, once for each time, also through an alias: where ``Array`` is ``Any``,
each ``Array`` is one. ``object``, ``cast`` and ``type: ignore``, which say as little, are counted beside it. A private
member of another object is an attribute with one leading underscore of anything but ``self``, ``cls`` and ``super()``;
what the standard library spells so for everybody's use (``sys._getframe``, named tuples) is not counted.

Run ``python tests/rules/typing_counts.py`` for the table.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = {"dbrdist": ROOT / "dbrdist", "dbrdist_launch": ROOT / "launch" / "dbrdist_launch"}
PUBLIC = {"_getframe", "_asdict", "_replace", "_fields", "_make", "_exit", "_field_defaults"}


class Counts(NamedTuple):
    """Of some files."""

    anys: int
    objects: int
    casts: int
    ignores: int
    privates: int
    lines: int

    def per_1000(self, number: int) -> float:
        """So many for each 1,000 lines, to one place."""
        return round(1000 * number / max(self.lines, 1), 1)


class Source:
    """One file: its tree, what its names are imported from, and its aliases of types."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.num_lines = text.count("\n")
        self.num_ignores = len(re.findall(r"#\s*type:\s*ignore", text))
        self.imports: dict[str, tuple[str, str]] = {}
        self.aliases: dict[str, ast.expr] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                self.imports.update((a.asname or a.name, (node.module or "", a.name)) for a in node.names)
            elif isinstance(node, ast.Import):
                self.imports.update((a.asname or a.name.split(".")[0], (a.name, "")) for a in node.names)
        for node in self.tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and re.match("_?[A-Z]", target.id) and _may_be_a_type(value):
                self.aliases[target.id] = value


def _may_be_a_type(value: ast.AST | None) -> bool:
    return isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.BinOp)


@functools.cache
def sources() -> dict[str, Source]:
    """All files of the library and the launcher, by the name of the module."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = Source(path.read_text(encoding="utf-8"))
    return found


class Counter:
    """Counts in some files that know each other by name."""

    def __init__(self, files: dict[str, Source]) -> None:
        self._files = files

    def count(self, *prefixes: str) -> Counts:
        """The sums over the modules below these names."""
        total = [0] * len(Counts._fields)
        for name, source in self._files.items():
            if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes):
                total = [a + b for a, b in zip(total, self._count(name, source))]
        return Counts(*total)

    def _count(self, module: str, source: Source) -> Counts:
        written = list(annotations(source.tree))
        anys = sum(self._weight(module, x, ()) for x in [*written, *source.aliases.values()])
        objects = sum(isinstance(y, ast.Name) and y.id == "object" for x in written for y in ast.walk(x))
        casts = sum(isinstance(x, ast.Call) and _last_name(x.func) == "cast" for x in ast.walk(source.tree))
        return Counts(anys, objects, casts, source.num_ignores, len(privates(source.tree)), source.num_lines)

    def _weight(self, module: str, x: ast.AST, seen: tuple[tuple[str, str], ...]) -> int:
        """How often an annotation says ``Any``."""
        if isinstance(x, ast.Constant) and isinstance(x.value, str):
            x = _parsed(x.value)
        if isinstance(x, ast.Name):
            return self._weight_of_name(module, x.id, seen)
        if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name):
            origin, name = self._files[module].imports.get(x.value.id, ("", ""))
            return self._weight_of_import(f"{origin}.{name}".rstrip("."), x.attr, seen)
        return sum(self._weight(module, child, seen) for child in ast.iter_child_nodes(x))

    def _weight_of_name(self, module: str, name: str, seen: tuple[tuple[str, str], ...]) -> int:
        source, key = self._files[module], (module, name)
        if key in seen:
            return 0
        if name in source.aliases:
            return self._weight(module, source.aliases[name], (*seen, key))
        if name in source.imports:
            return self._weight_of_import(*source.imports[name], (*seen, key))
        return 0

    def _weight_of_import(self, origin: str, name: str, seen: tuple[tuple[str, str], ...]) -> int:
        if (origin, name) == ("typing", "Any"):
            return 1
        return self._weight_of_name(origin, name, seen) if origin in self._files else 0


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Of arguments, results and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            yield from filter(None, [*(x.annotation for x in arguments), node.returns])
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation


def privates(tree: ast.AST) -> list[str]:
    """The private members of other objects that are read or set."""
    return [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match("_[^_]", node.attr)
        and node.attr not in PUBLIC
        and not _is_own(node.value)
    ]


def _is_own(x: ast.expr) -> bool:
    if isinstance(x, ast.Call):
        return _last_name(x.func) == "super"
    return isinstance(x, ast.Name) and x.id in ("self", "cls")


def _last_name(x: ast.expr) -> str:
    return x.id if isinstance(x, ast.Name) else getattr(x, "attr", "")


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:  # words, as in Literal or Annotated
        return ast.Constant(None)


AREAS = {
    "core": ("dbrdist.core",),
    "comm": ("dbrdist.comm",),
    "core and comm": ("dbrdist.core", "dbrdist.comm"),
    "the whole library": ("dbrdist", "dbrdist_launch"),
}

if __name__ == "__main__":
    counter = Counter(sources())
    rooms = sorted({".".join(name.split(".")[:2]) for name in sources() if name.count(".")})
    for area, prefixes in {**{room: (room,) for room in rooms}, **AREAS}.items():
        c = counter.count(*prefixes)
        print(f"{area:28} {c}  Any {c.per_1000(c.anys)}, private {c.per_1000(c.privates)} per 1,000 lines")
