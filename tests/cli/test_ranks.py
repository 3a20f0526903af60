"""`dbrdist-train` under mpiexec: all ranks end alike, and a run goes on exactly where it was."""

import importlib.util
import json
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cli.cli_helpers import ROOT, finish, lines, same_runs
from tests.each import each

pytestmark = [pytest.mark.mpiexec, pytest.mark.timeout(90)]
OWN = """

def own_hook():
    return lambda optimizer: None


def own_optimizer():
    from dbrdist.core.update.optimizer import Optimizer

    class Mine(Optimizer):
        def update(self, lossfun=None, *args, **kwds):
            pass

    return Mine()
"""
EXACT = ["log.every=1 iteration", "snapshot.every=4 iterations", "iterations=10"]


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_two_ranks_train_together(ranks):
    code, out, err = finish(ranks(2, "run.yaml", "log.every=1 iteration"))
    assert code == 0, err
    assert out.count("test accuracy") == 1
    assert "ranks: 2; batch: 100, that is 50 per rank" in out
    assert json.loads(Path("result/summary.json").read_text())["num_ranks"] == 2
    assert len(lines("result/log.jsonl")) == 3
    assert all(0 < entry["communication_fraction"] < 1 for entry in lines("result/log.jsonl"))


PRINTED_ONCE = [
    (["-h"], "Usage:", "--print-schema"),
    (["--print-schema"], "{", '"title": "Config"'),
    (["run.yaml", "--dry-run"], "model:", "bytes per allreduce"),
]


def common(text):
    """Without the name of the program and the measured bytes."""
    return text.partition("[OPTIONS]")[2] or text.partition("memory: ")[0]


@each(case=[(["--help"], "Usage:", "--print-schema"), *PRINTED_ONCE])
def test_what_needs_no_ranks_is_printed_once(ranks, several, run, case):
    words, first, marker = case
    if case in PRINTED_ONCE:
        code, out, err = several(2, *(c[0] for c in PRINTED_ONCE))[PRINTED_ONCE.index(case)]
    else:
        code, out, err = finish(ranks(2, *words))
    assert (code, err) == (0, "")
    assert out.startswith(first)
    assert out.count(marker) == 1
    parts = run(*words)[1].rsplit("\nbatch: 100\n", 1)  # the plan's, which comes after the configuration's
    alone = "\nranks: 2; batch: 100, that is 50 per rank\n".join(parts)
    assert re.sub("; .* bytes per allreduce| and rank", "", common(out)) == common(alone)


def test_the_ranks_share_the_same_run(ranks, run):
    """Without batch normalization the number of ranks changes nothing but the order of sums."""
    words = ["run.yaml", "model=mlp", "model.dropout=0.2", "dtype=float64", "log.every=1 iteration"]
    for n in (1, 2, 3):
        code, _, err = run(*words, "out=r1") if n == 1 else finish(ranks(n, *words, f"out=r{n}"))
        assert code == 0, err
    logs = [lines(f"r{n}/log.jsonl") for n in (1, 2, 3)]
    for log in logs[1:]:
        for one, several in zip(logs[0], log, strict=True):
            for key in ("main/loss", "main/accuracy"):
                assert several[key] == pytest.approx(one[key], rel=1e-12)
    for key in ("validation/main/loss", "validation/main/accuracy"):
        assert logs[1][-1][key] == pytest.approx(logs[0][-1][key], rel=1e-11)
        assert logs[2][-1][key] == pytest.approx(logs[0][-1][key], rel=1e-11)


def test_a_killed_run_goes_on_bit_for_bit(ranks, several):
    """SIGKILL in the middle of an epoch, with dropout, augmentation and batch normalization on; of either rank."""
    for rank in ("0", "1"):
        killed = ranks(2, "run.yaml", *EXACT, f"out=cut{rank}", "model.args.kill_at=7", KILL_RANK=rank)
        assert finish(killed)[0] != 0
        assert sorted(p.name for p in Path(f"cut{rank}").glob("snapshot*")) == ["snapshot_iter_4"]
        Path(f"cut{rank}/snapshot_iter_8.tmp-1").write_bytes(b"half")  # of a process that was killed while it saved
    resumed = [["run.yaml", *EXACT, f"out=cut{rank}", "--resume"] for rank in "01"]
    straight, *outcomes = several(2, ["run.yaml", *EXACT, "out=straight"], *resumed)
    assert straight[0] == 0, straight
    for rank, (code, out, err) in enumerate(outcomes):
        assert code == 0, err
        assert not list(Path(f"cut{rank}").glob("*.tmp-*"))
        assert f"continuing from cut{rank}/snapshot_iter_4, epoch 0.28" in out
        same_runs("straight", f"cut{rank}")


def test_a_run_goes_on_with_another_number_of_ranks(ranks):
    assert finish(ranks(2, "run.yaml", *EXACT, "iterations=4"))[0] == 0
    code, out, err = finish(ranks(3, "run.yaml", *EXACT, "--resume"))
    assert code == 0, err
    assert "continuing from result/snapshot_iter_4" in out
    assert [entry["iteration"] for entry in lines("result/log.jsonl")] == list(range(1, 11))


