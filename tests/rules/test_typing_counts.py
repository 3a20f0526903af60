"""Annotations say what they mean, and objects keep their private members to themselves: numbers that may only go down.

Where a change lowers a number, lower it here too: what was gained once is not lost again.
"""

from __future__ import annotations

import ast

import pytest
from typing_counts import AREAS, FOLDERS, Counter, Counts, Source, annotations, privates, sources

from tests.each import each

pytestmark = pytest.mark.slow  # parses all of the sources

# Per 1,000 lines: Any after expanding aliases; beside it object, cast and type: ignore together; private members.
MOST = {
    "core": (17.8, 7.1, 4.9),
    "comm": (11.9, 3.8, 0.0),
    "core and comm": (14.8, 5.5, 2.5),
    "the whole library": (28.8, 3.8, 1.5),
}


def counted(area: str) -> Counts:
    return Counter(sources()).count(*AREAS[area])


def numbers(c: Counts) -> tuple[float, ...]:
    return tuple(map(c.per_1000, (c.anys, c.objects + c.casts + c.ignores, c.privates)))


@each(area=list(AREAS))
def test_annotations_say_more_and_objects_keep_to_themselves(area):
    now = numbers(counted(area))
    above = [
        f"{what}: {number} per 1,000 lines, at most {most}"
        for what, number, most in zip(("Any", "object, cast, type: ignore", "private members"), now, MOST[area])
        if number > most
    ]
    assert above == [], "run python tests/rules/typing_counts.py"


# ---- the counts themselves ------------------------------------------------------------------------------------------
def anys(text: str, **others: str) -> int:
    files = {"m": Source(text), **{name: Source(other) for name, other in others.items()}}
    return Counter(files).count("m").anys


@each(
    **{
        "text, expected": [
            ("from typing import Any\ndef f(x: Any, *y: Any, **z: Any) -> Any: ...", 4),
            ("from typing import Any\nx: dict[str, Any] = {}\ny = Any", 1),
            ("import typing as t\ndef f(x: t.Any) -> int: ...", 1),
            ("from typing import Any\ndef f(x: 'list[Any]', y: 'no annotation but words'): ...", 1),
            ("from typing import Any\nPair = tuple[Any, Any]\ndef f(x: Pair) -> list[Pair]: ...", 6),
            ("from typing import Any as Anything\ndef f(x: Anything): ...", 1),
            ("from other import Array\ndef f(x: Array | None) -> Array: ...", 2),
            ("import other\ndef f(x: other.Array): ...", 1),
            ("from middle import Array\ndef f(x: Array): ...", 1),
            ("from other import Shape\ndef f(x: Shape): ...", 0),
            ("Ring = list['Ring']\ndef f(x: Ring): ...", 0),
            ("class Any: ...\ndef f(x: Any): ...", 0),
        ]
    }
)
def test_any_is_counted_through_aliases(text, expected):
    other = "from typing import Any, TypeAlias\nArray: TypeAlias = Any\nShape = tuple[int, ...]"
    assert anys(text, other=other, middle="from other import Array") == expected


def test_what_says_as_little_is_counted_beside_it():
    text = "def f(x: object): return cast(int, x)  # type: ignore\ny = typing.cast(str, f)\nobject()\n"
    c = Counter({"m": Source(text)}).count("m")
    assert (c.objects, c.casts, c.ignores, c.lines) == (1, 2, 1, 3)
    assert c.per_1000(c.casts) == 666.7


def test_private_members_of_others_are_found():
    text = (
        "self._a; cls._b; super()._c(); other._d; self.e._f = other.g._h; x.__dict__; sys._getframe(); n._asdict()\n"
        "other._d()"
    )
    assert sorted(privates(ast.parse(text))) == ["_d", "_d", "_f", "_h"]


def test_all_kinds_of_arguments_have_annotations():
    found = annotations(ast.parse("async def f(a: A, /, b: B, *c: C, d: D, **e: E) -> F:\n    g: G = 1\n"))
    assert sorted(x.id for x in found) == ["A", "B", "C", "D", "E", "F", "G"]


def test_the_types_ship():
    """hatch packs all that lies in these folders."""
    assert all((folder / "py.typed").is_file() for folder in FOLDERS.values())


def test_the_sources_are_there():
    assert {"dbrdist.core.tape.variable", "dbrdist.comm", "dbrdist_launch.main"} <= sources().keys()
    assert Counter(sources()).count("dbrdist.comm").lines > 10_000
