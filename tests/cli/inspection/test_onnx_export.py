"""`dbrdist-train --export RUN FILE.onnx`, and weights under PyTorch's names."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace

import numpy as np
import pytest

import dbrdist
from dbrdist import models
from dbrdist.cli.builders import weights
from dbrdist.cli.builders.assemble import parts
from dbrdist.cli.configuration import load
from dbrdist.cli.configuration.components import InitFrom
from dbrdist.cli.inspection import commands, onnx_export
from dbrdist.cli.train import command
from dbrdist.errors import ConfigError
from tests.comm.jobs import ROOT

DIGITS = str(ROOT / "examples" / "digits" / "config.yaml")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two steps on the digits."""
    monkeypatch.chdir(tmp_path)
    heard = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        assert command.main([DIGITS, "iterations=2", "batch=30", "out=run"], standalone_mode=False) == 0
    finally:
        for number, handler in heard.items():  # a command keeps its own to the end of its process
            signal.signal(number, handler)
    return "run"


def test_the_file_gives_the_scores_of_the_run(run):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    for words in (["a.onnx"], ["b.onnx", "1x8x8"], [DIGITS, "c.onnx"]):
        (line,) = commands.export(run, words)
        assert "snapshot_iter_2; input x: float32 (batch, 1, 8, 8)" in line
        name = next(w for w in words if w.endswith(".onnx"))
        x = np.random.default_rng(0).normal(size=(7, 1, 8, 8)).astype("f")
        (found,) = runtime.InferenceSession(name).run(None, {"x": x})
        net = dbrdist.load(run)
        with dbrdist.using_config("train", False):
            np.testing.assert_allclose(found, net(x).array, atol=1e-5)
    facts = {p.key: p.value for p in onnx.load("a.onnx").metadata_props}
    assert json.loads(facts["data"])["name"] == "digits" and json.loads(facts["transforms"]) == []


@pytest.mark.parametrize(
    "data",
    [
        "{name: image_folder, root: /home/me/photos, resize: [8, 8]}",
        "{name: 'mine:data', args: {url: 'me:secret@host'}}",
    ],
)
def test_no_place_of_the_run_is_in_the_metadata(data, tmp_path):
    settings, origin = load.load(DIGITS, (f"data={data}",))
    facts = onnx_export._metadata(settings, origin, {"classes": None}, "/home/me/result/snapshot_iter_2")
    assert not any("/home" in text or "secret" in text for text in facts.values())
    expected = (
        {"name": "image_folder", "resize": [8, 8], "decode": "exact"} if "resize" in data else {"name": "mine:data"}
    )
    assert json.loads(facts["data"]) == expected and facts["source"] == "snapshot_iter_2"


def test_images_of_a_run_without_tests_go_through_what_it_was_trained_on():
    transforms = "[{name: random_resized_crop, size: 8}, {name: random_flip}, "
    transforms += "{name: normalize, mean: [0.25], std: [0.5]}]"
    data = "{name: image_folder, root: photos, test: null}"
    settings, origin = load.load(DIGITS, (f"data={data}", f"transforms={{train: {transforms}}}"))
    facts = onnx_export._metadata(settings, origin, {"classes": None}, "snapshot_iter_2")
    assert [step["name"] for step in json.loads(facts["transforms"])] == ["center_resized_crop", "normalize"]
    assert (json.loads(facts["mean"]), json.loads(facts["std"])) == ([0.25], [0.5])


@pytest.mark.parametrize(
    "words", [["a.onnx", "b.onnx"], ["a.onnx", "1x8x8", "1x8x8"], ["a.onnx", "lr=3"], ["a.onnx", "x"]]
)
def test_other_words_are_refused(words, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="expected one file to write, and perhaps the shape"):
        list(commands.export("run", words))


def test_a_shape_that_does_not_fit(run):
    pytest.importorskip("onnx")
    with pytest.raises((ConfigError, dbrdist.errors.CheckpointError), match=r"(does not take|expected shape)"):
        list(commands.export(run, ["a.onnx", "1x2x2"]))


# ---- PyTorch's names ------------------------------------------------------------------------------------------------


def arrays_of(link):
    found = {path.strip("/").replace("/", "."): p.array for path, p in link.namedparams()}
    for path, inner in link.namedlinks():
        for name in inner._persistent:
            if isinstance(getattr(inner, name), np.ndarray):
                found[f"{path}/{name}".strip("/").replace("/", ".")] = getattr(inner, name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [models.ResNet18, models.ResNet34, models.ResNet50])
def test_torchvision_names_there_and_back(make):
    net = make(10)
    with dbrdist.using_config("train", False):
        net(np.zeros((1, 3, 32, 32), "f"))
    ours = arrays_of(net)
    theirs = weights.to_torch(ours)
    assert {"conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "layer2.0.downsample.1.bias", "fc.bias"} <= set(
        theirs
    )
    stages = {name.split(".")[0] for name in theirs if name.startswith("layer")}
    assert stages == {"layer1", "layer2", "layer3", "layer4"}
    back = weights.from_torchvision(theirs)
    assert back.keys() == ours.keys() and all(back[k] is ours[k] for k in ours)


def test_a_run_begins_with_weights_in_torchs_names(run):
    (_line,) = commands.export(run, ["w.safetensors", "names=torch"])
    settings, origin = load.load(DIGITS, ["init_from=w.safetensors"])
    made = parts(settings, origin, 0, 1)
    wanted, found = arrays_of(dbrdist.load(run)), arrays_of(made.task.predictor)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
    with pytest.raises(ConfigError, match="names=torch or names=dbrdist"):
        list(commands.export(run, ["w.safetensors", "names=jax"]))


def test_a_missing_array_is_named(run, tmp_path):
    net = dbrdist.load(run)
    entries = weights.to_torch(arrays_of(net))
    first = sorted(entries)[0]
    del entries[first]
    weights.safetensors.save("part.safetensors", entries)
    _settings, origin = load.load(DIGITS, [])
    with pytest.raises(ConfigError, match="is not in the file"):
        weights.begin_with(InitFrom(path="part.safetensors"), net, origin)


def test_an_example_is_of_the_test_data_where_there_is_any(monkeypatch):
    monkeypatch.setattr(onnx_export, "Look", lambda config, origin, part, data, convert, device: Looked(part, data))
    monkeypatch.setattr(onnx_export.build, "converter_for", lambda config: None)
    for test, expected in ((None, ("train", "a", 2)), ("b", ("test", "b", 2))):
        data = SimpleNamespace(train="a", test=test)
        monkeypatch.setattr(onnx_export.build, "data", lambda config, origin, data=data: data)
        assert onnx_export._example(None, None) == expected
    monkeypatch.setattr(Looked, "arguments", lambda self, number: None)
    with pytest.raises(ConfigError, match="no readable example; give its shape: --export RUN"):
        onnx_export._example(None, None)


class Looked:
    def __init__(self, part, data):
        self.part, self.data = part, data

    def arguments(self, number):
        return [(self.part, self.data, number)], {}
