"""Run-wide switches: per thread, over the process's defaults."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
import time

import numpy as np
import pytest

import dbrdist
from dbrdist import config, global_config, using_config
from dbrdist.core.array import config as core_config
from dbrdist.core.array.config import DebugMode


def in_thread(function):
    out = []
    thread = threading.Thread(target=lambda: out.append(function()))
    thread.start()
    thread.join()
    return out[0]


@pytest.fixture
def entry():
    """A new entry with a default, removed afterwards."""
    global_config.colour = "red"
    yield "colour"
    if "colour" in config._record.own:
        del config.colour
    del global_config.colour


# As Chainer 7's documentation of `chainer.config` has them; the type is ours to name.
DEFAULTS = {
    "train": True, "enable_backprop": True, "keep_graph_on_report": False, "debug": False, "dtype": np.dtype("float32"),
    "autotune": False, "compute_mode": None, "cudnn_deterministic": False, "cudnn_fast_batch_normalization": False,
    "in_recomputing": False, "lazy_grad_sum": False, "type_check": True, "use_cudnn": "auto",
    "use_cudnn_tensor_core": "auto", "use_ideep": "never", "use_static_graph": True, "warn_nondeterministic": False,
}  # fmt: skip


def test_each_switch_starts_as_chainers():
    assert {name: getattr(global_config, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("name", ["autotune", "cudnn_deterministic", "keep_graph_on_report", "type_check", "use_cudnn"])
def test_entries_of_chainer_programs_can_be_read_and_set(name):
    before = getattr(config, name)
    with using_config(name, "something"):
        assert getattr(config, name) == "something"
    assert getattr(config, name) == before


def test_using_config_restores_also_after_an_error_and_nests():
    with pytest.raises(KeyError), using_config("train", False):
        assert config.train is False
        with using_config("train", True):
            assert config.train is True
        assert config.train is False
        raise KeyError
    assert config.train is True
    assert "train" not in config._record.own, "the thread must follow the default again"


def test_a_switch_of_one_thread_is_not_seen_by_another():
    with using_config("train", False):
        assert in_thread(lambda: config.train) is True


def test_a_changed_default_reaches_threads_that_have_not_set_it_themselves(entry):
    steps = [threading.Event() for _ in range(2)]
    seen = {}

    def follower():
        seen["before"] = config.colour
        steps[0].set()
        steps[1].wait(60)
        seen["after"] = config.colour

    thread = threading.Thread(target=follower)
    thread.start()
    steps[0].wait(60)
    config.colour = "green"
    global_config.colour = "blue"
    steps[1].set()
    thread.join()
    assert seen == {"before": "red", "after": "blue"}
    assert config.colour == "green" and global_config.colour == "blue"
    assert in_thread(lambda: config.colour) == "blue"
    del config.colour
    assert config.colour == "blue"


def test_a_read_is_a_plain_attribute_read():
    assert "enable_backprop" in vars(config), "values lie in the thread's own dictionary"
    assert type(config).__getattribute__ in (threading.local.__getattribute__, object.__getattribute__)
    assert not hasattr(type(config), "__getattr__")


def test_a_value_set_while_the_default_changes_is_not_lost(entry):
    """The change has just seen that this thread follows the default, when the thread sets a value of its own."""
    looked = threading.Event()

    class Slow(set):
        def __contains__(self, name):
            found = super().__contains__(name)
            looked.set()
            time.sleep(0.1)
            return found

    record = config._record
    record.own, plain = Slow(record.own), record.own
    try:
        thread = threading.Thread(target=lambda: setattr(global_config, "colour", "late"))
        thread.start()
        assert looked.wait(60)
        config.colour = "own"
        thread.join()
        assert config.colour == "own"
    finally:
        plain.update(record.own)
        record.own = plain


def test_unknown_entries():
    with pytest.raises(AttributeError, match="no_such_entry"):
        _ = global_config.no_such_entry
    with pytest.raises(AttributeError):
        _ = config.no_such_entry
    with using_config("no_such_entry", 3):
        assert config.no_such_entry == 3
    assert not hasattr(config, "no_such_entry")
    with using_config("no_such_entry", 3, config=global_config):
        assert config.no_such_entry == 3
    assert not hasattr(config, "no_such_entry")


def test_get_dtype():
    assert dbrdist.get_dtype() == np.float32
    assert dbrdist.get_dtype("float16") == np.float16
    with using_config("dtype", "mixed16"):
        assert dbrdist.get_dtype() == np.float16
        assert dbrdist.get_dtype(map_mixed16=np.float32) == np.float32
        assert dbrdist.Parameter(0.0, (2,)).dtype == np.float32
    with using_config("dtype", "mixedbf16"):
        assert dbrdist.get_dtype().name == "bfloat16"
    with using_config("dtype", np.float64):
        assert dbrdist.Parameter(0.0, (2,)).dtype == np.float64


def test_debug_mode():
    with dbrdist.DebugMode(True):
        assert dbrdist.is_debug()
    assert not dbrdist.is_debug()
    dbrdist.set_debug(True)
    assert dbrdist.is_debug()
    del config.debug
    assert not dbrdist.is_debug()


def test_show(capsys):
    config.show()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["enable_backprop", "True"] for line in lines)
    assert not any(line.startswith("_") for line in lines)


def test_a_configuration_of_its_own():
    defaults = dbrdist.core.array.config.GlobalConfig()
    own = dbrdist.core.array.config.LocalConfig(defaults)
    defaults.x, defaults.y = "default x", "default y"
    own.y, own.z = "own y", "own z"

    def other():
        defaults.x, own.y = "other x", "other y"
        return own.x, own.y, hasattr(own, "z")

    assert in_thread(other) == ("other x", "other y", False)
    assert (own.x, own.y, own.z) == ("other x", "own y", "own z")
    assert not hasattr(config, "x") and not hasattr(own, "train")
    with using_config("x", "block", own):
        assert (own.x, defaults.x) == ("block", "other x")
    assert own.x == "other x"
    text = io.StringIO()
    own.show(text)
    assert text.getvalue() == "x other x\ny own y\nz own z\n"
    text = io.StringIO()
    defaults.show(file=text)
    assert text.getvalue() == "x other x\ny default y\n"


def test_only_what_the_thread_has_set_can_be_deleted(entry):
    with pytest.raises(AttributeError, match=r"config\.colour: this thread has not set it"):
        del config.colour
    config.colour = "green"
    del config.colour
    assert config.colour == "red"
    with using_config("colour", "blue"):
        del config.colour
    assert config.colour == "red"


def test_using_device():
    with dbrdist.using_device("@numpy") as device:
        assert device.name == "@numpy" and device.xp is np
    with pytest.raises(ValueError, match="expected a device such as"), dbrdist.using_device("@abacus"):
        pass


def test_debug_mode_ends_with_its_block():
    for outer in (False, True):
        with dbrdist.using_config("debug", outer):
            for debug in (True, False):
                mode = dbrdist.DebugMode(debug)
                with mode:
                    assert dbrdist.is_debug() is debug
                assert dbrdist.is_debug() is outer
                with pytest.raises(ValueError, match="x"), dbrdist.DebugMode(debug):
                    raise ValueError("x")
                assert dbrdist.is_debug() is outer


def test_a_default_that_was_never_there_cannot_be_forgotten():
    with pytest.raises(AttributeError, match="no configuration entry named 'nothing'"):
        del dbrdist.global_config.nothing
    dbrdist.global_config.something = 3
    assert dbrdist.config.something == 3
    del dbrdist.global_config.something
    assert not hasattr(dbrdist.config, "something")


def test_the_mode_of_computation_can_be_set():
    assert dbrdist.get_compute_mode() is None
    with dbrdist.using_config("compute_mode", "cudnn_fast"):
        assert dbrdist.get_compute_mode() == "cudnn_fast"


def test_debug_mode_goes_back_to_the_mode_before():
    for before in (False, True):
        with dbrdist.using_config("debug", before):
            for inside in (True, False):
                with DebugMode(inside):
                    assert dbrdist.is_debug() is inside
                assert dbrdist.is_debug() is before


@pytest.mark.parametrize("mode", [dbrdist.no_backprop_mode, dbrdist.force_backprop_mode], ids=lambda m: m.__name__)
def test_a_mode_without_its_parentheses_says_so(mode):
    name = mode.__name__
    with pytest.raises(TypeError, match=rf"parentheses are missing; write `with dbrdist\.{name}\(\):`"), mode:
        pass
    with pytest.raises(TypeError, match=rf"write `@dbrdist\.{name}\(\)` as a decorator"):

        @mode
        def evaluate():
            pass

    assert pickle.loads(pickle.dumps(mode)) is mode and copy.deepcopy(mode) is mode
    assert str(inspect.signature(mode)).startswith("()") and "thread records" in mode.__doc__

    @mode()
    def is_recorded():
        return dbrdist.config.enable_backprop

    assert is_recorded() is (name == "force_backprop_mode")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (lambda: dbrdist.using_config(train=False), "using_config: missing a required argument: 'name'"),
        (lambda: dbrdist.using_config("train"), "missing a required argument: 'value'"),
        (lambda: dbrdist.using_config(dbrdist.config.train, False), "expected the name of an entry, got True"),
        (lambda: dbrdist.using_config("train", False, True), "expected dbrdist.config or .*, got True"),
        (lambda: dbrdist.using_config, "the parentheses are missing"),
        (lambda: dbrdist.Chain().init_scope, "the parentheses are missing"),
        (lambda: dbrdist.Chain().init_scope(dbrdist.Chain()), "init_scope: too many positional arguments"),
        (lambda: dbrdist.Reporter().scope, "the parentheses are missing"),
        (lambda: dbrdist.report_scope(), "report_scope: missing a required argument: 'observation'"),
    ],
)
def test_a_block_that_is_written_wrongly_says_how_it_is_written(block, words):
    with pytest.raises(TypeError, match=rf"{words}.*; (write|give one entry and its value,) `with .*\):`"), block():
        pass


def test_blocks_keep_their_names_signatures_and_own_errors():
    assert pickle.loads(pickle.dumps(dbrdist.using_config)) is dbrdist.using_config
    assert str(inspect.signature(dbrdist.using_config)).startswith("(name: 'str', value: 'Any'")
    assert "Set one configuration entry" in dbrdist.using_config.__doc__
    assert "are registered" in dbrdist.Link.init_scope.__doc__ and dbrdist.Chain().init_scope.__name__ == "init_scope"
    with pytest.raises(TypeError) as caught:  # of what the function does with right arguments
        dbrdist.using_config("dtype", np.object_).__enter__()
    assert "write `with" not in str(caught.value)
    words = "there is no such entry, so it changes nothing; did you mean 'train'"
    with pytest.warns(dbrdist.errors.UsageWarning, match=words), dbrdist.using_config("config.train", False):
        pass

    class Scoped(dbrdist.Chain):
        def init_scope(self):
            return super().init_scope()

    link = Scoped()
    with link.init_scope():
        link.w = dbrdist.Parameter(np.zeros(2, "f"))
    assert [name for name, _ in link.namedparams()] == ["/w"]


def test_a_block_that_outlives_its_module_ends_in_silence(monkeypatch, recwarn):
    """At the end of the interpreter what a module imported has gone before the last objects."""
    block = using_config("train", False)
    monkeypatch.delattr(core_config, "sys")
    block.__del__(lambda: True)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="was not entered"):
        block.__del__()  # the interpreter still runs
    block._is_used = True


@pytest.mark.parametrize("place", [config, global_config])
def test_a_text_in_the_place_of_a_switch_is_refused(place):
    """It would count as true."""
    with pytest.raises(TypeError, match="enable_backprop"):
        place.enable_backprop = "False"
    assert config.enable_backprop is True and global_config.enable_backprop is True
