"""Which variables the ranks get."""

import pytest
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.preparation import environment as forwarding


def test_all_variables_travel_but_secrets_and_what_is_true_here_only():
    here = {
        "PATH": "", "HOME": "", "NCCL_DEBUG": "", "DATA_DIR": "/d", "HF_HOME": "/h", "DBRDIST_SEED": "1",
        "HF_TOKEN": "s", "AWS_SECRET_ACCESS_KEY": "s", "OPENAI_API_KEY": "s", "DB_PASSWORD": "s", "MY_AUTH": "s",
        "HOSTNAME": "x", "PWD": "/", "DISPLAY": ":0", "SSH_CLIENT": "", "XDG_RUNTIME_DIR": "",
        "PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "SLURM_JOB_ID": "1", "DBRDIST_LAUNCH_TOKEN": "x", "RANK": "0",
        "BASH_FUNC_x%%": "() {}", "KEYBOARD": "us",
    }  # fmt: skip
    usual = ("DATA_DIR", "DBRDIST_SEED", "HF_HOME", "HOME", "KEYBOARD", "NCCL_DEBUG", "PATH")
    assert forwarding.forwarded(here) == usual
    assert forwarding.forwarded(here, ["HF_TOKEN"]) == tuple(sorted((*usual, "HF_TOKEN")))
    assert forwarding.forwarded(here, ["HF_*"], only=True) == ("HF_HOME", "HOME", "PATH")
    assert forwarding.secrets(here, usual) == [
        "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "HF_TOKEN", "MY_AUTH", "OPENAI_API_KEY",
    ]  # fmt: skip


def test_what_an_outer_launch_left_does_not_reach_this_one():
    left = {"PMI_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "DBRDIST_LAUNCH_TOKEN": "x", "DBRDIST_LAUNCH_TIMEOUT": "9"}
    assert forwarding.without_stale({**left, "PATH": "p"}) == {"DBRDIST_LAUNCH_TIMEOUT": "9", "PATH": "p"}


def test_settings_of_variables_are_values_names_and_patterns():
    assert forwarding.parse_settings(("A=b=c", "B=", "C", "D_*"), {"C": ""}) == ({"A": "b=c", "B": ""}, ["C", "D_*"])
    for wrong in ("=b", "a b=c", "1A=c", "A-B", ""):
        with pytest.raises(LaunchError, match="expected NAME=VALUE"):
            forwarding.parse_settings((wrong,), {})
    with pytest.raises(LaunchError, match="this variable is not set here"):
        forwarding.parse_settings(("NOWHERE",), {})
