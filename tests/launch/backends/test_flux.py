"""The words of Flux."""

import pytest
from dbrdist_launch import identity
from dbrdist_launch.backends import flux
from dbrdist_launch.backends.job import Host, Job


def test_flux_runs_what_the_others_run():
    words = flux.Flux(True).command(Job(("x",), 4, (), ("PATH", "A")), ["p"])
    text = "run -n 4 --env=-* --env=PATH --env=A -o cpu-affinity=off -o pmi=pmix p"
    assert words[1:] == text.split()
    assert identity.of_environment("flux", {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"})[:2] == (1, 2)


HOSTS = (Host("a", 2), Host("b", 1))


ALONE, SPREAD = Job(("x",), 3), Job(("x",), 3, HOSTS, ("PATH", "A"))


@pytest.mark.parametrize(("bind", "affinity"), [("none", "off"), ("core", "per-task"), ("numa", "per-task")])
def test_words_of_flux(monkeypatch, bind, affinity):
    monkeypatch.setattr(flux.shutil, "which", lambda name: f"/bin/{name}")
    first, last = ["/bin/flux", "run", "-n", "3"], ["-o", f"cpu-affinity={affinity}"]
    assert flux.Flux().command(ALONE._replace(bind=bind), ["p"]) == [*first, "--env=-*", *last, "p"]
    placed = ["-N", "2", "--requires", "host:a,b", "--env=-*", "--env=PATH", "--env=A"]
    spread = SPREAD._replace(bind=bind, extra=("-z",))
    assert flux.Flux(True).command(spread, ["p"]) == [*first, *placed, *last, "-o", "pmi=pmix", "-z", "p"]
    assert flux.Flux().environment(spread) == {} and flux.Flux().hosts({}) == ()
