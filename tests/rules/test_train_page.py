"""docs/train.md is complete, and its example runs."""

import re
import sys
from typing import get_args

import pytest
import yaml
from pydantic_core import PydanticUndefined

from dbrdist.cli import train
from dbrdist.cli.configuration import components, schema, settings, updates
from tests.cli import conftest
from tests.cli.cli_helpers import ROOT
from tests.each import each

folder, run = conftest.folder, conftest.run

PAGE = (ROOT / "docs" / "train.md").read_text()
SECTIONS = ("transforms", "batch_norm", "evaluation", "snapshot", "log")


def table_rows():
    """Cells of all rows, without the back quotes."""
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def words(cell):
    return re.findall(r"`([^`]+)`", cell)


def written_default(field):
    """A default as the page writes it; a component is its name."""
    default = field.default
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, settings.Settings):
        return f"`{default.name}`"
    plain = list(default) if isinstance(default, tuple) else default
    text = yaml.safe_dump(plain, default_flow_style=True).replace("\n...", "").strip()
    return f"`{text}`"


def keys_of_the_run():
    for name, field in schema.Config.model_fields.items():
        if name in SECTIONS:
            for inner, inner_field in field.annotation.model_fields.items():
                yield f"{name}.{inner}", inner_field
        else:
            yield name, field


def keys_of_components():
    for cls in {**vars(components), **vars(updates)}.values():
        if isinstance(cls, type) and issubclass(cls, settings.Settings) and "name" in cls.model_fields:
            for name in get_args(cls.model_fields["name"].annotation):
                for key, field in cls.model_fields.items():
                    if key != "name":
                        yield name, key, field


@each(row=keys_of_the_run)
def test_the_page_has_each_key_of_a_run_with_its_default(row):
    key, field = row
    found = [row[2] for row in table_rows() if words(row[0]) == [key] and len(row) == 4]
    assert found == [written_default(field)]


@each(row=keys_of_components)
def test_the_page_has_each_key_of_a_component_with_its_default(row):
    name, key, field = row
    found = [row[3] for row in table_rows() if len(row) == 5 and name in words(row[0]) and words(row[1]) == [key]]
    assert found == [written_default(field)]


def test_the_page_has_no_key_that_is_not_there():
    known = {key for key, _ in keys_of_the_run()} | {(name, key) for name, key, _ in keys_of_components()}
    tables = PAGE[PAGE.index("## Configuration") : PAGE.index("### Overrides")]
    rows = [row for row in table_rows() if " | ".join(row) in tables]
    assert len(rows) > 60
    for row in rows:
        for name in words(row[0]):
            assert (name if len(row) == 4 else (name, words(row[1])[0])) in known


def test_the_page_has_each_name_of_a_component():
    for cls in {**vars(components), **vars(updates)}.values():
        if isinstance(cls, type) and issubclass(cls, settings.Settings) and "name" in cls.model_fields:
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
