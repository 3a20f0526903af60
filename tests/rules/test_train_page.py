"""docs/train.md is complete, and its example runs."""

import re
import sys
from typing import get_args

import pytest

from dbrdist.cli import train
from dbrdist.cli.configuration import settings
from tests.cli import conftest
from tests.cli.cli_helpers import ROOT
from tests.each import each
from tests.rules import train_page

folder, run = conftest.folder, conftest.run

PAGE = (ROOT / "docs" / "train.md").read_text()


def table_rows():
    """Cells of all rows, without the back quotes."""
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def words(cell):
    return re.findall(r"`([^`]+)`", cell)


def keys_of_components():
    for cls in dict.fromkeys(settings.BY_TAG.values()):
        if "name" in cls.model_fields:
            for name in get_args(cls.model_fields["name"].annotation):
                for key, field in cls.model_fields.items():
                    if key != "name":
                        yield name, key, field


@pytest.mark.slow
def test_the_tables_are_current():
    """python tests/rules/train_page.py --write brings them up to date."""
    assert train_page.with_tables(PAGE) == PAGE


@each(key=[key for key, _, _ in train_page.keys_of_the_run()])
def test_the_page_has_each_key_of_a_run(key):
    assert len([row for row in table_rows() if words(row[0]) == [key] and len(row) == 4]) == 1


@pytest.mark.slow
@each(row=keys_of_components)
def test_the_page_has_each_key_of_a_component(row):
    name, key, _ = row
    assert [row for row in table_rows() if len(row) == 5 and name in words(row[0]) and words(row[1]) == [key]]


def test_what_the_page_says_of_a_type():
    made = {key: train_page.type_of(cls, name) for key, cls, name in train_page.keys_of_the_run()}
    assert made["batch"] == "int ≥ 1 or mapping" and made["zero"] == "int in [0, 2]" and made["seed"] == "int ≥ 0"
    assert made["transforms.train"] == "list of components" and made["extensions"] == "list of own callables"
    assert made["log.every"] == "period" and made["out"] == "text" and made["snapshot.mode"] == "`auto`, `min`, `max`"
    adam = dict(train_page.components("optimizer"))["adam"]
    assert train_page.type_of(adam, "beta1") == "float in [0, 1)" and train_page.type_of(adam, "alpha") == "float > 0"


def test_the_page_has_no_key_that_is_not_there():
    known = {key for key, _, _ in train_page.keys_of_the_run()} | {(name, key) for name, key, _ in keys_of_components()}
    tables = PAGE[PAGE.index("## Configuration") : PAGE.index("### Overrides")]
    rows = [row for row in table_rows() if " | ".join(row) in tables]
    assert len(rows) > 60
    for row in rows:
        for name in words(row[0]):
            assert (name if len(row) == 4 else (name, words(row[1])[0])) in known


def test_the_page_has_each_name_of_a_component():
    for cls in dict.fromkeys(settings.BY_TAG.values()):
        if "name" in cls.model_fields:
            for name in get_args(cls.model_fields["name"].annotation):
                assert f"`{name}`" in PAGE


def test_the_page_has_each_option():
    options = [option for parameter in train.command.params for option in parameter.opts if option.startswith("--")]
    for option in options:
        assert f"| `{option}" in PAGE


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def losses_of(table, epoch):
    """The losses in the line of an epoch, of training and validation."""
    (line,) = [line.split() for line in table.splitlines() if line.split()[:1] == [str(epoch)]]
    return [float(cell) for cell in line[2:4]]


@pytest.mark.slow
def test_the_example_of_own_code_runs(run, folder, capfd):
    module, use = blocks("python")
    (text,) = blocks("yaml")
    (shown,) = [block for block in blocks("") if block.startswith("$ mpiexec -n 2 dbrdist-train mine.yaml")]
    (folder / "mine.py").write_text(module)
    (folder / "mine.yaml").write_text(text)
    try:
        code, out, err = run("mine.yaml")
        assert code == 0, err
        assert "model: mine:Net, 1,218 parameters of float32" in out
        assert "test accuracy 100.00 %" in out
        for epoch in (1, 8):
            assert losses_of(out, epoch) == pytest.approx(losses_of(shown, epoch), rel=0.01)
        capfd.readouterr()
        exec(compile(use, "train.md", "exec"), {})
        assert capfd.readouterr().out == "[0 1]\n"
        code, _, err = run("mine.yaml", "model.args.widht=3")
        assert code == 2
        assert err.strip() in PAGE
    finally:
        sys.modules.pop("mine", None)
