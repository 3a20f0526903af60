"""What the code lists, the tests check entry by entry: a new entry without its check fails here.

Links are asked for in the same way in tests/contracts/links, operations in tests/contracts/functions.
"""

import functools
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from dbrdist_launch import backends
from pydantic import create_model
from train_page import KINDS, PAGE, components, keys_of_the_run

from dbrdist import optimizers, training
from dbrdist.cli.configuration import schema
from dbrdist.comm.communicators import create
from dbrdist.comm.communicators.messages import NaiveCommunicator
from dbrdist.core.update.optimizer import Optimizer
from dbrdist.kernels import providers
from dbrdist.training import extensions
from tests.comm.contract_names import OTHERS, WORLDS
from tests.contracts.comm.test_contract import test_contract_on_threads as contract_on_threads
from tests.contracts.comm.test_contract import test_single as contract_alone
from tests.optimizers.optimizer_formulas import CASES

TESTS = Path(__file__).parents[1]

# Communicators without MPI, with the tests that have them keep the contract.
WITHOUT_MPI = {"threads": contract_on_threads, "single": contract_alone}


def communicators_without_contract():
    """Names that create_communicator takes and whose communicator passes the contract nowhere."""
    over_mpi = {*WORLDS, *OTHERS} & create.OVER_MPI.keys()
    return create.PROVIDERS.keys() - WITHOUT_MPI.keys() - over_mpi


def optimizers_without_formula():
    """Public optimizers that no case compares with a formula of its own in NumPy."""
    listed = {name: getattr(optimizers, name) for name in optimizers.__all__}
    made = {type(make()) for make, _ in CASES}
    return {name for name, kind in listed.items() if issubclass(kind, Optimizer) and kind not in made}


def test_every_communicator_keeps_the_contract():
    assert communicators_without_contract() == set()


def test_no_name_is_left_of_a_communicator_that_is_gone():
    assert {*WORLDS, *OTHERS} - create.OVER_MPI.keys() == {"shared"}  # which is a way of flat
    assert WITHOUT_MPI.keys() == create.PROVIDERS.keys() - create.OVER_MPI.keys()


def test_every_optimizer_follows_a_formula():
    assert optimizers_without_formula() == set()


@pytest.mark.parametrize("table", [create.OVER_MPI, {}])
def test_a_communicator_without_contract_is_noticed(monkeypatch, table):
    monkeypatch.setitem(create.PROVIDERS, "new", lambda mpi_comm, settings: None)
    monkeypatch.setitem(table, "new", NaiveCommunicator)
    assert communicators_without_contract() == {"new"}


def test_an_optimizer_without_formula_is_noticed(monkeypatch):
    class New(optimizers.SGD):
        """A rule of its own is not that of its base."""

    monkeypatch.setattr(optimizers, "New", New, raising=False)
    monkeypatch.setattr(optimizers, "__all__", [*optimizers.__all__, "New"])
    assert optimizers_without_formula() == {"New"}


@functools.cache
def words_in(folder):
    """The text of all tests of a folder."""
    return "\n".join(p.read_text() for p in sorted((TESTS / folder).rglob("*.py")))


def backends_without_test():
    """Starters of MPI programs whose words no test compares."""
    files = {found.name for found in pkgutil.iter_modules(backends.__path__)}
    has_test = {p.stem.removeprefix("test_") for p in (TESTS / "launch" / "backends").glob("test_*.py")}
    return {name for name in files if hasattr(getattr(backends, name, None), "ORDER")} - has_test


def extensions_without_test():
    """Public extensions of the trainer that no test names; a base of others is tested by them."""
    kinds = [kind for kind in map(extensions.__dict__.get, dir(extensions)) if isinstance(kind, type)]
    named = {kind.__name__ for kind in kinds if issubclass(kind, training.Extension) and not kind.__subclasses__()}
    return {name for name in named if not re.search(rf"\b{name}\b", words_in("training") + words_in("comm/run"))}


