"""Tests of dbrdist.cli.builders.weights."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from PIL import Image

import dbrdist
import dbrdist.links as L
from dbrdist import models
from dbrdist.cli.builders import weights
from dbrdist.cli.builders import weights as weights_of
from dbrdist.cli.configuration.load import check
from dbrdist.core.files import safetensors
from dbrdist.core.files.serializer import save_npz
from dbrdist.errors import CheckpointError, ConfigError
from dbrdist.models import ResNet50
from dbrdist.training.extensions import snapshots
from tests.each import each


def test_torchvisions_names_in_ours():
    names = {
        "conv1.weight": "conv.W", "bn1.weight": "bn.gamma", "bn1.bias": "bn.beta", "bn1.running_mean": "bn.avg_mean",
        "bn1.running_var": "bn.avg_var", "layer1.0.conv1.weight": "blocks.0.conv1.W",
        "layer1.1.bn2.weight": "blocks.1.bn2.gamma", "layer2.0.downsample.0.weight": "blocks.2.shortcut.conv.W",
        "layer2.0.downsample.1.bias": "blocks.2.shortcut.bn.beta", "fc.weight": "fc.W", "fc.bias": "fc.b",
        "weight": "W", "bn1.num_batches_tracked": "bn.num_batches_tracked",
    }  # fmt: skip
    assert weights.from_torchvision({name: k for k, name in enumerate(names)}) == {
        name: k for k, name in enumerate(names.values())
    }


BASE = "model: mlp\ndata: digits\nbatch: 50\nepochs: 1\n"


def checked(text="", *overrides):
    return check((BASE + text).encode(), "run.yaml", overrides)[0]


def test_a_run_begins_with_the_weights_of_another(run):
    words = ("run.yaml", "model=mlp", "transforms.train=[]", "optimizer.schedule=constant", "log.every=1 iteration")
    run(*words, "out=first")
    run("--export", "first", "first.safetensors")
    trained = dbrdist.load("first")
    for source in ("first", snapshots.newest("first"), "first.safetensors"):
        assert run(*words, "optimizer.lr=1e-30", "iterations=1", f"init_from={source}", "--overwrite")[0] == 0
        for (_, a), (_, b) in zip(trained.namedparams(), dbrdist.load("result").namedparams(), strict=True):
            assert np.array_equal(a.array, b.array)
    code, _, err = run(*words, "model.units=[7]", "init_from=first", "--overwrite")
    assert code == 2
    assert "shape (100, 64) in the file, expected (7, 64)" in err
    words = (*words, "model.num_classes=12", "--overwrite")
    code, _, err = run(*words, "init_from={path: first, skip: ['2']}")
    assert code == 0, err
    code, _, err = run(*words, "init_from=first")
    assert code == 2
    assert "2.W has shape (10, 100) in the file, expected (12, 100); 2.b has shape (10,) in the file" in err


TORCHVISION_BLOCKS = (3, 4, 6, 3)


def torchvision_resnet50(num_classes, rng):
    """Names and shapes as torchvision.models.resnet50 has them, written down from its source."""
    arrays = {"conv1.weight": (64, 3, 7, 7)}

    def bn(name, n):
        for last in ("weight", "bias", "running_mean", "running_var"):
            arrays[f"{name}.{last}"] = (n,)
        arrays[f"{name}.num_batches_tracked"] = ()

    bn("bn1", 64)
    inputs = 64
    for k, num in enumerate(TORCHVISION_BLOCKS):
        width = 64 * 2**k
        for i in range(num):
            name = f"layer{k + 1}.{i}"
            arrays[f"{name}.conv1.weight"] = (width, inputs, 1, 1)
            arrays[f"{name}.conv2.weight"] = (width, width, 3, 3)
            arrays[f"{name}.conv3.weight"] = (4 * width, width, 1, 1)
            for j, n in ((1, width), (2, width), (3, 4 * width)):
                bn(f"{name}.bn{j}", n)
            if i == 0:
                arrays[f"{name}.downsample.0.weight"] = (4 * width, inputs, 1, 1)
                bn(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    arrays |= {"fc.weight": (num_classes, 2048), "fc.bias": (num_classes,)}
    return {name: rng.random(shape, np.float32) for name, shape in arrays.items()}


@pytest.mark.slow
def test_torchvisions_names_fit_resnet50(tmp_path):
    rng = np.random.default_rng(0)
    theirs = torchvision_resnet50(5, rng)
    assert len(theirs) == 320
    safetensors.save(str(tmp_path / "x.safetensors"), theirs)
    net = ResNet50(num_classes=5)
    settings = checked("", f"init_from={tmp_path / 'x.safetensors'}").init_from
    _, origin = check(BASE.encode(), "run.yaml")
    weights.begin_with(settings, net, origin)
    assert np.array_equal(net.conv.W.array, theirs["conv1.weight"])
    assert np.array_equal(net.bn.gamma.array, theirs["bn1.weight"])
    assert np.array_equal(net.blocks[3].shortcut.conv.W.array, theirs["layer2.0.downsample.0.weight"])
    assert np.array_equal(net.blocks[3].shortcut.bn.avg_var, theirs["layer2.0.downsample.1.running_var"])
    assert np.array_equal(net.blocks[15].bn3.beta.array, theirs["layer4.2.bn3.bias"])
    assert np.array_equal(net.fc.b.array, theirs["fc.bias"])
    used = len([n for n in theirs if not n.endswith("num_batches_tracked")])
    assert used == len(dict(weights._targets(net)))
    save_npz(str(tmp_path / "x.npz"), net, compression=False)
    again = ResNet50(num_classes=5)
    weights.begin_with(checked("", f"init_from={tmp_path / 'x.npz'}").init_from, again, origin)
    assert np.array_equal(again.blocks[7].conv2.W.array, net.blocks[7].conv2.W.array)
    assert Path(tmp_path / "x.npz").exists()


@pytest.mark.slow
def test_weights_are_exported(run):
    run("run.yaml")
    code, out, err = run("--export", "result", "out.safetensors")
    assert code == 0, err
    assert "out.safetensors: " in out and "from result/snapshot_iter_3" in out
    net = dbrdist.load("result", model=sys.modules["usernet"].Net)
    found = safetensors.load("out.safetensors")
    for path, p in net.namedparams():
        assert np.array_equal(found[path.strip("/").replace("/", ".")], p.array)
    assert np.array_equal(found["bn.avg_mean"], net.bn.avg_mean)
    code, _, err = run("--export", "result", "out.txt")
    assert code == 2 and "expected one file to write" in err


@pytest.mark.slow
def test_the_format_byte_for_byte(tmp_path):
    """Against the layout of its specification, read by hand."""
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"b": a, "a": np.array(7, np.int64), "c": a.T.astype(ml_dtypes.bfloat16), "d": np.zeros((0, 2), np.uint8)}
    path = str(tmp_path / "x")
    safetensors.save(path, arrays, {"k": "v"})
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header["__metadata__"] == {"k": "v"} and (8 + length) % 8 == 0
    assert header["b"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}
    assert header["c"]["dtype"] == "BF16" and header["a"]["shape"] == []
    start, end = header["b"]["data_offsets"]
    assert data[8 + length :][start:end] == a.tobytes()
    assert len(data) == 8 + length + 8 + 24 + 12
    back = safetensors.load(path)
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype and np.array_equal(back[name], array)


@pytest.mark.slow
def test_damaged_weights_are_refused(tmp_path):
    path, rng = tmp_path / "x", np.random.default_rng(0)
    safetensors.save(str(path), {"a": np.arange(10.0)})
    whole = path.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(3):
            data[rng.integers(90)] = rng.integers(256)
        path.write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.3 else data)
        try:
            assert all(isinstance(a, np.ndarray) for a in safetensors.load(str(path)).values())
        except CheckpointError as error:
            assert "cannot be read as a safetensors file" in str(error)


@each(**{"wrong, more": [(1, ""), (4, ""), (5, ", and 1 more"), (6, ", and 2 more")]})
def test_weights_that_do_not_fit_are_named_up_to_five(monkeypatch, wrong, more):
    """Besides those that are missing one of another shape; what fits is filled in, what is skipped is left alone."""
    filled = []
    targets = [(f"l{k}.W", (lambda: np.zeros(2), filled.append)) for k in range(wrong)]
    targets += [("shape", (lambda: np.zeros((2, 1)), filled.append)), ("good", (lambda: np.zeros(2), filled.append))]
    targets += [("fc.W", (lambda: np.zeros(2), filled.append)), ("fcx", (lambda: np.zeros(2), filled.append))]
    found = {"shape": np.zeros(2), "good": np.ones(2), "fcx": np.ones(2)}
    monkeypatch.setattr(weights_of, "_targets", lambda network: targets)
    monkeypatch.setattr(weights_of, "_read", lambda path: weights_of.Initial(found))
    origin = SimpleNamespace(where=lambda key: "run.yaml:3")
    with pytest.raises(ConfigError) as caught:
        weights_of.begin_with(SimpleNamespace(path="w.npz", skip=("fc",)), None, origin)
    problems = [f"l{k}.W is not in the file" for k in range(wrong)] + [
        "shape has shape (2,) in the file, expected (2, 1)"
    ]
    text = str(caught.value)
    assert text.startswith(f"run.yaml:3: init_from: w.npz: {'; '.join(problems[:5])}{more}; names in init_from.skip")
    assert len(filled) == 2
    found["shape"] = np.zeros((2, 1))
    if wrong == 1:
        found["l0.W"] = np.zeros(2)
        weights_of.begin_with(SimpleNamespace(path="w.npz", skip=("fc.",)), None, origin)
    monkeypatch.setattr(weights_of, "_read", lambda path: (_ for _ in ()).throw(CheckpointError("torn")))
    with pytest.raises(ConfigError, match=r"run\.yaml:3: init_from: torn"):
        weights_of.begin_with(SimpleNamespace(path="w.npz", skip=()), None, origin)


def classes_of(*names):
    """Images in folders of these names below `photos`."""
    for k, name in enumerate(names):
        for part in ("train", "test"):
            place = Path("photos", part, name)
            place.mkdir(parents=True)
            Image.fromarray(np.full((8, 8, 3), 90 * k, np.uint8)).save(place / "x.png")


@each(**{"maker, args": [("mine:Net", None), ("dbrdist.models:MLP", {"path": "/home/me"})]})
def test_arguments_of_own_networks_stay_out_of_exported_files(monkeypatch, tmp_path, maker, args):
    saved = {"updater/model:main/predictor/W": np.zeros(2, np.float32)}
    monkeypatch.setattr(weights_of.runs, "read_newest", lambda run: ("snapshot_iter_1", saved))
    recipe = {"callable": maker, "args": {"path": "/home/me"}, "classes": ["a"]}
    monkeypatch.setattr(weights_of, "read_json", lambda path: recipe)
    weights_of.export("run", str(tmp_path / "x.safetensors"))
    told = json.loads(safetensors.facts(str(tmp_path / "x.safetensors"))["model"])
    assert told == {"callable": maker, "classes": ["a"], **({} if args is None else {"args": args})}


def test_what_is_no_array_of_a_known_type_is_not_exported(monkeypatch, tmp_path):
    place = "updater/model:main/predictor/"
    saved = {"W": np.zeros(2, np.float32), "none": None, "names": np.array(["a", "b"]), "n": np.zeros((), np.int64)}
    entries = {f"{place}{name}": value for name, value in saved.items()}
    monkeypatch.setattr(weights_of.runs, "read_newest", lambda run: ("snapshot_iter_1", entries))
    monkeypatch.setattr(weights_of, "read_json", lambda path: {})
    weights_of.export("run", str(tmp_path / "x.safetensors"))
    assert sorted(safetensors.load(str(tmp_path / "x.safetensors"))) == ["W", "n"]


@pytest.mark.slow
@pytest.mark.filterwarnings("always::dbrdist.errors.UsageWarning")
def test_weights_of_other_classes_are_warned_of(run, folder):
    classes_of("cat", "dog")
    words = ["run.yaml", "model=mlp", "data={name: image_folder, root: photos}", "transforms.train=[]", "batch=2"]
    assert run(*words, "iterations=1", "out=first")[0] == 0
    assert run("--export", "first", "first.safetensors")[0] == 0
    sources = ["first", "first.safetensors", "first/snapshot_iter_1"]
    for source in sources:
        code, _, err = run(*words, "iterations=1", "--overwrite", f"init_from={source}")
        assert code == 0 and "init_from" not in err
    for part in ("train", "test"):
        shutil.move(f"photos/{part}/cat", f"photos/{part}/eel")
    for source in sources:
        code, _, err = run(*words, "iterations=1", "--overwrite", f"init_from={source}")
        assert code == 0 and "class 0 was 'cat', now 'dog'; class 1 was 'dog', now 'eel'" in err
        code, _, err = run(*words, "iterations=1", "--overwrite", f"init_from={{path: {source}, skip: ['2']}}")
        assert code == 0 and "init_from" not in err


@each(
    theirs=[
        ({"stride_in_3x3": True}, {"stride_in_3x3": False}, "stride_in_3x3 True, and this one has False"),
        ({"blur_pooling": "none"}, {"blur_pooling": "all"}, "blur_pooling none, and this one has all"),
        ({"channels": [3, 4]}, {"channels": (3, 4)}, None),
        ({"dropout": 0.5, "num_classes": 3}, {"dropout": 0.1, "num_classes": 4}, None),
        ({"rate": {"__float__": "inf"}}, {"rate": float("inf")}, None),
    ]
)
def test_what_makes_weights_give_other_outputs_is_named(theirs):
    saved, own, words = theirs
    ours = {"callable": "dbrdist.models:ResNet50", "args": own}
    found = list(weights._other_outputs({**ours, "args": saved}, ours, False))
    assert ([words in sentence for sentence in found] == [True]) if words else not found
    assert not list(weights._other_outputs({"callable": "dbrdist.models:ResNet18", "args": saved}, ours, False))
    mine = {"callable": "m:N", "args": own}
    assert not list(weights._other_outputs({**mine, "args": saved}, mine, False))


@pytest.mark.slow
def test_torchvisions_names_in_a_network_of_another_kind_are_warned_of(tmp_path):
    safetensors.save(str(tmp_path / "x.safetensors"), torchvision_resnet50(5, np.random.default_rng(0)))
    settings = checked("", f"init_from={tmp_path / 'x.safetensors'}").init_from
    _, origin = check(BASE.encode(), "run.yaml")
    for args, number in (({"stride_in_3x3": False}, 1), ({"stride_in_3x3": True}, 0)):
        net = ResNet50(num_classes=5, **args)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            weights.begin_with(settings, net, origin, {"callable": "dbrdist.models:ResNet50", "args": args})
        assert len([w for w in found if "stride_in_3x3 True, and this one has False" in str(w.message)]) == number


def test_a_run_that_is_used_as_another_network_is_warned_of(tmp_path):
    ours = {"callable": "dbrdist.models:ResNet50", "args": {"stride_in_3x3": False, "num_classes": 3}}
    theirs = {**ours, "args": {"stride_in_3x3": True, "num_classes": 3}, "classes": ["a", "b", "c"]}
    (tmp_path / "model.json").write_text(json.dumps(theirs))
    with pytest.warns(UserWarning, match="--evaluate r: .* stride_in_3x3 True, and this one has False"):
        weights.warn_of_other_network(str(tmp_path), ours, "--evaluate r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights.warn_of_other_network(str(tmp_path), theirs, "--evaluate r")


@each(header=[b"[]", b"{", b"\xff\xff", b'{"a": 3}', b"[" * 5000, b'{"__metadata__": 3, "a": null}', b"null"])
def test_weights_whose_header_is_damaged_are_named(tmp_path, header):
    path = str(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    settings = SimpleNamespace(path=path, skip=())
    with pytest.raises(ConfigError, match=r"run\.yaml: init_from: .*w\.safetensors: cannot be read as a safetensors"):
        weights.begin_with(settings, dbrdist.Sequential(L.Linear(1, 1)), SimpleNamespace(where=lambda path: "run.yaml"))


class Normalized(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.fc = L.Linear(4, 4)
            self.ln = L.LayerNormalization(4)
            self.gn = L.GroupNormalization(2, 4)
            self.rms = L.RMSNormalization(4)


def test_all_normalizations_of_a_file_in_pytorchs_names_have_its_eps(tmp_path):
    network = Normalized()
    before = network.rms.eps
    arrays = {
        "fc.weight": network.fc.W.array,
        "fc.bias": np.zeros(4, np.float32),
        "rms.weight": network.rms.gamma.array,
    }
    for name in ("ln", "gn"):
        arrays |= {f"{name}.weight": np.ones(4, np.float32), f"{name}.bias": np.zeros(4, np.float32)}
    safetensors.save(str(tmp_path / "torch.safetensors"), arrays)
    settings = SimpleNamespace(path=str(tmp_path / "torch.safetensors"), skip=("gn",))
    kept = network.gn.eps
    weights.begin_with(settings, network, SimpleNamespace(where=lambda path: "run.yaml"))
    assert (network.ln.eps, network.gn.eps, network.rms.eps) == (1e-5, kept, before)


def torch_resnet(torch, counts, is_deep):
    """A residual network of PyTorch's modules with torchvision's names: with bottlenecks if deep."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, inputs, width, stride, is_bottleneck):
            super().__init__()
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
            sizes = sizes if is_bottleneck else [(inputs, width, 3, stride), (width, width, 3, 1)]
            self.num = len(sizes)
            for k, (i, o, kernel, s) in enumerate(sizes, 1):
                setattr(self, f"conv{k}", nn.Conv2d(i, o, kernel, s, kernel // 2, bias=False))
                setattr(self, f"bn{k}", nn.BatchNorm2d(o))
            self.downsample = None
            if stride != 1 or inputs != sizes[-1][1]:
                shortcut = nn.Conv2d(inputs, sizes[-1][1], 1, stride, bias=False)
                self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(sizes[-1][1]))

        def forward(self, x):
            h = x
            for k in range(1, self.num + 1):
                h = getattr(self, f"bn{k}")(getattr(self, f"conv{k}")(h))
                h = torch.relu(h) if k < self.num else h
            return torch.relu(h + (x if self.downsample is None else self.downsample(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
            inputs = 64
            for stage, num in enumerate(counts, 1):
                blocks = []
                for i in range(num):
                    width = 64 * 2 ** (stage - 1)
                    blocks.append(Block(inputs, width, 2 if stage > 1 and i == 0 else 1, is_deep))
                    inputs = 4 * width if is_deep else width
                setattr(self, f"layer{stage}", nn.Sequential(*blocks))
            self.fc = nn.Linear(inputs, 10)

        def forward(self, x):
            h = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
            for stage in range(1, 5):
                h = getattr(self, f"layer{stage}")(h)
            return self.fc(h.mean((2, 3)))

    return Net().eval()


@pytest.mark.torch
@pytest.mark.slow
@each(**{"make, counts, is_deep": [
    (models.ResNet18, (2, 2, 2, 2), False), (models.ResNet34, (3, 4, 6, 3), False),
    (models.ResNet50, (3, 4, 6, 3), True), (models.ResNet101, (3, 4, 23, 3), True),
    (models.ResNet152, (3, 8, 36, 3), True),
]})  # fmt: skip
def test_residual_networks_go_to_pytorch_and_back_with_torchvisions_names(make, counts, is_deep, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    theirs = torch_resnet(torch, counts, is_deep)
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.1, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.8, 1.2)
            torch.nn.init.uniform_(module.weight, 0.4, 0.6)
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    safetensors.save(str(tmp_path / "theirs.safetensors"), {n: a for n, a in state.items() if a.ndim})
    ours = make(10)
    settings = checked("", f"init_from={tmp_path / 'theirs.safetensors'}").init_from
    weights.begin_with(settings, ours, check(BASE.encode(), "run.yaml")[1])
    x = np.random.default_rng(0).normal(size=(2, 3, 64, 64)).astype(np.float32)
    with torch.no_grad(), dbrdist.using_config("train", False):
        expected, found = theirs(torch.from_numpy(x)).numpy(), ours(x).array
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5 * np.abs(expected).max())
        entries = {n: get() for n, (get, _) in weights._targets(ours)}
        back = torch_resnet(torch, counts, is_deep)
        names = weights.to_torch(entries)
        missing, unexpected = back.load_state_dict({n: torch.from_numpy(a) for n, a in names.items()}, strict=False)
        assert unexpected == [] and all(name.endswith("num_batches_tracked") for name in missing)
        np.testing.assert_array_equal(back(torch.from_numpy(x)).numpy(), expected)