def test_a_request_to_stop_saves_and_exits_with_75(ranks, several):
    words = ["run.yaml", "log.every=1 iteration", "snapshot.every=1000 epochs", "epochs=1000", "iterations=null"]
    resumed, done = [], {}
    kills = Path(sys.executable).with_name("prterun").exists()  # Open MPI's, soon after a SIGTERM
    for number in (signal.SIGUSR1,) if kills else (signal.SIGTERM, signal.SIGUSR1):
        own, log = [*words, f"out={number.name}"], Path(number.name, "log.jsonl")
        process = ranks(2, *own)
        wait_for(lambda log=log: log.exists() and len(lines(log)) > 3)
        process.send_signal(number)
        code, out, err = finish(process)
        assert code == 75, err
        assert f"{number.name} arrived on rank" in out
        done[number.name] = json.loads(Path(number.name, "summary.json").read_text())["iterations"]
        assert Path(f"{number.name}/snapshot_iter_{done[number.name]}").exists()
        resumed.append([*own, "--resume", f"iterations={done[number.name] + 2}"])
    for (name, last), (code, out, err) in zip(done.items(), several(2, *resumed), strict=True):
        assert code == 0, err
        assert f"continuing from {name}/snapshot_iter_{last}" in out


BAD = [
    (["run.yaml", "bach=3"], 2, "command line 'bach=3': bach: unknown key, did you mean 'batch'?"),
    (["nothing.yaml"], 2, "nothing.yaml: the configuration cannot be read: No such file or directory"),
    (["run.yaml", "model=nomod:f"], 2, "importing 'nomod' failed: ModuleNotFoundError: No module named 'nomod'"),
    (["run.yaml", "batch=2"], 2, "batch: 2 examples for 3 ranks: every rank needs one"),
    (["run.yaml", "evaluation.batch=2"], 2, "evaluation.batch: 2 examples for 3 ranks"),
    (["run.yaml", "data=usernet:few", "data.args.n=2"], 2, "data: 2 training examples for 3 ranks"),
    (["run.yaml", "data=usernet:few", "data.args.n=0"], 2, "data: the training set is empty"),
    (["run.yaml", "data=usernet:few", "data.args.n=1"], 2, "data: 1 training example for 3 ranks"),
    (["run.yaml", "optimizer.lr=1e30", "iterations=9"], 1, "NonFiniteLossError: iteration"),
]


def said_once(outcome, code, message):
    got, _, err = outcome
    assert got == code
    assert err.count(message) == 1
    assert "Traceback" not in err


@each(case=BAD)
def test_bad_input_ends_all_ranks_alike(several, case):
    words = [[*c[0], f"out=bad{number}"] for number, c in enumerate(BAD)]
    said_once(several(3, *words)[BAD.index(case)], *case[1:])


FEW = ["data=usernet:few", "transforms.train=[]"]
OTHERWISE = [
    (
        ["optimizer.lr=0.RANK5"],
        2,
        "command line 'optimizer.lr=0.15': optimizer.lr: expected 0.05, as rank 0 has, got 0.15",
    ),
    (
        ["batch=10RANK"],
        2,
        "command line 'batch=101': batch: expected 100, as rank 0 has, got 101; start all ranks with",
    ),
    (["epochs=1RANK"], 2, "epochs: expected 10.0, as rank 0 has, got 11.0"),
    (["evaluation.every=1RANK iterations"], 2, "evaluation.every: expected 10 iteration, as rank 0 has, got 11 iter"),
    (["model.args.width=1RANK"], 2, "model.args.width: expected 10, as rank 0 has, got 11"),
    (["zero=RANK"], 2, "zero: expected 0, as rank 0 has, got 1"),
    (["seed=RANK"], 2, "seed: expected 0, as rank 0 has, got 1"),
    (["batch={virtual_workers: 3, per_worker: 1RANK}"], 2, "batch.per_worker: expected 10, as rank 0 has, got 11"),
    (
        [*FEW, "data.args.n=3RANK"],
        1,
        "rank 1: 31 training examples instead of 30 training examples; rank 2",
    ),
    (
        [*FEW, "data.args.n=30", "data.args.num_test=2RANK"],
        1,
        "rank 1: 21 test examples instead of 20 test examples; rank 2: 22 test",
    ),
    (["out=out-of-RANK", "threads=RANK", "iterations=1"], 0, ""),
]


@each(case=OTHERWISE)
def test_ranks_that_were_told_otherwise_end_alike(several, case):
    """Each rank by its own command line; the folder and what reads the data may be its own."""
    words = [["run.yaml", "batch=12", f"out=otherwise{number}", *c[0]] for number, c in enumerate(OTHERWISE)]
    code, _, err = several(3, *words)[OTHERWISE.index(case)]
    assert code == case[1], err
    assert "Traceback" not in err
    assert err.count(case[2]) == 1 or not case[2], err


@pytest.mark.parametrize("case", [BAD[0], BAD[3]], ids=["before MPI", "after it has started"])
def test_bad_input_ends_the_job(ranks, case):
    said_once(finish(ranks(3, *case[0])), *case[1:])


