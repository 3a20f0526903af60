"""One GPU for each local rank."""

import pytest
from dbrdist_launch.rank import gpus
from dbrdist_launch.rank.gpus import for_local_rank


def test_one_gpu_per_local_rank():
    assert for_local_rank(1, {"CUDA_VISIBLE_DEVICES": "4,5"}) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert for_local_rank(1, {"CUDA_VISIBLE_DEVICES": ""}) == {}


@pytest.mark.parametrize(
    ("local_rank", "given", "found"),
    [(1, "4,5,", "5"), (2, "4,5", "4"), (3, "GPU-a,GPU-b,GPU-c", "GPU-a"), (0, "", None), (4, None, "1")],
)
def test_each_local_rank_has_a_gpu(monkeypatch, local_rank, given, found):
    monkeypatch.setattr(gpus.os, "listdir", lambda path: ["a", "b", "c"])
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert gpus.for_local_rank(local_rank, environment) == ({} if found is None else {"CUDA_VISIBLE_DEVICES": found})
    assert gpus.count() == 3

    def nothing(path):
        raise FileNotFoundError

    monkeypatch.setattr(gpus.os, "listdir", nothing)
    assert gpus.count() == 0 and gpus.for_local_rank(0, {}) == {}
