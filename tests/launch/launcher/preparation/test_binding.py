"""Where ranks will run on their hosts."""

import os
from types import SimpleNamespace

from dbrdist_launch.backends.hydra import Hydra
from dbrdist_launch.backends.job import Host, Job
from dbrdist_launch.backends.slurm import Srun
from dbrdist_launch.launcher.preparation import binding


def machine(tmp_path):
    """Two NUMA nodes of two cores of two processors each, as /sys shows them."""
    for node, numbers in (("0", "0-1,4-5"), ("1", "2-3,6-7")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(numbers + "\n")
    for number in range(8):
        folder = tmp_path / "cpu" / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    return str(tmp_path)


def test_cores_and_nodes_are_read_as_the_system_shows_them(tmp_path):
    root = machine(tmp_path)
    assert binding.nodes(root) == [("0", [0, 1, 4, 5]), ("1", [2, 3, 6, 7])]
    assert binding.cores(root) == [("0", [0, 4]), ("0", [1, 5]), ("1", [2, 6]), ("1", [3, 7])]
    assert binding.nodes(str(tmp_path / "none")) == binding.cores(str(tmp_path / "none")) == []


def test_print_says_where_each_rank_will_be(tmp_path, monkeypatch):
    root = machine(tmp_path)
    found = {name: getattr(binding, name)(root) for name in ("cores", "nodes")}
    for name in found:
        monkeypatch.setattr(binding, name, lambda name=name: found[name])
    monkeypatch.setattr(binding, "is_local", lambda name: name != "far")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    here, hydra = os.uname().nodename, Hydra(SimpleNamespace(label="mpich 5"))
    assert binding.lines(Job(("x",), 3, bind="core"), hydra, True) == [
        f"# rank 0 on {here}: core 0,4 (NUMA node 0), GPU 2",
        f"# rank 1 on {here}: core 1,5 (NUMA node 0), GPU 3",
        f"# rank 2 on {here}: core 2,6 (NUMA node 1), GPU 2",
    ]
    placed = (Host("near", 1), Host("far", 2))
    assert binding.lines(Job(("x",), 3, placed, bind="numa"), hydra, True) == [
        "# rank 0 on near: processors 0,1,4,5 (NUMA node 0), GPU 2",
        "# rank 1 on far: NUMA node 0 of far, modulo their number, GPU 0 of far, modulo their number",
        "# rank 2 on far: NUMA node 1 of far, modulo their number, GPU 1 of far, modulo their number",
    ]
    assert binding.lines(Job(("x",), 3), hydra, False) == []
    assert "places the ranks" in binding.lines(Job(("x",), 3, bind="core"), Srun("pmi2"), False)[0]
    assert (
        "a core that srun --mpi=pmi2 chooses" in binding.lines(Job(("x",), 3, placed, bind="core"), Srun("pmi2"), 0)[0]
    )
    assert binding.lines(Job(("x",), 99, bind="core"), hydra, False)[-1] == "# and 35 more"
