"""The Python that pages show and no test beside its subject runs: blocks of data, reproducible, launch and digits."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from dbrdist_launch.backends.job import Job, Place
from PIL import Image

from tests.comm import jobs

pytestmark = pytest.mark.mpiexec


def block_of(page, word):
    """The one block of Python on a page that has the word."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (jobs.ROOT / page).read_text(), re.M | re.S)
    (found,) = [text for text in blocks if word in text]
    return found


def run(ranks, folder, text, limit_seconds=60):
    script = folder / "script.py"
    script.write_text(f"import os\nos.chdir({str(folder)!r})\n{text}")
    return jobs.run(ranks, script, limit_seconds=limit_seconds)


def test_images_indexed_once_and_mixed(tmp_path):
    for k in range(4):
        path = tmp_path / "imagenet" / "train" / f"class {k % 2}" / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), k, np.uint8)).save(path)
    opened, mixed = block_of("docs/data.md", "open_images_once"), block_of("docs/data.md", "CutMix")
    before = "from dbrdist.comm import create_communicator\ncomm, transform = create_communicator(), None\n"
    after = "print(comm.rank, len(train), flush=True)\n"
    outcome = run(2, tmp_path, before + opened + mixed + after)
    assert outcome.code == 0, outcome.text
    assert [line for line in outcome.text.splitlines() if line in ("0 4", "1 4")] == ["0 4", "1 4"]


def test_virtual_workers(tmp_path):
    before = """
import dbrdist, dbrdist.functions as F, dbrdist.links as L
from dbrdist import datasets, optimizers
train, _ = datasets.get_digits()
model = L.Classifier(dbrdist.Sequential(L.Linear(64, 9), F.relu, L.Linear(9, 10)))
optimizer = optimizers.MomentumSGD(0.1).setup(model)
"""
    after = """
for _ in range(3):
    updater.update()
print("sum", repr(sum(float(abs(p.array).sum()) for p in model.params())), flush=True)
"""
    text = before + block_of("docs/reproducible.md", "VirtualUpdater") + after
    sums = []
    for ranks in (1, 2):
        outcome = run(ranks, tmp_path, text)
        assert outcome.code == 0, outcome.text
        sums += outcome.lines("sum")
    assert len(sums) == 3 and len(set(sums)) == 1


def test_the_program_that_fails(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(block_of("docs/launch.md", "bad sample 17"))
    command = [sys.executable, "-m", "dbrdist_launch", "-n", "2", sys.executable, script]
    env = {**os.environ, "PYTHONPATH": f"{jobs.ROOT}{os.pathsep}{jobs.ROOT / 'launch'}"}
    jobs.mpiexec()
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert found.returncode != 0
    assert "rank 1" in found.stderr and "ValueError: bad sample 17" in found.stderr


def test_a_backend_of_ones_own():
    scope = {}
    exec(block_of("docs/launch.md", "class Jsrun"), scope)
    assert scope["choose"](Place("auto", environment={})) is None
    backend = scope["choose"](Place("jsrun"))
    assert backend.command(Job(("train",), 4, forward=("A",), bind="core"), ["train"]) == [
        "jsrun", "--np", "4", "--bind", "packed:1", "--env", "A", "train",
    ]  # fmt: skip


def test_a_network_of_ones_own(tmp_path):
    (tmp_path / "mynet.py").write_text(block_of("examples/digits/README.md", "class Net"))
    config = jobs.ROOT / "examples" / "digits" / "config.yaml"
    command = f"""
import sys
sys.path.insert(0, "")
from dbrdist.cli.train import main
sys.argv[1:] = {[str(config), "model=mynet:Net", "model.args.width=50", "epochs=1"]!r}
main()
"""
    outcome = run(1, tmp_path, command)
    assert outcome.code == 0, outcome.text
    outcome = run(1, tmp_path, 'import sys\nsys.path.insert(0, "")\nimport dbrdist\n'
                  + block_of("examples/digits/README.md", "dbrdist.load") + "print(net.l2.W.shape)\n")  # fmt: skip
    assert outcome.code == 0, outcome.text
    assert outcome.lines("(10, 50)")