def test_an_exception_on_the_ranks_ends_the_job(ranks):
    code, _, err = finish(ranks(2, "run.yaml", "model=usernet:Broken"))
    assert code == 1
    assert "[rank 0] RuntimeError: my own mistake" in err


def test_a_configuration_that_one_rank_lacks_ends_the_job(ranks, folder):
    is_rank_1 = "'1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK'))"
    (folder / "sitecustomize.py").write_text(f"import os\nif {is_rank_1}:\n    os.chdir('/')\n")
    code, _, err = finish(ranks(2, "run.yaml", PYTHONPATH=str(folder) + ":" + str(ROOT)))
    assert code == 2
    assert "run.yaml: the configuration cannot be read" in err


def test_a_full_disk_ends_all_ranks_with_one_message(ranks):
    """Rank 0, which saves, may write files of 5000 bytes; the snapshot is larger."""
    code, _, err = finish(ranks(2, "run.yaml", "model.args.largest_file_bytes=5000"), 30)
    assert code == 2
    assert err.count("snapshot_iter_3: the snapshot could not be written: File too large") == 1
    assert "Traceback" not in err
    assert not list(Path("result").glob("snapshot*"))


def test_a_launcher_that_does_not_fit_is_refused(ranks):
    """The environment speaks of two ranks, but there is nothing to meet them: two jobs of one rank would start."""
    code, _, err = finish(ranks(0, "run.yaml", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0"), 30)
    assert code == 1
    assert "says that 2 ranks were started, but MPI's world has one" in err
    assert not Path("result").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "words"),
    [
        (2, ["zero=1", "communicator=two_dimensional"]),
        (3, ["zero=2", "communicator=hierarchical"]),
    ],
)
def test_divided_state_changes_nothing_but_sums(several, n, words):
    """In float64, and a run cut in the middle goes on without division of its state."""
    start = ["run.yaml", "model=mlp", "dtype=float64", "parameter_audit=1 iteration", *EXACT, "iterations=6"]
    extras = [["out=plain"], ["out=other", *words], ["out=cut", *words, "iterations=4"], ["out=cut", "--resume"]]
    for extra, (code, _, err) in zip(extras, several(n, *([*start, *extra] for extra in extras)), strict=True):
        assert code == 0, (extra, err)
    plain, other, cut = (dict(np.load(f"{out}/snapshot_iter_6")) for out in ("plain", "other", "cut"))
    states = [key for key in plain if key.startswith(("updater/model", "updater/optimizer")) and plain[key].ndim]
    assert len(states) > 6
    for key in states:
        np.testing.assert_allclose(other[key], plain[key], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(cut[key], plain[key], rtol=1e-9, atol=1e-12)


def test_two_halves_of_a_batch_make_one_update(run):
    """Plain SGD on one rank: the parameters after two batches of 50 are those after one of 100."""
    start = ["run.yaml", "model=mlp", "dtype=float64", "optimizer={name: sgd, lr: 0.1}", "transforms.train=[]"]
    for words in (["out=one", "iterations=3"], ["out=two", "iterations=6", "batch=50", "accumulate=2"]):
        code, _, err = run(*start, *words)
        assert code == 0, err
    one, two = np.load("one/snapshot_iter_3"), np.load("two/snapshot_iter_6")
    weights = [key for key in one if key.startswith("updater/model") and one[key].ndim]
    assert weights
    for key in weights:
        np.testing.assert_allclose(two[key], one[key], rtol=1e-9, atol=1e-12)


WAYS = [
    ["compression=power_sgd"],
    ["compression={name: top_k, fraction: 0.2}", "accumulate=2"],
    ["local_steps=2"],
    ["double_buffering=true", "communicator=single_node"],
]


@pytest.mark.slow
@each(way=WAYS)
def test_each_way_of_updating_trains(several, way):
    start = ["run.yaml", "iterations=40", "epochs=4", "optimizer.schedule=constant"]
    number = WAYS.index(way)
    code, out, err = several(2, *([*start, *words, f"out=way{i}"] for i, words in enumerate(WAYS)))[number]
    assert code == 0, err
    first, *_, last = lines(f"way{number}/log.jsonl")
    assert last["main/loss"] < first["main/loss"]
    assert "test accuracy" in out


def test_a_communicator_that_does_not_fit_is_refused_in_words(ranks):
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is there")
    code, _, err = finish(ranks(2, "run.yaml", "communicator=pure_nccl", "device=gpu"))
    assert code == 2
    assert "Traceback" not in err
    assert "command line 'communicator=pure_nccl': communicator: the communicator 'pure_nccl' expected CuPy" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimizer.hooks=[{name: 'usernet:own_hook'}]"], "zero: optimizer state divided over ranks"),
        (["optimizer={name: 'usernet:own_optimizer', schedule: own}"], "zero: expected an optimizer with update rules"),
    ],
)
def test_what_cannot_be_divided_over_ranks(run, words, expected):
    with open("usernet.py", "a") as file:
        file.write(OWN)
    code, _, err = run("run.yaml", "zero=1", *words)
    assert code == 2
    assert expected in err
