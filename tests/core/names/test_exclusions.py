"""Tests of dbrdist.core.names.exclusions: the API and configurations refuse the same."""

import json

import pytest

from dbrdist.cli.configuration.load import load
from dbrdist.comm.gradients.compression import TopK
from dbrdist.comm.steps.step_options import checked_way
from dbrdist.core.names.exclusions import EXCLUSIONS, conflicts
from dbrdist.errors import ConfigError
from tests.each import each

# How each option is chosen, in a program and in a configuration; None where there is no such option.
IN_PROGRAMS = {
    "zero": {"zero": 1}, "compression": {"compression": TopK()}, "local_steps": {"local_steps": 4},
    "double_buffering": {"double_buffering": True}, "accumulate": {"accumulate": 2},
    "no_zero_fill": {"zero_fill": False}, "dynamic_loss_scale": {},
}  # fmt: skip
IN_CONFIGURATIONS = {
    "zero": {"zero": 1}, "compression": {"compression": {"name": "top_k"}}, "local_steps": {"local_steps": 4},
    "double_buffering": {"double_buffering": True}, "accumulate": {"accumulate": 2},
    "virtual_workers": {"batch": {"virtual_workers": 4, "per_worker": 2}},
    "dynamic_loss_scale": {"dtype": "mixed16", "loss_scale": "auto"}, "gradient_dtype": {"gradient_dtype": "float16"},
    "parameter_audit": {"parameter_audit": "1 epoch"},
}  # fmt: skip
PLAIN = {
    "double_buffering": False, "zero": 0, "compression": None, "accumulate": 1, "local_steps": 1, "zero_fill": True,
}  # fmt: skip


def in_program(*options):
    """Choose these options of a multi-node optimizer."""
    way = checked_way(**{**PLAIN, **{key: value for o in options for key, value in IN_PROGRAMS[o].items()}})
    if "dynamic_loss_scale" in options:
        way.check_with(dynamic_loss_scale="a dynamic loss scale")


def in_configuration(tmp_path, *options):
    """Load a configuration with these options."""
    keys = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "epochs": 2, "batch": 8}
    for option in options:
        keys.update(IN_CONFIGURATIONS[option])
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(keys))  # which is YAML too
    return load(path)


@each(exclusion=[(e.one, e.other) for e in EXCLUSIONS])
def test_two_that_exclude_each_other_are_refused_wherever_they_can_be_chosen(exclusion, tmp_path):
    refused = 0
    if IN_PROGRAMS.keys() >= set(exclusion):
        with pytest.raises(ValueError, match=r"cannot be combined|does not work with"):
            in_program(*exclusion)
        refused += 1
    if IN_CONFIGURATIONS.keys() >= set(exclusion):
        with pytest.raises(ConfigError) as caught:
            in_configuration(tmp_path, *exclusion)
        assert f": {exclusion[1]}" in str(caught.value)
        refused += 1
    assert refused, "nobody can choose both"


@each(option=list(IN_PROGRAMS))
def test_each_option_of_a_program_works_alone(option):
    in_program(option)


@each(option=list(IN_CONFIGURATIONS))
def test_each_option_of_a_configuration_works_alone(option, tmp_path):
    in_configuration(tmp_path, option)


def test_what_may_go_together():
    assert list(conflicts({})) == list(conflicts({"accumulate": "a", "zero": "z", "dynamic_loss_scale": "d"})) == []
    ((at_fault, words),) = conflicts({"zero": "zero: 1", "local_steps": "local_steps: 4"})
    assert (at_fault, words) == ("local_steps", "zero: 1 and local_steps: 4 cannot be combined; use only one of them")
