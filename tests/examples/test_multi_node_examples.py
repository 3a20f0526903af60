"""The programs in examples/multi_node, in short form, under mpiexec."""

import pytest

from tests.comm import jobs

EXAMPLES = jobs.ROOT / "examples" / "multi_node"
pytestmark = pytest.mark.mpiexec


def run(tmp_path, ranks, program, *arguments):
    """What the program reports: the accuracy, and all lines."""
    out = () if program in ("tensor_parallel.py", "seq2seq.py") else ("--out", tmp_path / program)
    found = jobs.run(ranks, EXAMPLES / program, *arguments, *out, limit_seconds=100)
    assert found.code == 0, found.text
    (line,) = found.lines("accuracy")
    return float(line.split()[1].rstrip(";")), found


def test_data_parallel(tmp_path):
    assert run(tmp_path, 3, "data_parallel.py", "--epochs", 4, "--batch", 24, "--batch-normalization")[0] > 0.9


@pytest.mark.timeout(240)
def test_model_parallel_with_and_without_a_pipeline(tmp_path):
    whole, text = run(tmp_path, 2, "model_parallel.py", "--epochs", 3)
    parts, text_of_parts = run(tmp_path, 2, "model_parallel.py", "--epochs", 3, "--micro-batches", 3)
    assert whole > 0.85 and abs(whole - parts) < 0.01
    losses = [[float(line.split()[1]) for line in t.lines(("1 ", "2 ", "3 "))] for t in (text, text_of_parts)]
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_dual_parallel(tmp_path):
    assert run(tmp_path, 4, "dual_parallel.py", "--epochs", 4, "--batch", 48)[0] > 0.85


def test_tensor_parallel_trains_as_one_rank_does(tmp_path):
    accuracy, found = run(tmp_path, 3, "tensor_parallel.py", "--epochs", 3, "--units", 50, "--compare")
    assert accuracy > 0.7
    (line,) = found.lines("largest difference")
    assert float(line.split(",")[0].split()[-1]) < 1e-3


def test_sequence_to_sequence(tmp_path):
    accuracy, _ = run(tmp_path, 2, "seq2seq.py", "--steps", 120, "--batch", 32, "--units", 48)
    assert accuracy > 0.3  # of ten digits


def test_a_number_of_ranks_that_does_not_fit_is_refused():
    found = jobs.run(3, EXAMPLES / "model_parallel.py")
    assert found.code != 0 and "this model lies on 2 ranks, got 3" in found.text
