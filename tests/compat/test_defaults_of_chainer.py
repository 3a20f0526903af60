"""What programs for Chainer 7 get where they name no value: the defaults that its own signatures have.

``chainer_defaults.txt`` has them, read from Chainer 7.8.1 by introspection, without those that are None.
"""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from tests.each import each

LINES = Path(__file__).with_name("chainer_defaults.txt").read_text().splitlines()
ROOMS = {"chainer": "dbrdist", "chainermn": "dbrdist.comm"}


def ours(path):
    """What we have by the name of Chainer's."""
    root, *parts = path.split(".")
    thing = importlib.import_module(ROOMS[root])
    for part in parts:
        if not hasattr(thing, part):
            importlib.import_module(f"{thing.__name__}.{part}")
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("room", sorted({line.partition("(")[0].split(".")[1] for line in LINES}))
@each(line=lambda room: [line for line in LINES if line.partition("(")[0].split(".")[1] == room])
def test_defaults_are_those_of_chainer(line):
    call = ast.parse(line, mode="eval").body
    parameters = inspect.signature(ours(ast.unparse(call.func))).parameters
    for keyword in call.keywords:
        assert parameters[keyword.arg].default == ast.literal_eval(keyword.value), keyword.arg
