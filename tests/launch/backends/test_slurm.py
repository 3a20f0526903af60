"""The words of srun, and what an allocation gives."""

import pytest
from dbrdist_launch import identity
from dbrdist_launch.backends import slurm
from dbrdist_launch.backends.job import Host, Job, Place
from dbrdist_launch.backends.mpi import Library
from dbrdist_launch.errors import LaunchError


@pytest.mark.parametrize("text", ["", "2(x", "a", "2(xb)", "-1", "1,,2", "2(x99999999999)"])
def test_odd_counts_of_slurm_are_no_numbers(text):
    assert identity.repeated(text) == []
    assert identity.repeated("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(LaunchError, match="as the tasks of each node"):
        slurm.allocation({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": text or "x"})


HOSTS = (Host("a", 2), Host("b", 1))


ALONE, SPREAD = Job(("x",), 3), Job(("x",), 3, HOSTS, ("PATH", "A"))


@pytest.mark.parametrize(
    ("bind", "words"), [("none", []), ("core", ["--cpu-bind=cores"]), ("numa", ["--cpu-bind=ldoms"])]
)
def test_words_of_srun(monkeypatch, bind, words):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    monkeypatch.delenv("OMPI_MCA_mpi_abort_delay", raising=False)
    pmi, pmix = slurm.Srun("pmi2"), slurm.Srun("pmix_v4")
    last = ["--kill-on-bad-exit=0", "--export"]
    alone = ALONE._replace(bind=bind)
    assert pmi.command(alone, ["p"]) == ["srun", "--mpi=pmi2", "-n", "3", *words, *last, "NONE", "p"]
    nodes = ["-N", "2", "--nodelist", "a,b"]
    spread = SPREAD._replace(bind=bind, extra=("-z",))
    assert pmi.command(spread, ["p"]) == ["srun", "--mpi=pmi2", "-n", "3", *nodes, *words, *last, "PATH,A", "-z", "p"]
    even = spread._replace(hosts=(Host("a", 2), Host("b", 2)), forward=())
    names = "PMIX_MCA_psec,OMPI_MCA_mpi_abort_delay"
    assert pmix.command(even, ["p"]) == [
        "srun", "--mpi=pmix_v4", "-n", "3", *nodes, "--ntasks-per-node", "2", *words, *last, names, "-z", "p",
    ]  # fmt: skip
    assert pmi.environment(spread) == {}
    assert pmix.environment(spread) == {"PMIX_MCA_psec": "native", "OMPI_MCA_mpi_abort_delay": "1"}
    monkeypatch.setenv("OMPI_MCA_mpi_abort_delay", "7")
    assert pmix.environment(spread)["OMPI_MCA_mpi_abort_delay"] == "7"
    assert pmix.label == "srun --mpi=pmix_v4" and pmi.hosts({}) == ()


@pytest.mark.parametrize(
    ("environment", "extra", "words"),
    [
        ({}, (), []), ({"SLURM_CPUS_PER_TASK": "4"}, (), ["--cpus-per-task=4"]),
        ({"SLURM_CPUS_PER_TASK": "4"}, ("-z",), ["--cpus-per-task=4"]),
        ({"SLURM_CPUS_PER_TASK": "4"}, ("-c2",), []), ({"SLURM_CPUS_PER_TASK": "4"}, ("--cpus-per-task=2",), []),
        ({"SLURM_CPUS_PER_TASK": "4", "SRUN_CPUS_PER_TASK": "2"}, (), []),
    ],
)  # fmt: skip
def test_a_task_gets_the_cores_of_the_batch_job(monkeypatch, environment, extra, words):
    """Since 22.05 srun does not take them from there itself."""
    for name in ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = slurm.Srun("pmi2").command(ALONE._replace(bind="none", extra=extra), ["p"])
    assert found[1:] == ["--mpi=pmi2", "-n", "3", *words, "--kill-on-bad-exit=0", "--export", "NONE", *extra, "p"]


def test_what_slurm_gives_is_read_or_refused():
    inside = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]"}
    one, two = (Host("n1", 1), Host("n2", 1), Host("n3", 1)), (Host("n1", 2), Host("n2", 1), Host("n3", 1))
    for environment, found in (
        (inside, one),
        ({**inside, "SLURM_TASKS_PER_NODE": "2,1(x2)"}, two),
        ({**inside, "SLURM_JOB_CPUS_PER_NODE": "2,1"}, two),
        ({"SLURM_JOB_ID": "1", "SLURM_NODELIST": "n[1-3]"}, one),
        ({"SLURM_JOB_NODELIST": "n1"}, ()),
        ({"SLURM_JOB_ID": "1"}, ()),
    ):
        assert slurm.allocation(environment) == found
    with pytest.raises(LaunchError, match=r"give 'odd' as the tasks of each node; expected a form such as 2\(x3\),1"):
        slurm.allocation({**inside, "SLURM_TASKS_PER_NODE": "odd"})


@pytest.mark.parametrize(
    ("asked", "library", "mpiexec", "environment", "found"),
    [
        ("auto", "mpich", None, {"SLURM_JOB_ID": "1"}, "pmi2"),
        ("auto", "openmpi", None, {"SLURM_JOB_ID": "1"}, "pmix"),
        ("auto", "mpich", None, {}, None),
        ("auto", None, None, {"SLURM_JOB_ID": "1"}, None),
        ("auto", "mpich", "/m", {"SLURM_JOB_ID": "1"}, None),
        ("auto", "mpich", None, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, None),
        ("auto", "mpich", None, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "batch"}, "pmi2"),
        ("auto", "mpich", None, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "4294967291"}, "pmi2"),
        ("srun", None, None, {}, "pmi2"),
        ("srun", "openmpi", "/m", {}, "pmix"),
        ("srun-pmix", "openmpi", None, {}, "pmix"),
        ("srun-pmi2", None, None, {}, "pmi2"),
    ],
)
def test_where_srun_is_taken(monkeypatch, asked, library, mpiexec, environment, found):
    monkeypatch.setattr(slurm, "plugins", lambda: ["none", "pmi2", "pmix_v4"])
    place = Place(asked, None, Library(library, "5") if library else None, mpiexec, environment)
    assert slurm.choose(place) == (slurm.Srun(found) if found else None)
    monkeypatch.setattr(slurm, "plugins", lambda: ["none"])
    if asked == "auto":
        assert slurm.choose(place) is None
    else:
        with pytest.raises(
            LaunchError, match=f"--backend {asked}: this srun supports none, but the program needs {found}"
        ):
            slurm.choose(place)


