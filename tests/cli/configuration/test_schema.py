"""Tests of dbrdist.cli.configuration.schema."""

from __future__ import annotations

from dbrdist.cli.configuration.schema import number_at
from tests.cli.config_helpers import GOOD, config


def test_numbers_by_dotted_keys():
    own = config(GOOD)
    assert number_at(own, "epochs") == 3.0 and number_at(own, "nothing") is None and number_at(own, "model") is None
    assert number_at(own, "reproducible") is None
    assert number_at((1, 2.5), "1") == 2.5 and number_at((1, 2.5), "2") is None and number_at((1,), "x") is None
    assert number_at({"a": {"b": 4}}, "a.b") == 4 and number_at({"a": 1}, "b") is None and number_at(3, "a") is None
