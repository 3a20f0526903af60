"""What a configuration takes of the user: names as they are typed, weights, metrics, extensions."""

import sys
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import lines

import dbrdist
from dbrdist.cli import weights
from dbrdist.cli.load import check
from dbrdist.core import safetensors
from dbrdist.core.serializer import save_npz
from dbrdist.models import ResNet50
from dbrdist.training.extensions import snapshots

BASE = "model: mlp\ndata: digits\nbatch: 50\nepochs: 1\n"


def config(text="", *overrides):
    return check((BASE + text).encode(), "run.yaml", overrides)[0]


@pytest.mark.parametrize("name", ["MomentumSGD", "momentum_sgd", "momentum-sgd", "Momentum SGD", "MOMENTUM_SGD"])
def test_names_are_found_in_any_case(name):
    assert config(f"optimizer: {name}").optimizer.name == "momentum_sgd"
    assert config(f"optimizer: {{name: {name}, lr: 0.5}}").optimizer.lr == 0.5


def test_names_of_every_kind():
    made = config("", "model=ResNet20", "optimizer=AdamW", "optimizer.schedule=Cosine", "loss=MeanSquaredError")
    assert (made.model.name, made.optimizer.name) == ("resnet20", "adamw")
    assert (made.optimizer.schedule.name, made.loss.name) == ("cosine", "mean_squared_error")


def test_the_learning_rate_by_either_name():
    assert config("", "optimizer=adam", "optimizer.lr=0.5").optimizer.alpha == 0.5
    assert config("optimizer: {name: sgd, alpha: 0.5}").optimizer.lr == 0.5
    with pytest.raises(dbrdist.errors.ConfigError, match=r"optimizer.lr: unknown key"):
        config("optimizer: {name: adam, lr: 0.5, alpha: 0.2}")


def test_defaults_reach_deep():
    made = config("", "loss.label_smoothing=0.1", "optimizer.momentum=0.5", "optimizer.schedule.warmup_epochs=0.5")
    assert (made.loss.name, made.loss.label_smoothing) == ("softmax_cross_entropy", 0.1)
    assert (made.optimizer.name, made.optimizer.momentum) == ("momentum_sgd", 0.5)
    assert (made.optimizer.schedule.name, made.optimizer.schedule.warmup_epochs) == ("constant", 0.5)


OWN = """
import numpy as np
from dbrdist.training import Extension

calls = []

def top2(outputs, labels, k=2):
    order = np.argsort(-outputs.array, axis=1)[:, :k]
    return float((order == labels[:, None]).any(1).mean())

class Note(Extension):
    trigger = (1, "iteration")

    def __init__(self, word):
        self.word = word

    def __call__(self, trainer):
        calls.append((self.word, trainer.updater.iteration))
"""


@pytest.fixture
def own(folder):
    (folder / "door.py").write_text(OWN)
    yield
    sys.modules.pop("door", None)


def test_own_metrics_and_extensions(run, own):
    words = (
        "metrics=['door:top2', {name: 'door:top2', args: {k: 10}}]",
        "extensions=[{name: 'door:Note', args: {word: each}}, "
        "{name: 'door:Note', args: {word: some}, every: 2 iterations}]",
    )
    code, _, err = run("run.yaml", *words[1:], "metrics=['door:top2']", "log.every=1 iteration")
    assert code == 0, err
    for entry in lines("result/log.jsonl"):
        assert entry["main/accuracy"] <= entry["main/top2"] <= 1
    assert "validation/main/top2" in lines("result/log.jsonl")[-1]
    calls = sys.modules["door"].calls
    assert [n for word, n in calls if word == "each"] == [1, 2, 3]
    assert [n for word, n in calls if word == "some"] == [2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("metrics=['door:nothing']", "has no 'nothing'"),
        ("extensions=[{name: 'door:Note', args: {wort: 1}}]", "takes no 'wort', did you mean 'word'?"),
        ("extensions=[{name: 'door:Note', args: {word: 1}, every: often}]", "extensions.0.every: expected a period"),
        ("optimizer={name: momentum_sgd, LR: 1}", "optimizer.LR: unknown key, did you mean 'lr'?"),
        ("extensions=[5]", "expected the name of an extension: package.module:callable"),
        ("init_from=nowhere.npz", "init_from: nowhere.npz: No such file or directory"),
        ("init_from=run.yaml", "init_from: run.yaml: cannot be read as an .npz file"),
        ("init_from={path: x, skipp: [a]}", "init_from.skipp: unknown key, did you mean 'skip'?"),
    ],
)
def test_mistakes(run, own, words, message):
    code, _, err = run("run.yaml", words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


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
    settings = config("", f"init_from={tmp_path / 'x.safetensors'}").init_from
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
    weights.begin_with(config("", f"init_from={tmp_path / 'x.npz'}").init_from, again, origin)
    assert np.array_equal(again.blocks[7].conv2.W.array, net.blocks[7].conv2.W.array)
    assert Path(tmp_path / "x.npz").exists()
