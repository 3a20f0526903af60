"""Every kind of failure under srun: ended in time, with the right code, and the report names the cause."""

import pytest
from setups import KINDS, Setup, check_failure

pytestmark = [pytest.mark.launch_system, pytest.mark.mpiexec]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
@pytest.mark.parametrize("place", [name for name in Setup.NAMES if "slurm" in name], indirect=True, scope="module")
def test_failure_under_slurm_ends_the_job_in_time_and_is_named(place, kind):
    check_failure(place, kind)