def test_tasks_for_each_node_are_told_where_all_have_as_many(monkeypatch):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    last = ["--kill-on-bad-exit=0", "--export", "NONE", "p"]
    for hosts, words in (
        ((Host("a", 3),), ["-N", "1", "--nodelist", "a", "--ntasks-per-node", "3"]),
        ((Host("a", 1), Host("b", 1), Host("c", 1)), ["-N", "3", "--nodelist", "a,b,c", "--ntasks-per-node", "1"]),
        ((Host("a", 1), Host("b", 2)), ["-N", "2", "--nodelist", "a,b"]), ((), []),
    ):  # fmt: skip
        found = slurm.Srun("pmi2").command(Job(("x",), 3, hosts), ["p"])
        assert found == ["/bin/srun", "--mpi=pmi2", "-n", "3", *words, *last]


def test_srun_is_asked_without_input_and_for_some_seconds(monkeypatch):
    asked = []

    def run(words, **options):
        asked.append((words, options))
        raise slurm.subprocess.TimeoutExpired(words, options["timeout"])

    monkeypatch.setattr(slurm.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(slurm.cache, "stamp", lambda path: "stamp")
    monkeypatch.setattr(slurm.cache, "get", lambda key: None if key == "srun stamp" else {"plugins": ["other"]})
    monkeypatch.setattr(slurm.subprocess, "run", run)
    assert slurm.plugins() == []
    options = {"stdin": slurm.subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 20}
    assert asked == [(["/bin/srun", "--mpi=list"], options)]
