"""What the command line decides between, told to its parts one by one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from test_config import GOOD, config, errors

from dbrdist.cli import build, build_updates, commands, extend, preflight, probe, report, train, weights
from dbrdist.cli.folder import CONFIG, LOG, SUMMARY
from dbrdist.cli.refuse import Refused, RefusedHere
from dbrdist.errors import CommunicatorError, ConfigError
from dbrdist.optimizers import SGD

ORIGIN = SimpleNamespace(where=lambda path: f"run.yaml:{'.'.join(map(str, path))}")


# ---- a run, from the command line on --------------------------------------------------------------------------------


@pytest.fixture
def begin(monkeypatch):
    """`_run` with a run that does nothing; what happened, in order."""
    happened = []
    one = SimpleNamespace(happened=happened, rank=0, starts=True, error=None, refused=None)

    class Run:
        def __init__(self, settings, origin, comm, console, warned):
            if one.error is not None:
                raise one.error

        def announce(self):
            happened.append("announced")

        def start_folder(self, mode):
            happened.append(mode)
            return one.starts

        def train(self, traces):
            happened.append(("trained", traces))
            return 75

    def make(name):
        happened.append(name)
        if one.refused is not None:
            raise one.refused
        return SimpleNamespace(rank=one.rank)

    warned = SimpleNamespace(listening=contextlib.nullcontext, gather=lambda comm: happened.append("gathered"))
    monkeypatch.setattr(train, "create_communicator", make)
    monkeypatch.setattr(train, "Warned", lambda rank, console: warned)
    monkeypatch.setattr(train.thread_pools, "use_one", lambda: happened.append("one thread"))
    monkeypatch.setattr(train.resume, "compare_ranks", lambda *arguments: happened.append("compared"))
    monkeypatch.setattr(train.run, "Run", Run)
    monkeypatch.setattr(train.run, "evaluate", lambda settings, origin, comm, run: happened.append(("evaluated", run)))
    monkeypatch.setattr(train.abort, "report", lambda words: happened.append(("here", words)))
    monkeypatch.setattr(train, "_complain", lambda words: happened.append(("said", words)))

    def call(mode="new", evaluate=None, trace=False, reproducible=False):
        happened.clear()
        settings = SimpleNamespace(communicator="flat", reproducible=reproducible)
        return train._run(settings, ORIGIN, mode, evaluate, trace), happened

    one.call = call
    return one


def test_a_run_is_announced_and_trained_where_steps_are_left(begin):
    assert begin.call() == (75, ["flat", "compared", "announced", "new", ("trained", False)])
    assert begin.call("resume", trace=True)[1][-2:] == ["resume", ("trained", True)]
    assert begin.call(reproducible=True)[1][:3] == ["flat", "one thread", "compared"]
    begin.starts = False
    assert begin.call() == (0, ["flat", "compared", "announced", "new"])
    assert begin.call(evaluate="old") == (0, ["flat", "compared", ("evaluated", "old"), "gathered"])


def test_a_refusal_is_said_by_rank_0_or_by_whom_it_concerns(begin):
    for begin.error, code, said in (
        (Refused("run.yaml:1:1: wrong", 2), 2, [("said", "run.yaml:1:1: wrong")]),
        (Refused("diverged", 1), 1, [("said", "dbrdist-train: diverged")]), (Refused("", 1), 1, []),
        (RefusedHere("disk full", 2), 2, [("here", "dbrdist-train: disk full")]),
    ):  # fmt: skip
        begin.rank = 0
        assert begin.call() == (code, ["flat", "compared", *said])
        begin.rank = 1
        assert begin.call() == (code, ["flat", "compared", *(words for words in said if words[0] == "here")])


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_a_communicator_that_does_not_fit_is_a_mistake_of_the_configuration(begin, kind):
    begin.refused = kind("two GPUs for three ranks")
    with pytest.raises(ConfigError, match=r"^run.yaml:communicator: communicator: two GPUs for three ranks$"):
        begin.call()
    begin.refused = CommunicatorError("rank 3 is gone")
    with pytest.raises(CommunicatorError, match=r"^rank 3 is gone$"):
        begin.call()


# ---- other commands -------------------------------------------------------------------------------------------------


def test_images_are_named_as_the_runs_own_configuration_says_or_another(monkeypatch):
    happened = []
    monkeypatch.setattr(commands, "find_snapshot", lambda run: happened.append(("found", run)))
    monkeypatch.setattr(commands, "folder_of", lambda run: f"{run}/folder")
    monkeypatch.setattr(commands.load, "load", lambda *given: happened.append(given) or ("settings", "origin"))
    for name in ("search_beside", "refuse_code_of_a_folder"):
        monkeypatch.setattr(commands.resolve, name, lambda *given, name=name: happened.append((name, *given)))
    monkeypatch.setattr(commands.predict, "predict", lambda *given: iter([given]))

    def named(*words):
        happened.clear()
        return list(commands.predict_images("run", words))

    assert named("a.png", "b.png") == [("settings", "origin", "run", ["a.png", "b.png"])]
    assert happened == [
        ("found", "run"), ("run/folder/config.yaml", []), ("refuse_code_of_a_folder", "settings", "origin"),
    ]  # fmt: skip
    for name in ("own.yaml", "own.yml"):
        assert named(name, "lr=1", "a.png") == [("settings", "origin", "run", ["a.png"])]
        assert happened == [("found", "run"), (name, ["lr=1"]), ("search_beside", name)]
    for words in ((), ("own.yaml",), ("lr=1",), ("a.yaml", "b.yaml", "a.png")):
        with pytest.raises(ConfigError, match=r"expected image files: --predict RUN image.jpg"):
            named(*words)
        assert happened == []


@pytest.mark.parametrize("words", [(), ("a.txt",), ("a.safetensors", "b.safetensors")])
def test_weights_are_written_to_one_file(words):
    with pytest.raises(ConfigError, match=r"expected one file to write: --export RUN weights.safetensors"):
        list(commands.export("run", words))


# ---- before the first step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [6, 7])
def test_up_to_six_parameters_are_listed(n):
    task = SimpleNamespace(namedparams=lambda: [(f"/predictor/l{k}/W", None) for k in range(n)])
    names = [f"/l{k}/W" for k in range(6)]
    assert build_updates._names(task) == (names if n == 6 else [*names, "..."])


def test_an_optimizer_that_cannot_be_divided_is_refused(monkeypatch):
    task, checked = SimpleNamespace(params=lambda: iter(["a", "b"])), []
    made = SGD()
    monkeypatch.setattr(SGD, "check_divisible", lambda self, params: checked.append(params))
    build_updates._check_divisible(made, None, ORIGIN, task)
    assert checked == [["a", "b"]]

    def refuse(self, params):
        raise ValueError("its hook looks at all gradients")

    monkeypatch.setattr(SGD, "check_divisible", refuse)
    with pytest.raises(ConfigError, match=r"run.yaml:zero: zero: its hook looks at all gradients"):
        build_updates._check_divisible(made, None, ORIGIN, task)
    with pytest.raises(ConfigError, match="expected an optimizer with update rules, got SimpleNamespace, which has no"):
        build_updates._check_divisible(SimpleNamespace(), None, ORIGIN, task)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_floating_numbers_are_cast_and_others_are_not(dtype):
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    convert = build.converter(dtype)
    kinds = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.int64, bool]
    for kind in kinds:
        values = [np.array([1, 0], kind) for _ in range(3)]
        after = wanted if kind in kinds[:4] else np.dtype(kind)
        alone, pair, named = convert(values), convert([(v, 5) for v in values]), convert([{"x": v} for v in values])
        for array in (alone, pair[0], named["x"]):
            assert array.dtype == after and array.tolist() == [[1, 0]] * 3
        assert pair[1].tolist() == [5] * 3 and pair[1].dtype.kind == "i"


@pytest.mark.parametrize(("length", "number", "reads"), [(150, 1, 100), (150, 40, 3), (7, 4, 2), (0, 4, 0)])
def test_a_hundred_examples_are_tried_where_all_are_corrupt(monkeypatch, length, number, reads):
    read = []
    monkeypatch.setattr(
        probe, "get_batch", lambda data, indices, seed, epoch, skipped: read.append(list(indices)) or []
    )
    settings = SimpleNamespace(seed=3, transforms=SimpleNamespace(train=()))
    look = probe.Look(settings, ORIGIN, "train", range(length), None, None)
    assert look.arguments(number) is None and len(read) == reads
    assert [i for indices in read for i in indices] == list(range(min(length, reads * number)))


@pytest.mark.parametrize(("free", "is_enough"), [(3 * 40 * 4 - 1, False), (3 * 40 * 4, True)])
def test_the_disk_must_have_room_for_the_snapshots_that_are_kept_and_one(monkeypatch, tmp_path, free, is_enough):
    """A snapshot of 10 numbers of 4 bytes has them three times, with the optimizer's states; three are kept."""
    parameter = SimpleNamespace(array=np.zeros(10, np.float32))
    made = SimpleNamespace(task=SimpleNamespace(params=lambda include_uninit: [parameter]))
    settings = SimpleNamespace(out=str(tmp_path / "a" / "b"), snapshot=SimpleNamespace(keep=3))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    found = list(preflight._disk(settings, ORIGIN, made))
    assert found == ([] if is_enough else [
        f"run.yaml:out: out: 479 bytes are free in {tmp_path}, but 3 snapshots and the next one need about 480; use "
        "another folder, or a smaller snapshot.keep"
    ])  # fmt: skip
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    assert list(preflight._disk(settings, ORIGIN, made)) == [f"run.yaml:out: out: cannot write to {tmp_path}"]


