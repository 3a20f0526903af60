"""Jobs that go back into Slurm's queue."""

import os

import pytest
from dbrdist_launch.launcher.judgement.report import Failure
from dbrdist_launch.launcher.restarting import requeue as requeues
from dbrdist_launch.launcher.restarting.requeue import requeue
from dbrdist_launch.launcher.running.plan import Outcome


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:01", 1), ("1-02:03:04", 93784), ("00:01:00", 60), ("UNLIMITED", None), ("", None), ("1:00", None)],
)
def test_times_of_slurm(text, seconds):
    assert requeues._seconds(text) == seconds


def test_jobs_that_were_cancelled_before_their_time():
    def cancelled(state, ran="00:59:59", limit="01:00:00"):
        return requeues._was_cancelled({"JobState": state, "RunTime": ran, "TimeLimit": limit})

    assert cancelled("CANCELLED") and not cancelled("RUNNING") and cancelled("COMPLETING")
    assert not cancelled("COMPLETING", "01:00:00") and not cancelled("COMPLETING", "")
    assert cancelled("COMPLETING", "99:00:00", "UNLIMITED")
    assert not requeues._was_cancelled({})


def outcome(kind="exit", message="m", steps=-1, **more):
    return Outcome(1, Failure(kind, 1, "a", 1, message, **more), steps=steps)


@pytest.mark.parametrize(
    ("ended", "slurm_says", "asked", "said"),
    [
        (Outcome(75, asked=15), "JobState=RUNNING Restarts=1", True, "is back in the queue"),
        (Outcome(75), "", True, "is back in the queue"),
        (outcome("host_lost"), "JobState=RUNNING Restarts=1", True, "is back in the queue"),
        (
            Outcome(75),
            "JobState=COMPLETING Restarts=1 RunTime=1-00:00:01 TimeLimit=1-00:00:00",
            True,
            "is back in the queue",
        ),
        (
            Outcome(75),
            "JobState=COMPLETING Restarts=2 RunTime=00:00:00 TimeLimit=01:00:00",
            False,
            "is back in the queue",
        ),
        (Outcome(75), "JobState=COMPLETING Restarts=1 RunTime=00:59:59 TimeLimit=01:00:00", False, "cancelled"),
        (Outcome(75), "JobState=COMPLETING Restarts=1 RunTime=2-00:00:00 TimeLimit=UNLIMITED", False, "cancelled"),
        (outcome("host_lost"), "JobState=CANCELLED Restarts=1", False, "cancelled"),
        (outcome("exit"), "JobState=RUNNING Restarts=1", False, "the program itself failed"),
        (outcome("start"), "JobState=RUNNING Restarts=1", False, "the program itself failed"),
        (Outcome(0), "JobState=RUNNING Restarts=1", False, ""),
        (Outcome(143, asked=15), "JobState=RUNNING Restarts=1", False, ""),
    ],
)
def test_only_what_was_taken_from_outside_goes_back_into_the_queue(
    tmp_path, monkeypatch, ended, slurm_says, asked, said
):
    log, other = tmp_path / "asked", "JobId=17 ArrayJobId=7 JobState=CANCELLED Restarts=3"
    (tmp_path / "scontrol").write_text(
        f"#!/bin/sh\n[ $1 = show ] && echo '{other}' && echo 'JobId=7 ArrayJobId=7 {slurm_says} Priority=1' && exit\n"
        f"echo $* >> {log}\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    found = requeue(ended)
    assert found.startswith("Slurm job 7 ") and found.endswith(said) if said else found == ""
    assert (log.read_text() if log.exists() else "") == ("requeue 7\n" if asked else "")


def test_a_requeue_that_cannot_be_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert requeue(Outcome(75)) == "--requeue has no effect outside a Slurm job"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Slurm job 7 could not be requeued: " in requeue(Outcome(75))
