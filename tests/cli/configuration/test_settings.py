"""Tests of dbrdist.cli.configuration.settings."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Literal

import pydantic
import pytest

from dbrdist.cli.configuration import settings
from dbrdist.errors import ConfigError
from tests.cli.config_helpers import GOOD, config, errors
from tests.each import each

LARGEST = 2**31 - 1
TRAIN = "transforms.train=[{name: %s}]"


@pytest.mark.parametrize(
    ("setting", "taken", "refused"),
    [
        ("snapshot.keep=%s", [1, LARGEST], [0, LARGEST + 1, 1.5, "true"]),
        ("epochs=%s", [1e9, 0.5], [0, 1.1e9, ".inf"]),
        ("seed=%s", [0, 2**63 - 1], [-1, 2**63]), ("zero=%s", [0, 1, 2], [-1, 3]), ("out=%s", ["a"], ['""']),
        ("workers=%s", [0, 256], [-1, 257]), ("threads=%s", [0, 256], [-1, 257]),
        ("optimizer.lr=%s", [1e-300, 5.0], [0, -1.0, ".nan"]),
        ("optimizer={name: msvag, beta: %s}", [0, 0.999], [-0.001, 1]),
        ("optimizer={name: lars, weight_decay: %s}", [0, 3.0], [-1e-9]),
        (
            "optimizer.schedule={name: step, milestones: %s}",
            ["[1]", "[1, 2.5]", "[0]"],
            ["[]", "[-1]", "[2, 1]", "[1, 1]"],
        ),
        ("compression={name: top_k, fraction: %s}", [1, 1e-9], [0, 1.01]),
        ("loss.label_smoothing=%s", [0, 0.99], [1, -0.1]),
        (TRAIN % "mixup, p: %s", [0, 1], [-0.1, 1.1]), (TRAIN % "mixup, alpha: %s", [1e-9], [0]),
        (TRAIN % "random_crop, size: 8, padding: %s", [0, 9], [-1]),
        (TRAIN % "random_crop, size: %s", [1, 65535, "[[0, 1]]", "[[0, 65535], [3, 8]]"],
         [0, 65536, "true", "[]", "[[1, 8]]", "[[0, 8], [0, 9]]", "[[0, 8], [3, 0]]", "[[0, 65536]]", "[[0, 8, 9]]"]),
        (TRAIN % "random_resized_crop, size: 8, smallest: %s", [1, 1e-9], [0, 1.01]),
        (TRAIN % "random_resized_crop, size: 8, largest: %s", [1, 0.5], [0, 1.01]),
        (TRAIN % "center_resized_crop, size: 8, ratio: %s", [1, 1e-9], [0, 1.01]),
        (TRAIN % "color_jitter, hue: %s", [0, 0.5], [-0.01, 0.51]),
        (TRAIN % "color_jitter, contrast: %s", [0, 9], [-0.1]),
        (TRAIN % "random_erasing, value: %s", [0, 255, "noise"], [-1, 256, "black"]),
        (TRAIN % "random_erasing, smallest: %s", [0.3, 1e-9], [0, 1.01]),
        (TRAIN % "random_erasing, largest: %s", [0.5, 1], [0, 1.01]),
        (TRAIN % "rand_augment, magnitude: %s", [0, 30], [-0.1, 30.1]), (TRAIN % "rand_augment, num_ops: %s", [1], [0]),
        (TRAIN % "normalize, std: [1.0], mean: %s", ["[0.5]"], ["[]"]),
        (TRAIN % "normalize, mean: [0.5], std: %s", ["[0.5]"], ["[]", "[0.0]"]),
    ],
)  # fmt: skip
def test_bounds_of_settings(setting, taken, refused):
    key = setting.partition("=")[0].split(".")[0]
    base = "".join(f"{line}\n" for line in GOOD.splitlines() if not line.startswith(f"{key}:"))
    for value in taken:
        config(base, setting % value)
    for value in refused:
        with pytest.raises(ConfigError, match=rf"(?s)command line .*{key}"):
            config(base, setting % value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("epochs=1e-8", None),
        ("epochs=9e-9", "epochs: 9e-09 epochs are less than one step"),
        (f"batch={2**31 - 1}", None),
        (f"batch={{virtual_workers: 1, per_worker: {2**31 - 1}}}", None),
        (
            f"batch={{virtual_workers: 2, per_worker: {2**30}}}",
            "2,147,483,648 examples per step are more than 2,147,483,647",
        ),
        ("loss_scale=3e38", None),
        ("optimizer.schedule={name: cosine, warmup_epochs: 3}", None),
        (
            "optimizer.schedule={name: cosine, warmup_epochs: 3.1}",
            "a warm-up of 3.1 epochs is longer than the run of 3",
        ),
    ],
)
def test_numbers_that_a_run_may_have(override, expected):
    key = override.partition("=")[0]
    text = "\n".join(line for line in GOOD.splitlines() if not line.startswith(f"{key}:")) + "\n"
    if expected is None:
        config(text, override)
    else:
        assert any(expected in line for line in errors(text, override))


@each(dtype=["mixed16", "float16", "mixedbf16", "float32"])
def test_the_largest_loss_scale_is_the_types(dtype):
    largest = 65504 if dtype in ("mixed16", "float16") else 3e38
    config(GOOD, f"dtype={dtype}", f"loss_scale={largest}")
    assert any("takes at most" in line for line in errors(GOOD, f"dtype={dtype}", f"loss_scale={largest * 1.01}"))


class Plain(settings.Settings):
    name: Literal["plain"] = "plain"


@each(
    **{
        "kind, classes, custom, words": [
            ("model", (Plain,), settings.Custom, "a model: plain, or your own package.module:callable"),
            ("optimizer", (Plain,), None, "an optimizer: plain"),
            ("updater", (), settings.Custom, "an updater: package.module:callable"),
        ]
    }
)
def test_an_unknown_name_is_told_those_that_are_known(monkeypatch, kind, classes, custom, words):
    monkeypatch.setattr(settings, "BY_TAG", {})
    adapter = pydantic.TypeAdapter(settings.component(kind, *classes, custom=custom))
    with pytest.raises(pydantic.ValidationError, match=f"expected the name of {re.escape(words)} "):
        adapter.validate_python("nothing")
    if classes:
        assert type(adapter.validate_python("PLAIN")) is Plain
    if custom:
        assert adapter.validate_python("own:part").name == "own:part"


class Described(settings.Settings):
    """Settings of this test."""

    a: int = 1
    """One.

    And more.
    """
    b: int = 2
    c: int = pydantic.Field(3, description="Three.")
    """Not this."""


def test_the_text_below_a_field_describes_it():
    class Inner(Described):
        d: int = 4
        """Four."""

    given = {name: field.description for name, field in Inner.model_fields.items()}
    assert given == {"a": "One.\n\nAnd more.", "b": None, "c": "Three.", "d": "Four."}
    properties = Inner.model_json_schema()["properties"]
    assert {name: entry.get("description") for name, entry in properties.items()} == given
    assert pydantic.create_model("Made", __base__=Described, e=(int, 5)).model_fields["e"].description is None
    assert settings._texts_of("no.such.module") == {}


def test_classes_within_classes_and_functions_have_texts_of_their_own(tmp_path, monkeypatch):
    text = '''
class Outer:
    a: int = 1
    """Of the outer."""

    class Inner:
        b: int = 2
        """Of the inner."""

        def make(self):
            class Made:
                c: int = 3
                """Of the one that is made."""

def make():
    class Made(Outer):
        a: int = 4
        """Of another."""
'''
    (tmp_path / "with_texts_below.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("with_texts_below")
    try:
        assert settings._texts_of("with_texts_below") == {
            "Outer": {"a": "Of the outer."},
            "Outer.Inner": {"b": "Of the inner."},
            "Outer.Inner.make.<locals>.Made": {"c": "Of the one that is made."},
            "make.<locals>.Made": {"a": "Of another."},
        }
    finally:
        del sys.modules["with_texts_below"]
