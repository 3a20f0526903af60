"""Every kind of failure on one host and on two: ended in time, with the right code, and the report names the cause.

`python tests/launch/matrix.py` makes the table of docs/launch.md from the same kinds and places. Those under Slurm have
a file of their own, so that CI can run them at the same time.
"""

import pytest
from setups import KINDS, Setup, check_failure

pytestmark = [pytest.mark.launch_system, pytest.mark.mpiexec]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
@pytest.mark.parametrize("place", [name for name in Setup.NAMES if "slurm" not in name], indirect=True, scope="module")
def test_failure_ends_the_job_in_time_and_is_named(place, kind):
    if kind.hosts_only and place.cluster is None:
        pytest.skip("one host: there is no other to lose")
    check_failure(place, kind)
