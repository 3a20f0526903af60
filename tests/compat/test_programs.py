"""Programs in Chainer's own style, of 60 lines or more, which run unchanged."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.comm import jobs

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"


pytestmark = pytest.mark.programs


def call(folder, *words):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    words = [*warm.python(), "-m", "dbrdist.compat", *words]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def run(tmp_path, program, *arguments, compat=()):
    found = call(tmp_path, *compat, str(PROGRAMS / program), *arguments)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_training_with_snapshot_and_resume(tmp_path):
    text = run(tmp_path, "train_classifier.py", "-o", "whole", "-e", "4")
    assert "Device: @numpy" in text and "accuracy 1.00" in text
    whole = [line for line in text.splitlines() if line.startswith("4 ")]
    run(tmp_path, "train_classifier.py", "-o", "parts", "-e", "2")
    text = run(tmp_path, "train_classifier.py", "-o", "parts", "-e", "4", "-r", "parts/snapshot_iter_40")
    assert "resumed at iteration 40" in text
    resumed = [line for line in text.splitlines() if line.startswith("4 ")]
    assert whole and [line.split()[:5] for line in whole] == [line.split()[:5] for line in resumed]


def test_functions_of_both_styles_with_type_checks(tmp_path):
    assert run(tmp_path, "old_function.py").splitlines() == [  # the errors' words are those of Chainer 7.8.1
        "Invalid operation is performed in: MulAdd (Forward)",
        "",
        "Expect: in_types[2].shape == in_types[0].shape",
        "Actual: (2, 2) != (3, 2)",
        "Invalid operation is performed in: ExpAdd (Forward)",
        "",
        "Expect: x.shape[-1] == y.shape[-1] * 1",
        "Actual: 2 != 1",
        "True",
        "cuda available: False",
    ]


def test_hooks(tmp_path):
    assert run(tmp_path, "hooks.py") == "all hooks were called\n"


def test_custom_updater_with_two_optimizers(tmp_path):
    text = run(tmp_path, "custom_updater.py").splitlines()
    assert text[0].split() == ["epoch", "gen/loss", "dis/loss", "samples/mean"] and len(text) == 6
    assert 1.0 < float(text[-1].split()[-1]) < 3.0  # the data's mean is 2


def test_early_stopping_with_an_evaluator_of_its_own_and_plots(tmp_path):
    text = run(tmp_path, "early_stopping.py", "--patience", "2", "--out", "out").splitlines()
    table = [line.split() for line in text if line[:1].isdigit()]
    losses = [float(row[2]) for row in table]
    last = int(next(line.split()[-1] for line in text if line.startswith("stopped after epoch")))
    best = float(next(line.split()[-1] for line in text if line.startswith("best loss")))
    assert last == len(table) < 40 and best == pytest.approx(min(losses), rel=1e-2)
    assert min(losses[-2:]) > losses[-3] == min(losses) and float(table[-1][3]) > 0.6  # r2
    assert float(table[-1][4]) ** 2 > losses[-1]  # the largest error is larger than the root of the mean square
    rates = [float(row[5]) for row in table[9:11]]  # alpha_t, as in Chainer: it halves, but for the correction of Adam
    assert len(rates) < 2 or rates[1] / rates[0] == pytest.approx(0.5, abs=0.05)
    assert (tmp_path / "out" / "loss.png").exists() == text[-1].endswith("True")


def test_sentences_of_different_lengths_with_a_converter_of_its_own(tmp_path):
    text = run(tmp_path, "text_classifier.py", "-e", "3", "-o", "out").splitlines()
    table = [line.split() for line in text if line[:1].isdigit()]
    assert float(text[-1].split()[-1]) == max(float(row[4]) for row in table) > 0.9
    text = run(tmp_path, "text_classifier.py", "-e", "4", "-o", "out", "-r", "out/snapshot").splitlines()
    assert [line[0] for line in text if line[:1].isdigit()][-1] == "4"


def test_numpy_names_of_their_time(tmp_path):
    assert run(tmp_path, "numpy_names.py", compat=["--numpy-names"]) == "accuracy 1.00\nparameters: 243\n"


@pytest.mark.mpiexec
@pytest.mark.parametrize("ranks", [1, 2])
def test_data_parallel(ranks):
    found = jobs.run(ranks, "-m", "dbrdist.compat", PROGRAMS / "data_parallel.py", limit_seconds=90)
    assert found.code == 0, found.text
    assert f"Num process (COMM_WORLD): {ranks}" in found.text
    assert float(found.lines("accuracy")[-1].split()[1]) > 0.9


@pytest.mark.mpiexec
def test_model_parallel(tmp_path):
    words = ["-m", "dbrdist.compat", PROGRAMS / "model_parallel.py", "-o", tmp_path]
    found = jobs.run(2, *words, limit_seconds=90)
    assert found.code == 0, found.text
    assert float(found.lines("accuracy")[-1].split()[1]) > 0.9


def test_distributions(tmp_path):
    text = run(tmp_path, "distributions.py").splitlines()
    losses = [float(line.split()[2]) for line in text[1:5]]
    assert losses[-1] < losses[0] - 1.0 and float(text[-1].split()[1]) < 0.25


def test_recurrent_language_model_with_truncated_backpropagation(tmp_path):
    text = run(tmp_path, "language_model.py").splitlines()
    perplexities = [float(line.split()[2]) for line in text[1:5]]
    assert perplexities[0] > 1.5 * perplexities[-1]
    assert float(text[-1].split()[-1]) < 3.0  # of nine letters


def test_tables_pickles_text_and_zip_files(tmp_path):
    lines = [line.split() for line in run(tmp_path, "tabular_shapes.py").splitlines()]
    assert lines[0] == ["epoch", "main/loss", "validation/main/accuracy"] and len(lines) == 9
    assert float(lines[-1][2]) > 0.9


@pytest.mark.parametrize("wrong", [False, True])
def test_test_cases_under_pytest_and_unittest(tmp_path, wrong):
    text = (PROGRAMS / "test_cases.py").read_text()
    if wrong:
        text = text.replace("return gz * y, gz * x", "return gz * y, gz * y")
    (tmp_path / "test_cases.py").write_text(text)
    for words in (["test_cases.py"], ["-m", "unittest", "-v", "test_cases"]):
        found = call(tmp_path, *words)
        assert found.returncode == wrong, found.stdout + found.stderr
        together = found.stdout + found.stderr
        if wrong:
            assert "backward is wrong: first-order backward: expected a slope of" in together
            assert "test parameters of TestMulAdd.test_backward__cpu" in together
        else:
            assert "skipped" in together and ("passed" in together or "OK" in together)


# The sums of each parameter's magnitudes, by Chainer 7.8.1 in one process with plain Adam: after 6 updates and after 5.
GAN_OF_CHAINER = [
    [18.665867, 1.896218, 13.266527, 0.497268, 14.116508, 0.344661, 4.623088, 0.037130],
    [19.067352, 1.632674, 13.282640, 0.441583, 14.273802, 0.397359, 4.756920, 0.006686],
]


@pytest.mark.mpiexec
@pytest.mark.parametrize("ranks, words, num_updates", [
    (1, (), 6), (2, (), 6), (4, (), 6), (2, ("--communicator", "flat"), 6),
    # Each rank begins with other values: the first update can only take those of rank 0, as ChainerMN's always does.
    (2, ("--seed-per-rank",), 5), (4, ("--seed-per-rank",), 5),
])  # fmt: skip
def test_two_networks_on_several_ranks(ranks, words, num_updates):
    found = jobs.run(ranks, "-m", "dbrdist.compat", PROGRAMS / "gan_on_ranks.py", *words, limit_seconds=90)
    assert found.code == 0, found.text
    assert sorted(found.lines("rank")) == [f"rank {r} updates {num_updates} {num_updates}" for r in range(ranks)]
    values = [[float(v) for v in line.split()[2:]] for line in found.lines("values")]
    assert len(values) == ranks
    for each in values:
        assert each == pytest.approx(GAN_OF_CHAINER[6 - num_updates], rel=1e-4, abs=2e-6)
    assert found.text.count("RuntimeWarning: the first update made no step") == (2 * ranks if num_updates == 5 else 0)


def test_batches_without_a_main_guard(tmp_path):
    found = call(tmp_path, str(PROGRAMS / "without_guard.py"))
    assert found.returncode == 0, found.stdout + found.stderr
    assert float(found.stdout.split()[-1]) > 0.9
    assert found.stderr.count("reads its batches in this process, because the main file has no `if __name__") == 2


@pytest.mark.parametrize("argument, words", [
    ("train=False", "with chainer.using_config('train', train)"),
    ("use_cudnn=False", "with chainer.using_config('use_cudnn', "),
])  # fmt: skip
def test_arguments_that_chainer_2_removed(tmp_path, argument, words):
    text = f"import chainer.functions as F\nimport numpy as np\nF.dropout(np.ones(3, 'f'), {argument})"
    (tmp_path / "old.py").write_text(text)
    found = call(tmp_path, "old.py")
    assert found.returncode == 1 and f"Chainer 2 removed the argument {argument.split('=')[0]}" in found.stderr
    assert words in found.stderr
