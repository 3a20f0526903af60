"""Tests of dbrdist.training.extensions.print_report_notebook."""

from __future__ import annotations

import importlib.util
import io

import pytest

from dbrdist.training import extensions
from tests.training.training_helpers import make_trainer


def test_a_report_that_a_notebook_brings_along_is_called(tmp_path, monkeypatch):
    from dbrdist.training.extensions import print_report_notebook as notebook

    shown = []
    display = type(
        "module", (), {"HTML": staticmethod(lambda text: text), "display": lambda table, display_id: Handle()}
    )
    Handle = type("Handle", (), {"update": lambda self, table: shown.append(table)})
    monkeypatch.setattr(notebook, "_is_notebook", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "IPython", display)
    monkeypatch.setitem(__import__("sys").modules, "IPython.display", display)
    trainer = make_trainer(str(tmp_path), (2, "epoch"))
    trainer.extend(extensions.PrintReportNotebook(["epoch"], extensions.LogReport()))
    trainer.run()
    cells = "<tr><th>epoch</th></tr>", "<tr><td>1</td></tr>", "<tr><td>2</td></tr>"
    assert shown == [f"<table>{''.join(cells[:2])}</table>", f"<table>{''.join(cells)}</table>"]


def test_a_notebook_shows_one_table_that_grows(tmp_path, monkeypatch):
    shown = []

    class Handle:
        def update(self, table):
            shown.append(table)

    def display(table, display_id):
        shown.append(table)
        return Handle()

    shells = [None, object()]
    functions = {"display": display, "HTML": lambda text: text, "get_ipython": shells.pop}
    module = type("module", (), {name: staticmethod(function) for name, function in functions.items()})
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: module if name == "IPython" else find(name, *a))
    monkeypatch.setitem(__import__("sys").modules, "IPython", module)
    monkeypatch.setitem(__import__("sys").modules, "IPython.display", module)
    trainer = make_trainer(tmp_path, stop=(2, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReportNotebook(["epoch", "main/loss", "a<b"]))
    trainer.run()
    assert [table.count("<tr>") for table in shown] == [1, 2, 3]
    assert shown[0] == "<table><tr><th>epoch</th><th>main/loss</th><th>a&lt;b</th></tr></table>"
    loss = trainer.get_extension("LogReport").log[1]["main/loss"]
    assert shown[2].endswith(f"<tr><td>2</td><td>{loss:.6g}</td><td></td></tr></table>")
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    trainer = make_trainer(tmp_path, stop=(1, "epoch"))  # IPython is there, but this is no notebook
    trainer.extend(extensions.PrintReportNotebook(["epoch"], extensions.LogReport()))
    trainer.run()
    assert out.getvalue() == "epoch\n1\n" and len(shown) == 3


def test_without_ipython_the_table_is_text(tmp_path, monkeypatch):
    find, out = importlib.util.find_spec, io.StringIO()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "IPython" else find(name, *a))
    monkeypatch.setattr("sys.stdout", out)
    trainer = make_trainer(tmp_path, stop=(1, "epoch"))
    trainer.extend(extensions.PrintReportNotebook(["epoch"], extensions.LogReport()))
    with pytest.warns(UserWarning, match="IPython is not installed"):
        trainer.run()
    assert out.getvalue() == "epoch\n1\n"
