"""Tests of dbrdist.cli.builders.assemble."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dbrdist.cli.builders import assemble
from dbrdist.cli.configuration.load import check
from dbrdist.errors import ConfigError
from tests.cli.cli_helpers import OWN_PARTS, lines
from tests.cli.config_helpers import GOOD, config
from tests.each import each


@each(
    case=[
        (None, 64, 64, None), (None, 64, 65, "64 examples for 65 ranks: every rank needs one"),
        (None, 63, 64, "63 "), (4, 1, 4, None), (4, 99, 5, "4 for 5 ranks: every rank needs one"),
    ]
)  # fmt: skip
def test_every_rank_needs_an_example(case):
    num_workers, num_examples, size, expected = case
    text = GOOD if num_workers is None else GOOD.replace("64", f"{{virtual_workers: {num_workers}, per_worker: 16}}")
    own = config(text)
    origin = SimpleNamespace(where=lambda path: "run.yaml:1:1")
    if expected is None:
        assemble.check_sizes(own, origin, num_examples, size)
    else:
        with pytest.raises(ConfigError, match=expected):
            assemble.check_sizes(own, origin, num_examples, size)


BASE = "model: mlp\ndata: digits\nbatch: 50\nepochs: 1\n"


def checked(text="", *overrides):
    return check((BASE + text).encode(), "run.yaml", overrides)[0]


def test_names_of_every_kind():
    made = checked("", "model=ResNet20", "optimizer=AdamW", "optimizer.schedule=Cosine", "loss=MeanSquaredError")
    assert (made.model.name, made.optimizer.name) == ("resnet20", "adamw")
    assert (made.optimizer.schedule.name, made.loss.name) == ("cosine", "mean_squared_error")


@pytest.fixture
def own_parts(folder):
    (folder / "door.py").write_text(OWN_PARTS)
    yield
    sys.modules.pop("door", None)


def test_own_metrics_and_extensions(run, own_parts):
    words = (
        "metrics=['door:top2', {name: 'door:top2', args: {k: 10}}]",
        "extensions=[{name: 'door:Note', args: {word: each}}, "
        "{name: 'door:Note', args: {word: some}, every: 2 iterations}]",
    )
    code, _, err = run("run.yaml", *words[1:], "metrics=['door:top2']", "log.every=1 iteration")
    assert code == 0, err
    for entry in lines("result/log.jsonl"):
        assert entry["main/accuracy"] <= entry["main/top2"] <= 1
    assert "validation/main/top2" in lines("result/log.jsonl")[-1]
    calls = sys.modules["door"].calls
    assert [n for word, n in calls if word == "each"] == [1, 2, 3]
    assert [n for word, n in calls if word == "some"] == [2]


def test_what_is_no_extension_is_refused_by_its_key(run, own_parts):
    code, _, err = run("run.yaml", "extensions=['builtins:dict']")
    assert code == 2 and "extensions.0: 'builtins:dict': expected an extension" in err and "Traceback" not in err


A, B = "0000:1", "0000:2"


@each(
    case=[
        ([(0, A, 2), (0, B, 2)], ""),
        ([(0, A, 1), (0, B, 1)], ""),  # each rank sees a GPU of its own
        ([(0, A, 1), (1, A, 1)], ""),  # of two hosts
        ([(0, A, 1), (0, A, 1)], "up to 2 ranks on one"),
        ([(0, A, 2), (0, B, 2), (0, A, 2)], "up to 2 ranks on one"),
        ([(0, A, 2), (0, A, 2)], "ranks 0 and 1 would share the GPU 0000:1, though 1 GPU of"),
        ([(0, A, 1), (1, B, 2), (1, B, 2)], "ranks 1 and 2 would share the GPU 0000:2"),
    ]
)  # fmt: skip
def test_ranks_share_a_gpu_only_where_there_are_too_few(case):
    places, expected = case
    origin = SimpleNamespace(where=lambda path: "run.yaml:1:1")
    if "would" in expected:
        with pytest.raises(ConfigError, match=expected):
            assemble.sharing_of_gpus(checked("device: gpu\n"), origin, places)
    else:
        said = assemble.sharing_of_gpus(checked("device: gpu\n"), origin, places)
        assert expected in said and bool(said) == bool(expected)


def test_nccl_wants_a_gpu_for_each_rank():
    origin = SimpleNamespace(where=lambda path: "run.yaml:1:1")
    own = checked("device: gpu\ncommunicator: pure_nccl\n")
    with pytest.raises(ConfigError, match="ranks 0 and 1 would share the GPU 0000:1, which NCCL refuses"):
        assemble.sharing_of_gpus(own, origin, [(0, A, 1), (0, A, 1)])
    assert assemble.sharing_of_gpus(own, origin, [(0, A, 2), (0, B, 2)]) == ""
