"""What the environment of a rank's program is made of."""

import os

import pytest
from dbrdist_launch.identity import Identity
from dbrdist_launch.messages import Welcome
from dbrdist_launch.rank import surroundings as surroundings_module
from dbrdist_launch.rank.surroundings import surroundings

WHO = Identity(5, 8, 2, 4, "a")


INJECT = os.path.join(os.path.dirname(surroundings_module.__file__), "inject")


def made(inherited=(), who=WHO, **terms):
    welcome = {
        "command": [], "environment": {}, "directory": None, "host_timeout": 6.0, "window": 9, "threads": "keep",
        "gpus": "all", "inject": False, "master": "", "port": 0, "files": [], "local_sizes": {}, "input": False,
        **terms,
    }  # fmt: skip
    return surroundings(dict(inherited), Welcome(**welcome), who)


def test_the_names_that_other_frameworks_read():
    found = made(
        {"RANK": "9", "MASTER_ADDR": "m", "A": "1", "DBRDIST_LAUNCH_TOKEN": "t", "DBRDIST_LAUNCH_CHANNEL": "c"}
    )
    assert found == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "m", "A": "1",
        "DBRDIST_LAUNCH": "1",
    }  # fmt: skip
    assert made(master="n0")["MASTER_ADDR"] == "n0" and made(master=None)["MASTER_ADDR"] == "127.0.0.1"
    assert made()["MASTER_ADDR"] == "127.0.0.1"
    assert made({"A": "1", "B": "2"}, environment={"A": "3", "RANK": "7"})["A"] == "3"
    assert made(environment={"RANK": "7"})["RANK"] == "5"


def test_how_many_ranks_share_a_host_is_the_starters_word_or_the_plans():
    unknown = WHO._replace(local_size=0)
    assert made(who=unknown, local_sizes={"a": 3, "b": 2})["LOCAL_WORLD_SIZE"] == "3"
    assert made(who=unknown, local_sizes={"b": 2})["LOCAL_WORLD_SIZE"] == "1" == made(who=unknown)["LOCAL_WORLD_SIZE"]
    assert made(local_sizes={"a": 3})["LOCAL_WORLD_SIZE"] == "4"


def test_what_was_set_about_buffers_and_threads_is_kept(monkeypatch):
    for value in ("x", "", "0"):
        assert made({"PYTHONUNBUFFERED": value})["PYTHONUNBUFFERED"] == value
    assert "PYTHONUNBUFFERED" not in made()
    for cores, local_size, threads in ((14, 4, "3"), (2, 4, "1"), (7, 0, "7")):
        monkeypatch.setattr(surroundings_module, "available_cores", lambda cores=cores: cores)
        who = WHO._replace(local_size=local_size)
        assert made(threads="auto", who=who)["OMP_NUM_THREADS"] == threads
        assert made({"OMP_NUM_THREADS": "9"}, threads="auto", who=who)["OMP_NUM_THREADS"] == "9"
    monkeypatch.setattr(surroundings_module, "available_cores", lambda: 8)
    for each, step, threads in (("4", "0", "4"), ("16", "0", "8"), ("4", None, "2")):  # what Slurm counts for a task
        inherited = {"SLURM_CPUS_PER_TASK": each} | ({"SLURM_STEP_ID": step} if step else {})
        assert made(inherited, threads="auto")["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in made(threads="keep") and "OMP_NUM_THREADS" not in made()


def test_gpus_are_shared_out_where_that_was_asked():
    four = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert made(four, gpus="rank")["CUDA_VISIBLE_DEVICES"] == "6"
    assert made(four, gpus="all")["CUDA_VISIBLE_DEVICES"] == "4,5,6,7" == made(four)["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(("before", "after"), [(None, INJECT), ("", INJECT), ("/a:/b", f"{INJECT}:/a:/b")])
def test_hooks_come_before_the_users_own_path(before, after):
    inherited = {} if before is None else {"PYTHONPATH": before}
    found = made(inherited, inject=True)
    was = {None: "unset", "": "empty"}.get(before, "set")
    assert (found["PYTHONPATH"], found["DBRDIST_LAUNCH_INJECTED"]) == (after, was)
    assert made(inherited, inject=True)["PYTHONPATH"] == after
    assert made(inherited).get("PYTHONPATH") == before
    assert os.path.exists(os.path.join(INJECT, "sitecustomize.py"))


def test_the_port_of_the_rendezvous_is_ours_unless_it_is_set():
    assert made(port=4711)["MASTER_PORT"] == "4711" and "MASTER_PORT" not in made(port=0)
    assert made({"MASTER_PORT": "1"}, port=4711)["MASTER_PORT"] == "1"
    assert made({"MASTER_PORT": "1"}, port=0)["MASTER_PORT"] == "1"
    assert len(made(port=4711)) == len(made()) + 1
