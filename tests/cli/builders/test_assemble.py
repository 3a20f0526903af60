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


@each(
    case=[
        ("", {}, "SerialIterator", 50, "short"),
        ("workers: 2\n", {"n_processes": 2}, "MultiprocessIterator", 50, "short"),
        ("threads: 3\n", {"n_threads": 3}, "MultithreadIterator", 50, "short"),
        ("last_batch: drop\nevaluation: {batch: 7}\nseed: 5\n", {}, "SerialIterator", 7, "drop"),
    ]
)  # fmt: skip
def test_batches_over_all_ranks(monkeypatch, case):
    text, own, kind, batch, last = case
    for name in ("SerialIterator", "MultithreadIterator", "MultiprocessIterator"):
        monkeypatch.setattr(assemble, name, lambda *words, name=name, **options: (name, words, options))
    settings, comm = checked(text), SimpleNamespace(rank=1, size=3)
    shared = {"seed": 5 if "seed" in text else 0, "rank": 1, "size": 3, "virtual_workers": None, **own}
    train = {"repeat": True, "shuffle": True, "last": last, **shared}
    assert assemble.iterator(settings, "data", comm, train=True) == (kind, ("data", 50), train)
    test = {"repeat": False, "shuffle": False, "last": "short", **shared}
    assert assemble.iterator(settings, "data", comm, train=False) == (kind, ("data", batch), test)


def test_an_evaluation_is_of_the_test_data_on_all_ranks(monkeypatch):
    asked = []
    monkeypatch.setattr(assemble, "iterator", lambda config, dataset, comm, train: (config, dataset, comm, train))
    monkeypatch.setattr(
        assemble.extensions, "Evaluator", lambda *words, **options: asked.append((words, options)) or "own"
    )
    monkeypatch.setattr(assemble, "create_multi_node_evaluator", lambda *words: words)
    made = SimpleNamespace(data=SimpleNamespace(test="test"), task="task", convert="convert", device="gpu")
    assert assemble.evaluator("config", made, "comm", "begin") == ("own", "comm")
    given = ("config", "test", "comm", False), "task", "convert"
    assert asked == [(given, {"device": "gpu", "eval_hook": "begin"})]


WHERE = SimpleNamespace(where=lambda path: f"run.yaml:{'.'.join(map(str, path))}")


@each(
    case=[
        ("", 50, 50, None), ("", 51, 51, "run.yaml:batch: batch: 50 examples for 51 ranks: every rank needs one; use a "
         "larger batch or fewer ranks"),
        ("evaluation: {batch: 1}\n", 99, 2, "run.yaml:evaluation.batch: evaluation.batch: 1 example for 2 ranks: every "
         "rank needs one; use a larger batch or fewer ranks"),
        ("evaluation: {batch: 2}\n", 99, 2, None), ("", 0, 1, "run.yaml:data: data: the training set is empty"),
        ("last_batch: drop\n", 50, 1, None),
        ("last_batch: drop\n", 49, 1, "run.yaml:last_batch: last_batch: drop leaves out all 49 training examples, "
         "which are fewer than the batch of 50; use a smaller batch, or short"),
        ("", 1, 2, "run.yaml:data: data: 1 training example for 2 ranks: every rank needs one; use fewer ranks"),
        ("batch: {virtual_workers: 4, per_worker: 2}\n", 9, 4, None),
        ("batch: {virtual_workers: 4, per_worker: 2}\n", 1, 2, None),
        ("batch: {virtual_workers: 1, per_worker: 2}\n", 9, 2, "run.yaml:batch.virtual_workers: batch.virtual_workers: "
         "1 for 2 ranks: every rank needs one; use at most 1 rank"),
        ("batch: {virtual_workers: 4, per_worker: 2}\nevaluation: {batch: 3}\n", 9, 2, "run.yaml:evaluation.batch: "
         "evaluation.batch: 3 examples for 4 virtual workers: every one needs one; use a larger batch or fewer virtual "
         "workers"),
    ]
)  # fmt: skip
def test_what_is_said_of_batches_and_data_that_do_not_suffice(case):
    text, num_examples, size, words = case
    base = BASE.replace("batch: 50\n", "") if text.startswith("batch:") else BASE
    settings = check((base + text).encode(), "run.yaml")[0]
    if words is None:
        assemble.check_sizes(settings, WHERE, num_examples, size)
    else:
        with pytest.raises(ConfigError) as caught:
            assemble.check_sizes(settings, WHERE, num_examples, size)
        assert str(caught.value) == words


@each(
    case=[
        ("", [(0, A, 4), (0, A, 1), (1, B, 4)], "device: device: gpu: ranks 0 and 1 would share the GPU 0000:1, though "
         "3 GPUs of their host would stay idle; write device: gpu, and let each rank see all GPUs of its host or one "
         "of its own (CUDA_VISIBLE_DEVICES)"),
        ("", [(0, A, 2), (0, B, 2), (0, A, 2), (0, A, 1)], "GPUs are shared: up to 3 ranks on one, since there are "
         "fewer GPUs than ranks"),
        ("communicator: pure_nccl\n", [(0, A, 1), (0, A, 1)], "device: device: gpu: ranks 0 and 1 would share the GPU "
         "0000:1, which NCCL refuses; start at most 1 rank on a host, or take communicator: auto"),
    ]
)  # fmt: skip
def test_what_is_said_of_ranks_that_share_gpus(case):
    text, places, words = case
    own = checked(f"device: gpu\n{text}")
    if words.startswith("GPUs"):
        assert assemble.sharing_of_gpus(own, WHERE, places) == words
    else:
        with pytest.raises(ConfigError) as caught:
            assemble.sharing_of_gpus(own, WHERE, places)
        assert str(caught.value) == f"run.yaml:{words}"


def test_gpus_are_compared_where_several_ranks_have_some(monkeypatch):
    monkeypatch.setattr(assemble, "bus_id_of_device", lambda: A)
    monkeypatch.setattr(assemble, "num_gpus", lambda: 1)
    comm = SimpleNamespace(size=2, inter_rank=3, allgather_obj=lambda mine: [mine, mine])
    assert assemble.share_gpus(checked("device: gpu\n"), WHERE, comm).startswith("GPUs are shared: up to 2 ranks")
    assert assemble.share_gpus(checked(), WHERE, comm) == ""
    comm.size = 1
    assert assemble.share_gpus(checked("device: gpu\n"), WHERE, comm) == ""


@each(case=[("gpu", 3, 2, 1), ("gpu", 3, 4, 3), ("gpu", 3, 0, 0), ("gpu:5", 3, 2, 5), ("gpu:0", 3, 2, 0)])
def test_each_rank_of_a_host_has_the_gpu_of_its_number_or_the_one_that_is_named(monkeypatch, case):
    name, local_rank, number, expected = case
    used = []

    def get_device(words):
        return SimpleNamespace(use=lambda: used.append(words))

    monkeypatch.setattr(assemble, "get_device", get_device)
    monkeypatch.setattr(assemble, "num_gpus", lambda: number)
    own = SimpleNamespace(device=name)
    assert assemble._device(own, WHERE, local_rank) is not None and used == [("@cupy", expected)]
    assert assemble._device(SimpleNamespace(device="cpu"), WHERE, local_rank) is None
    monkeypatch.setattr(assemble, "get_device", lambda words: 1 // 0)
    with pytest.raises(ConfigError) as caught:
        assemble._device(own, WHERE, local_rank)
    assert str(caught.value) == f"run.yaml:device: device: {name} cannot be used: integer division or modulo by zero"
