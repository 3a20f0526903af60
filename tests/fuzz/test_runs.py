"""The fuzzer of runs passes, and finds a planted fault of every class."""

import subprocess
import sys

import pytest

from tests.cli.cli_helpers import ROOT
from tests.fuzz import runs
from tests.fuzz.runs_of_commands import environment

# Of each class of faults of runs what is planted, and the kind of jobs in which it shows.
WHERE = {
    "A": {"state_without_names": "best_values", "goals_without_direction": "goals_over_starts"},
    "B": {"nan_is_best": "best_values"},
    "C": {"classes_not_compared": "classes"},
    "D": {"predictions_of_raw_pixels": "predictions"},
    "E": {"constants_left_behind": "constants"},
    "F": {"yaml_1_1": "texts_survive"},
    "G": {"json_with_nan": "resumed_runs", "infinite_means_are_nan": "means"},
    "H": {
        "curves_of_every_kth_point": "reports", "wide_legend": "reports", "eight_colours": "reports",
        "no_charts_of_own_metrics": "reports",
    },
    "I": {"plain_streams": "streams"},
    "J": {"no_limit_of_pixels": "sizes"},
    "K": {"late_interrupts": "interrupts"},
    "L": {"one_look_at_a_live_run": "live_runs"},
    "M": {"tests_may_be_empty": "own_data", "integers_as_they_are": "own_data"},
    "N": {"schema_of_any_text": "schemas", "schema_without_short_forms": "schemas"},
    "O": {
        "no_recorded_changes": "resumed_runs", "momentum_of_a_gone_schedule": "resumed_runs",
        "headers_believed": "headers",
    },
}  # fmt: skip
KINDS = {name: kind for of_class in WHERE.values() for name, kind in of_class.items()}


def test_a_few_random_jobs():
    in_this_process = [job.__name__ for job in runs.JOBS if job.__name__ not in ("streams", "interrupts")]
    assert runs.main(["--jobs", "12", "--seed", "7", "--kinds", *in_this_process]) == 0


def test_each_planted_fault_has_its_class():
    assert set(KINDS) == set(runs.PLANTS)
    assert "".join(WHERE) == "ABCDEFGHIJKLMNO"


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", runs.PLANTS)
def test_a_planted_fault_is_found(name):
    words = ["--jobs", "60", "--seed", "3", "--stop", "--plant", name, "--kinds", KINDS[name]]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.runs", *words], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1 and "1 failed" in done.stdout, done


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["streams", "interrupts"])
def test_programs_without_a_fault(kind):
    assert runs.main(["--jobs", "3", "--seed", "3", "--kinds", kind]) == 0
