"""Every command and every block of code of the tutorials runs, in order, in an empty folder."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import tutorials

from tests.comm import jobs

ROOT = tutorials.ROOT
# What a cluster has and this machine lacks: a job runs at once, srun starts as many ranks as the script requests.
STAND_INS = {
    "sbatch": 'SLURM_JOB_ID=1 SLURM_NTASKS=2 SLURM_CPUS_PER_TASK=1 exec bash "$@"',
    "srun": 'exec mpiexec -n "$SLURM_NTASKS" "$@"',
    "scontrol": 'echo "$@"',
}
OPTIONAL = {"onnx": ".onnx"}  # a command that names such a file needs the package


def environment(folder: Path) -> dict[str, str]:
    """Commands that run this checkout, and stand-ins for Slurm's."""
    programs = folder / ".bin"
    programs.mkdir()
    entries = {"dbrdist-train": "train", "dbrdist-data": "data"}
    texts = {name: f'exec "{sys.executable}" -c "from dbrdist_launch.entry import {e}; {e}()" "$@"' for name, e in
             entries.items()}  # fmt: skip
    texts["dbrdist-launch"] = f'exec "{sys.executable}" -m dbrdist_launch "$@"'
    texts["python"] = f'exec "{sys.executable}" "$@"'
    for name, text in {**texts, **STAND_INS}.items():
        path = programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join([str(programs), os.path.dirname(sys.executable), os.environ["PATH"]])
    return {
        **os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "launch"))),
        "OMP_NUM_THREADS": "1", "COLUMNS": "100",
    }  # fmt: skip


def is_installed(command: str) -> bool:
    for package, ending in OPTIONAL.items():
        if ending in command:
            try:
                __import__(package)
            except ImportError:
                return False
    return True


@pytest.mark.slow
@pytest.mark.mpiexec
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", tutorials.PAGES, ids=lambda page: page.stem)
def test_a_tutorial_from_top_to_bottom(page, tmp_path):
    jobs.mpiexec()
    env = environment(tmp_path)
    for block in tutorials.blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
            if block.language == "bash":
                subprocess.run(["bash", "-n", block.file], cwd=tmp_path, check=True)
        for command in block.commands:
            if not is_installed(command):
                continue
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
            )
            allowed = (0, 1) if "doctor" in command else (0,)  # this machine may lack what a cluster has
            assert done.returncode in allowed, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_every_block_of_code_is_a_file_that_a_command_uses():
    for page in tutorials.PAGES:
        found = tutorials.blocks(page)
        commands = " ".join(c for b in found for c in b.commands)
        for block in found:
            if block.language in ("python", "yaml"):
                assert block.file, f"{page.name}: a block without a file name: {block.text[:60]!r}"
                assert block.file in commands or block.file.removesuffix(".py") in page.read_text(), block.file
        assert commands


@pytest.mark.parametrize("name", tutorials.NOTEBOOKS)
def test_notebooks_are_current(name):
    page = tutorials.FOLDER / f"{name}.md"
    assert (tutorials.FOLDER / f"{name}.ipynb").read_text() == tutorials.notebook(page), (
        "run python tests/rules/tutorials.py --write"
    )
    cells = json.loads(tutorials.notebook(page))["cells"]
    assert {c["cell_type"] for c in cells} == {"code", "markdown"}
