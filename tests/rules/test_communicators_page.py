"""docs/communicators.md is complete, and the scripts it shows run."""

import re

import pytest

from dbrdist import comm
from dbrdist.comm.communicators import create, mpi_communicator, shared_memory
from dbrdist.comm.communicators.communicator import SETTINGS
from tests.comm import jobs
from tests.each import each

PAGE = (jobs.ROOT / "docs" / "communicators.md").read_text()
CONTRACT = PAGE[PAGE.index("## The contract") : PAGE.index("### Ranks that are threads")]


@each(name=[n for n in dir(mpi_communicator.MpiCommunicator) if not n.startswith("_") and n != "world_ranks"])
def test_the_page_has_each_method(name):
    assert re.search(rf"[`.]{name}\b", CONTRACT)


def test_the_page_has_each_configuration_entry_with_its_default():
    for name, default in {**SETTINGS, **shared_memory.FlatReducer.settings}.items():
        assert f"| `{name}` | {default} |" in CONTRACT


def test_the_page_has_each_name():
    for name in [*create.NAMES, *comm.__all__]:
        assert re.search(rf"[`.]{name}\b", PAGE) or name in ("CommunicatorBase", "DataSizeError")


@pytest.mark.mpiexec
@pytest.mark.parametrize(("name", "ranks"), [("verbs.py", 3), ("cut.py", 2)])
def test_the_script_of_the_page_prints_what_the_page_says(tmp_path, name, ranks):
    (text,) = re.findall(rf"^```python\n(# {name}.*?)^```$", PAGE, re.M | re.S)
    script = tmp_path / name
    script.write_text(text)
    outcome = jobs.run(ranks, script)
    assert outcome.code == 0, outcome.text
    assert "\n".join(sorted(outcome.lines("rank")) or outcome.text.strip().splitlines()) in PAGE


@each(name=[name for name in comm.functions.__all__ if name[0].islower()] + comm.links.__all__)
def test_the_page_has_each_function_and_link(name):
    assert name == "get_communication_backend" or f"`{name}(" in PAGE


@pytest.mark.mpiexec
def test_the_library_example_trains_on_two_ranks(tmp_path):
    script = jobs.ROOT / "examples" / "library" / "train.py"
    outcome = jobs.run(2, script, "--epochs", "2", "--out", tmp_path)
    assert outcome.code == 0, outcome.text
    *_, last = outcome.text.splitlines()
    assert last.split()[0] == "2"
    assert float(last.split()[-1]) > 0.9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "snapshot_iter_23", "snapshot_iter_46"]