def test_an_unknown_key_is_told_one_that_is_near_or_all():
    (near,) = errors(GOOD, "bach=3")
    assert near == "command line 'bach=3': bach: unknown key, did you mean 'batch'?"
    (far,) = errors(GOOD, "snapshot.zzz=3")
    assert far == "command line 'snapshot.zzz=3': snapshot.zzz: unknown key; known here: every, keep, best, mode"
    (choice,) = errors(GOOD, "dtype=zzz")
    assert "known here" not in choice


@pytest.mark.parametrize(
    ("overrides", "happened"),
    [
        ((), ["setup"]), (("dtype=float64",), ["setup"]), (("dtype=mixedbf16",), ["setup"]),
        (("dtype=float16",), ["setup", "single precision", "scaling"]),
        (("dtype=bfloat16",), ["setup", "single precision"]), (("dtype=mixed16",), ["setup", "scaling"]),
        (("dtype=mixed16", "loss_scale=8"), ["setup", 8.0]), (("loss_scale=2.5",), ["setup", 2.5]),
    ],
)  # fmt: skip
def test_narrow_types_have_updates_in_single_precision_and_a_scaled_loss(monkeypatch, overrides, happened):
    found = []
    made = SimpleNamespace(
        setup=lambda task: found.append("setup"), use_fp32_update=lambda: found.append("single precision"),
        set_loss_scale=found.append, loss_scaling=lambda: found.append("scaling"),
    )  # fmt: skip
    monkeypatch.setitem(build_updates.OPTIMIZERS, "momentum_sgd", lambda **settings: made)
    assert build_updates.optimizer(config(GOOD, *overrides), ORIGIN, None) is made and found == happened


