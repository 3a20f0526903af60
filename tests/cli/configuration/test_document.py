"""Tests of dbrdist.cli.configuration.document."""

from __future__ import annotations

import json
import math

import pytest

from dbrdist.cli.configuration import document
from dbrdist.cli.configuration.document import read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("+3", 3),
        ("-.Inf", -math.inf),
        ("true", True),
        ("FALSE", False),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("", None),
        ("'3'", "3"),
        ("1e", "1e"),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    document = read(f"a: {text}\n", "f.yaml")
    assert document.problems == []
    assert document.data == {"a": value}
    assert type(document.data["a"]) is type(value)


def test_positions_of_keys_and_values():
    document = read("a:\n  b: 1\nc: [10, {d: 20}]\n", "f.yaml")
    assert document.keys["a", "b"] == "f.yaml:2:3"
    assert document.values["a", "b"] == "f.yaml:2:6"
    assert document.values["c", 0] == "f.yaml:3:5"
    assert document.values["c", 1, "d"] == "f.yaml:3:13"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3:1: duplicate key 'a', first given at f.yaml:1:1"),
        ("a: {b: 1, b: 2}", "f.yaml:1:11: duplicate key 'b', first given at f.yaml:1:5"),
        ("a: @numpy", "f.yaml:1:4: found character '@' that cannot start any token"),
        ("a:\n\t- 1", "indent with spaces, not with tabs"),
        ("a: &x\n  b: *x\n", "f.yaml:1:4: an alias (*) that contains itself"),
        (
            "a: !!python/name:os.system x",
            "f.yaml:1:4: the tag 'tag:yaml.org,2002:python/name:os.system' is not supported",
        ),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "f.yaml:3:3: merging with <<"),
        ("? [a]\n: 1", "f.yaml:1:3: a key must be a word"),
        ("a: 1\n---\nb: 2", "f.yaml:2:1: "),
        ("a: [1, 2", "f.yaml:1:9: "),
        ("a: 1\nb: \x01", "f.yaml:2:4: the character '\\x01' is not allowed"),
        ("[" * 1000, "f.yaml: nested too deeply"),
        ("a: *nothing", "f.yaml:1:4: found undefined alias 'nothing'"),
    ],
)
def test_what_is_wrong_is_said_with_its_position(text, words):
    problems = read(text, "f.yaml").problems
    assert len(problems) == 1
    assert words in problems[0]


def test_aliases_are_read():
    assert read("a: &x {b: 1}\nc: *x\n", "f").data == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.slow
@pytest.mark.parametrize(("more", "is_taken"), [(0, True), (1, False)])
def test_a_hundred_thousand_entries_are_enough(more, is_taken):
    """The whole is one, and so is each list; 998 times a hundred, by an alias, 100 where it stands, and the rest."""
    text = f"a: &x [{', '.join('0' * 99)}]\nb: [{', '.join(['*x'] * 998)}]\nc: [{', '.join('0' * (97 + more))}]\n"
    found = read(text, "f")
    assert found.problems == ([] if is_taken else ["f: expected at most 100,000 entries, with aliases (*) expanded"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: @n", "found character '@' that cannot start any token (while scanning for the next token); put the text "
                  "in quotes"),
        ("a: `n", "found character '`' that cannot start any token (while scanning for the next token); put the text "
                  "in quotes"),
        ("a: \tb\n\tc: 1", "found character '\\t' that cannot start any token (while scanning for the next token); "
                  "indent with spaces, not with tabs"),
        ("a: *n", "found undefined alias 'n'"),
        ("a: %n", "found character '%' that cannot start any token (while scanning for the next token)"),
    ],
    ids=["at", "backtick", "tab", "alias", "percent"],
)  # fmt: skip
def test_mistakes_of_yaml_have_their_context_and_what_to_do(text, sentence):
    (problem,) = read(text, "f").problems
    assert problem.partition(": ")[2] == sentence


@pytest.mark.parametrize("words", ["é😀", "\U00010000\U0010ffff", "a\\b😀c", "\U0001d4b3" * 3])
def test_letters_that_json_writes_as_two_escapes_are_one(words):
    """A configuration that a program wrote by `json.dumps` had other texts, and was refused."""
    for value in (words, {words: [words]}):
        text = json.dumps(value)
        assert document.read(text, "f").data == value
        assert document.read(f"# a comment\n{text}", "f").data == value
    assert document.read(document.write({"a": words}), "f").data == {"a": words}
