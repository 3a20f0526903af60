import pytest

from dbrdist.cli import environment


@pytest.mark.parametrize(
    ("variables", "rank", "size"),
    [
        ({}, 0, 1),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, 2, 4),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, 1, 3),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, 5, 8),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 1, 2),
        ({"PMI_RANK": "nonsense"}, 0, 1),
    ],
)
def test_the_launchers_words(monkeypatch, variables, rank, size):
    for name in (*environment._RANK, *environment._SIZE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (environment.rank(), environment.size()) == (rank, size)
