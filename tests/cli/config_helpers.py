"""Configurations that tests begin with, and how they fail."""

from __future__ import annotations

import re

import pytest

from dbrdist.cli.configuration.load import check
from dbrdist.errors import ConfigError

GOOD = "model: mlp\ndata: digits\nbatch: 64\nepochs: 3\n"


def errors(text, *overrides):
    with pytest.raises(ConfigError) as caught:
        check(text.encode(), "run.yaml", overrides)
    return str(caught.value).splitlines()


def config(text=GOOD, *overrides):
    return check(text.encode(), "run.yaml", overrides)[0]


def configured(*lines_, epochs=10):
    """A configuration and its origin, from lines of YAML."""
    text = "\n".join(("batch: 4", f"epochs: {epochs}", *lines_))
    for key, value in (("model", "mlp"), ("data", "digits")):
        if not re.search(rf"^{key}:", text, re.M):
            text += f"\n{key}: {value}"
    return check(text.encode(), "run.yaml")