@pytest.mark.parametrize("length", [10, 11])
def test_a_configuration_has_a_largest_size(monkeypatch, tmp_path, length):
    assert extend.MAX_BYTES == 10_000_000
    monkeypatch.setattr(extend, "MAX_BYTES", 10)
    (tmp_path / "run.yaml").write_bytes(b"#" * length)
    if length == 10:
        assert extend.read_file(str(tmp_path / "run.yaml")) == b"#" * 10
    else:
        with pytest.raises(
            ConfigError, match=r"run.yaml: expected a configuration of at most 10 bytes, this is larger"
        ):
            extend.read_file(str(tmp_path / "run.yaml"))


def test_torchvisions_names_in_ours():
    names = {
        "conv1.weight": "conv.W", "bn1.weight": "bn.gamma", "bn1.bias": "bn.beta", "bn1.running_mean": "bn.avg_mean",
        "bn1.running_var": "bn.avg_var", "layer1.0.conv1.weight": "blocks.0.conv1.W",
        "layer1.1.bn2.weight": "blocks.1.bn2.gamma", "layer2.0.downsample.0.weight": "blocks.2.shortcut.conv.W",
        "layer2.0.downsample.1.bias": "blocks.2.shortcut.bn.beta", "fc.weight": "fc.W", "fc.bias": "fc.b",
        "weight": "W", "bn1.num_batches_tracked": "bn.num_batches_tracked",
    }  # fmt: skip
    assert weights.from_torchvision({name: k for k, name in enumerate(names)}) == {
        name: k for k, name in enumerate(names.values())
    }


# ---- reports --------------------------------------------------------------------------------------------------------


def test_a_record_is_what_lies_in_the_folder(tmp_path):
    (tmp_path / SUMMARY).write_text('{"status": "finished", "seed": 3}')
    one = report.read(str(tmp_path))
    assert one == (str(tmp_path), tmp_path.name, {"status": "finished", "seed": 3}, [], "")
    (tmp_path / CONFIG).write_bytes(b"epochs: 3 # \xff\n")
    (tmp_path / LOG).write_text('{"epoch": 1}\n')
    assert report.read(str(tmp_path))[3:] == ([{"epoch": 1}], "epochs: 3 # \ufffd\n")


def test_pictures_show_the_curves_and_mark_a_single_point(monkeypatch, tmp_path):
    drawn = []
    axes = SimpleNamespace(
        plot=lambda *points, **style: drawn.append((points, style)), set=lambda **words: drawn.append(words),
        legend=lambda: drawn.append("legend"),
    )  # fmt: skip
    plotting = SimpleNamespace(
        is_installed=lambda: True, new_figure=lambda *size: drawn.append(size) or ("figure", ((axes,),)),
        draw_grid=lambda *given: drawn.append(given[1:]), save_figure=lambda *given: drawn.append(given),
    )  # fmt: skip
    monkeypatch.setattr(report, "plotting", plotting)
    log = [{"epoch": 1, "main/loss": 2.0, "lr": 0.5}, {"epoch": 2, "main/loss": 1.0}]
    one = report.RunRecord("run", "run", {}, log, "")
    paths = [str(tmp_path / f"{name}.png") for name in ("loss", "learning_rate")]
    assert report._pictures(one, str(tmp_path)) == paths
    blue = report.COLOURS[0]
    assert drawn == [
        (1, 1, (7, 4)), (((1.0, 2.0), (2.0, 1.0)), {"color": blue, "label": "training", "marker": ""}),
        {"title": "Loss", "xlabel": "epoch"}, (True,), "legend", ("figure", paths[0]),
        (1, 1, (7, 4)), (((1.0,), (0.5,)), {"color": blue, "label": "", "marker": "o"}),
        {"title": "Learning rate", "xlabel": "epoch"}, (True,), ("figure", paths[1]),
    ]  # fmt: skip
    plotting.is_installed = lambda: False
    assert report._pictures(one, str(tmp_path)) == []
