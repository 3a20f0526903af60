"""Tests of dbrdist.cli.configuration.components."""

from typing import get_args

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from dbrdist.cli.configuration import components, derived
from dbrdist.cli.configuration.load import check
from dbrdist.core.names.limits import settings_of
from tests.cli.config_helpers import GOOD, errors
from tests.each import each


def name_in(cls):
    """The name of a component in configurations."""
    return get_args(cls.model_fields["name"].annotation)[0]


@each(
    value=[
        1, 7, [[0, 1]], [[0, 128], [10, 224]], ((0, 3), (1, 1)),
        0, -1, 1.5, True, [], [[0, 0]], [[1, 5]], [[0, 5], [0, 6]], [[0, 5], [3, 6], [2, 7]], [[0, 5, 6]], "x",
    ]
)  # fmt: skip
def test_sizes_over_the_epochs(value):
    good = (1, 7, [[0, 1]], [[0, 128], [10, 224]], ((0, 3), (1, 1)))
    if any(type(value) is type(g) and value == g for g in good):
        assert components._sizes(value) == (value if isinstance(value, int) else tuple(map(tuple, value)))
    else:
        with pytest.raises(Exception, match="expected a size of at least 1, or pairs"):
            components._sizes(value)


TRANSFORMS = {
    "random_crop": {"size": 4}, "center_crop": {"size": 4}, "center_resized_crop": {"size": 4}, "resize": {"size": 4},
    "color_jitter": {}, "pca_lighting": {}, "rand_augment": {}, "trivial_augment": {}, "mixup": {}, "cutmix": {},
    "normalize": {"mean": [0.5], "std": [0.2]}, "random_flip": {},
}  # fmt: skip
CLASSES = {
    name_in(cls): cls
    for cls in vars(components).values()
    if isinstance(cls, type) and cls in vars(derived)["_MADE_BY"] and name_in(cls) in TRANSFORMS
}


def outside(limit):
    """Numbers just outside a limit."""
    return [
        *([limit.gt] if limit.gt is not None else []), *([limit.ge - 1] if limit.ge is not None else []),
        *([limit.lt] if limit.lt is not None else []), *([limit.le + 1] if limit.le is not None else []),
    ]  # fmt: skip


@each(name=[*TRANSFORMS])
def test_limits_of_transforms_hold_in_configurations_and_in_python(name):
    settings, needed = CLASSES[name], TRANSFORMS[name]
    settings(name=name, **needed)
    for one in settings_of(derived.made_by(settings)):
        for value in [] if one.limit is None else outside(one.limit):
            with pytest.raises(ValidationError, match=one.name):
                settings(name=name, **{**needed, one.name: value})
            with pytest.raises(ValueError, match="expected"):
                derived.made_by(settings)(**{**needed, one.name: value})


def test_all_derived_transforms_are_looked_at():
    assert set(CLASSES) == set(TRANSFORMS)


@each(
    **{
        "options, words": [
            ("magnitude: 10, increasing: true", None),
            ("magnitude: 10.5", None),
            ("magnitude: 10.5, increasing: true", "must be at most 10 with increasing: true, got 10.5"),
        ]
    }
)
def test_the_magnitude_of_operations_that_increase(options, words):
    text = f"{GOOD}transforms: {{train: [{{name: rand_augment, {options}}}]}}\n"
    if words is None:
        check(text.encode(), "run.yaml")
    else:
        (line,) = errors(text)
        assert line.endswith(f"transforms.train.0.magnitude: {words}")


@each(
    **{
        "value, found": [
            (0, 0), (255, 255), (256, None), (-1, None), ([0, 255], (0, 255)), ((1,), (1,)), ([0, 256], None),
            ([-1], None), ([], None), (True, None), (1.5, None), ("0", None), ([True], None),
        ]
    }
)  # fmt: skip
def test_bytes_that_fill_an_image(value, found):
    if found is None:
        with pytest.raises(PydanticCustomError, match="expected an integer from 0 to 255, or a list with one for each"):
            components._fill(value)
    else:
        assert components._fill(value) == found
