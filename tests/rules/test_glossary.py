"""One class name, one definition; one word, one meaning: the field's standard terms.

``SHARED`` lists the names that are defined in more than one file, with the reason; it may only become shorter.
"""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

import pytest

from dbrdist.core.names.missing_names import chainer_names

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "dbrdist").rglob("*.py"), *(ROOT / "launch").rglob("*.py")])

pytestmark = pytest.mark.slow  # parses all of the sources

# Names defined in more than one file, Chainer's own names aside.
SHARED = {
    "Call": "Chainer's type_check names an expression so; calls of functions and of verbs are others",
    "GetItem": "Chainer's type_check names an expression so, and the function of x[i] is Chainer's too",
    "Plan": "the order in which examples are read, which pickles name; and how a kernel is called for some shapes",
    "RMSNormalization": "the link, and the function that graphs and profiles show under the link's name, as in Chainer",
    "Scatter": "ChainerMN's function over ranks, and the primitive of the array API",
    "Shard": "of a dataset's examples and of an index of images, which pickles name; and of a run of parameters",
    **dict.fromkeys(
        ["ImageFolder", "RandomErasing", "RandomResizedCrop", "Snapshot"],
        "the class, and its settings, whose name the JSON schema of configurations shows",
    ),
}

# Words of this house that the field has a standard term for. They name no file any more.
FIELD = {
    "way": "step options",
    "carried": "step state (error feedback, accumulated gradients)",
    "courier": "communication thread",
    "cable": "sockets",
    "leaves": "tree sum",
    "arenas": "shared gradients",
    "codec": "wire type",
    "record": "call log",
    "verdict": "disagreement",
    "late": "lazy parameters",
    "handed_on": "delegation",
    "speed": "bandwidth",
    "background": "reduction handle",
    "processes": "MPI communicator",
    "part": "fused update",
    "changes": "versions",
    "graph": "function node",
}


def definitions() -> dict[str, set[str]]:
    """Public names of classes and of aliases of types, with the files that define them."""
    found = collections.defaultdict(set)
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            name = ""
            if isinstance(node, ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id if re.match("[A-Z][A-Za-z]*[a-z]", node.targets[0].id) else ""
            if name and not name.startswith("_"):
                found[name].add(str(path.relative_to(ROOT)))
    return found


def shared() -> set[str]:
    chainers = {name for names in chainer_names().values() for name in names}
    return {name for name, files in definitions().items() if len(files) > 1 and name not in chainers}


def test_a_class_name_has_one_definition():
    files = definitions()
    new = {name: sorted(files[name]) for name in shared() - SHARED.keys()}
    assert new == {}, "a name that another file defines already: choose one that says what this one is"


def test_the_list_of_shared_names_only_becomes_shorter():
    assert SHARED.keys() - shared() == set(), "defined once by now: take it off the list"


def test_files_bear_the_words_of_the_field():
    rooms = (ROOT / "dbrdist" / "core", ROOT / "dbrdist" / "comm")  # elsewhere these words may mean other things
    found = {
        str(path.relative_to(ROOT)): FIELD[path.stem]
        for path in SOURCES
        if path.stem in FIELD and path.parents[1] in rooms and path.parent.name != "functions"
    }
    assert found == {}


def test_definitions_are_found():
    assert definitions()["SerialIterator"] == {"dbrdist/datasets/loading/serial.py"}
    assert len(definitions()["Shard"]) > 1
