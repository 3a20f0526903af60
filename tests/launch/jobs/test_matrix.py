"""Every kind of failure in every place: ended in time, with the right code, and the report names the cause.

`python tests/launch/matrix.py` makes the table of docs/launch.md from the same kinds and places.
"""

import pytest
from setups import KINDS, Setup

pytestmark = [pytest.mark.launch_system, pytest.mark.mpiexec]


@pytest.fixture(scope="module")
def place(request):
    """One place, kept up for all its kinds."""
    reason = Setup.missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    setup = Setup(request.param)
    yield setup
    setup.close()


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
@pytest.mark.parametrize("place", Setup.NAMES, indirect=True, scope="module")
def test_failure_ends_the_job_in_time_and_is_named(place, kind):
    if kind.hosts_only and place.cluster is None:
        pytest.skip("one host: there is no other to lose")
    run = place.fail(kind)
    place.recover(kind)
    assert run.code == kind.code, run.text
    # The stated times are for an idle machine; a busy one gets as much again, and the benchmark measures the rest.
    assert run.seconds < 2 * kind.seconds
    if kind.kind is not None:
        failure = run.failure
        expected_rank = 2 if kind.hosts_only else 1
        assert (failure["kind"], failure["code"]) == (kind.kind, kind.code), run.text
        assert failure["rank"] == expected_rank, run.text
        assert kind.words in failure["message"]
        assert run.text.count("failed first") == 1