def test_every_backend_has_a_test_of_its_words():
    assert backends_without_test() == set()


def test_a_backend_without_a_test_is_noticed(monkeypatch, tmp_path):
    (tmp_path / "bare.py").write_text('NAMES, ORDER = ("bare",), 9\nchoose = print\n')
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    monkeypatch.setattr(backends, "bare", SimpleNamespace(ORDER=9), raising=False)
    assert backends_without_test() == {"bare"}


def test_every_extension_has_a_test():
    assert extensions_without_test() == set()


def test_an_extension_without_a_test_is_noticed(monkeypatch):
    new = type("Fresh" + "Extension", (training.Extension,), {})
    monkeypatch.setattr(extensions, "fresh", new, raising=False)
    assert extensions_without_test() == {"FreshExtension"}


@functools.cache
def words_of_tests(on_gpu):
    """The text of the tests of kernels, which compare providers with the reference."""
    folders = ["gpu"] if on_gpu else ["contracts/kernels", "kernels"]
    return "\n".join(p.read_text() for folder in folders for p in sorted((TESTS / folder).rglob("*.py")))


def is_compared(kernel, text):
    """Whether a text names the kernel: kernels.NAME, "NAME", _plan_NAME or NAME(; what comes first is found fast."""
    before = rf"(?<=kernels\.{kernel})\b|(?<=\"{kernel})\"|(?<=_plan_{kernel})\b|(?<=\b{kernel})\("
    return re.search(rf"{kernel}(?:{before})", text) is not None


def rows_without_comparison():
    """Rows of providers that no test names, beside the reference."""
    providers.add_rows_of_gpus()
    return {
        f"{provider}: {kernel}"
        for provider, rows in providers.PROVIDERS.items()
        for kernel in rows
        if provider != "numpy" and not is_compared(kernel, words_of_tests(provider in ON_GPU))
    }


ON_GPU = {"cuda", "cudnn"}


def test_every_row_of_a_provider_is_compared_with_the_reference():
    assert rows_without_comparison() == set()


def test_a_row_without_comparison_is_noticed(monkeypatch):
    monkeypatch.setitem(providers.PROVIDERS["onednn"], "new_one", lambda *arguments: None)
    assert rows_without_comparison() == {"onednn: new_one"}


def test_a_kernel_is_compared_where_it_is_named():
    for text in ("kernels.add(x)", 'use("add")', "_plan_add = 1", "y = add(x)", "kernels.add"):
        assert is_compared("add", text), text
    for text in ("kernels.adder", "_plan_adder", "my_add(x)", "add", "'add'"):
        assert not is_compared("add", text), text


def keys_of_configurations():
    """Each key of a configuration, as it is written, and its last name."""
    yield from ((key, name) for key, _, name in keys_of_the_run())
    of_parts = [(f"{kind} {name}", cls) for kind in KINDS for name, cls in components(kind)]
    for part, cls in (*of_parts, ("stop", schema.Stop), ("ema", schema.Ema)):
        yield from ((f"{part}.{name}", name) for name in cls.model_fields if name != "name")


@functools.cache
def set_of_words(text):
    return frozenset(re.findall(r"\w+", text))


def keys_without(text):
    """The keys of configurations that a text does not name."""
    return {key for key, name in keys_of_configurations() if name not in set_of_words(text)}


@pytest.mark.slow
def test_every_key_of_a_configuration_is_tested_and_on_its_page():
    assert keys_without(words_in(".")) == set()
    assert keys_without(PAGE.read_text()) == set()


def test_a_key_without_a_test_is_noticed(monkeypatch):
    new = create_model("New", __base__=schema.Stop, **{"fresh" + "_key": (int, 0)})
    monkeypatch.setattr(schema, "Stop", new)
    assert keys_without(words_in(".")) == keys_without(PAGE.read_text()) == {"stop.fresh" + "_key"}
