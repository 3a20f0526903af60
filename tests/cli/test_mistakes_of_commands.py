"""Natural mistakes on the command line: what is meant is said, or done."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dbrdist.cli.configuration import load, resolve
from dbrdist.errors import ConfigError

CONFIG = "model: mlp\ndata: digits\nbatch: 60\nepochs: 1\nout: run\noptimizer:\n  name: {}\n  {}: 0.5\n"


@pytest.mark.parametrize(
    ("name", "written", "override", "field"),
    [
        ("adam", "alpha", "lr", "alpha"),
        ("adam", "lr", "alpha", "alpha"),
        ("momentum_sgd", "lr", "alpha", "lr"),
        ("MomentumSGD", "lr", "alpha", "lr"),
        ("rmsprop", "alpha", "lr", "lr"),  # which has both
    ],
)
def test_the_learning_rate_by_either_name(name, written, override, field, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(name, written))
    config, _ = load.load(path, [f"optimizer.{override}=0.25"])
    assert getattr(config.optimizer, field) == 0.25
    if name == "rmsprop":
        assert config.optimizer.alpha == 0.5


def test_both_names_in_one_file_are_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format("adam", "alpha") + "  lr: 0.1\n")
    with pytest.raises(ConfigError, match=r"optimizer.lr: unknown key"):
        load.load(path)


def refused(*words, folder):
    code = "from dbrdist.cli.train import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=folder, timeout=120)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.programs
@pytest.mark.parametrize(
    ("words", "entry"),
    [
        (("--epochs", "3"), "epochs=3"),
        (("--batch-size", "16"), "batch=16"),
        (("--lr", "0.1"), "optimizer.lr=0.1"),
        (("--seed=4",), "seed=..."),
    ],
)
def test_options_are_entries(words, entry, tmp_path):
    assert f"written without dashes, behind its name: {entry}" in refused("c.yaml", *words, folder=tmp_path)
    assert "written without dashes" not in refused("c.yaml", "--nonsense", folder=tmp_path)


@pytest.mark.programs
def test_export_takes_a_configuration_too(tmp_path):
    words = refused("c.yaml", "--export", "run", "net.safetensors", folder=tmp_path)
    assert "expected one file to write" not in words and "run" in words
    assert "got a.bin" in refused("c.yaml", "--export", "run", "a.bin", folder=tmp_path)


def test_own_code_of_a_run_names_the_option_that_was_used(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format("adam", "alpha").replace("model: mlp", "model: net:Net"))
    with pytest.raises(ConfigError, match=r"--predict RUN IMAGE\.jpg"):
        resolve.refuse_code_of_a_folder(*load.load(path), "--predict RUN IMAGE.jpg")
