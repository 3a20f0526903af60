"""The program that wrote the files of this folder with version b1df9a7, before its modules moved.

    python make.py FOLDER

``test_old_files.py`` reads them with the present version. Do not write them anew: they stand for files that users have.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, models, optimizers, serializers
from dbrdist.models import resnet

CONFIG = """
data: {name: digits}
model: {name: mlp, units: [8]}
optimizer: {name: momentum_sgd, lr: 0.1}
batch: 30
epochs: 2
"""


def links() -> dict[str, dbrdist.Link]:
    """Links of several rooms; those with statistics have been called."""
    x = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)
    net = dbrdist.Sequential(L.Convolution2D(3, 4, 3), L.BatchNormalization(4), F.relu, L.Linear(None, 5))
    net(x)
    lstm = L.LSTM(3, 4)
    lstm(x[:, :, 0, 0])
    return {
        "sequential": net,
        "lstm": lstm,
        "n_step_lstm": L.NStepLSTM(2, 3, 4, 0.0),
        "classifier": L.Classifier(L.Linear(3, 2)),
        "embed_id": L.EmbedID(5, 3),
        "parallel": L.Convolution2D(None, 4, 3),
        "mlp": models.MLP(),
        "layer_normalization": L.LayerNormalization(4),
    }


def data() -> dict[str, object]:
    """Datasets that can be pickled."""
    x, t = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6)
    pair = datasets.TupleDataset(x, t)
    return {
        "tuple": pair,
        "dict": datasets.DictDataset(x=x, t=t),
        "sub": datasets.SubDataset(pair, 1, 4),
        "split": datasets.split_dataset_random(pair, 4, seed=1),
        "concatenated": datasets.ConcatenatedDataset(pair, pair),
    }


def made_iterators() -> dict[str, object]:
    """Iterators in the middle of an epoch, with their next batch."""
    made = {}
    for name, it in {
        "serial": iterators.SerialIterator(list(range(10)), 3),
        "unshuffled": iterators.SerialIterator(list(range(10)), 4, shuffle=False),
    }.items():
        next(it)
        made[name] = it
    return made


def settled_later() -> dict[str, object]:
    """Objects whose classes got settings since: residual blocks, a transform, an iterator with an order sampler."""
    net = models.ResNet(4, (1, 1, 1, 1))
    with net.init_scope():
        net.blocks = dbrdist.ChainList(resnet.Bottleneck(64, 4, 2, 1.0, True), resnet.Basic(16, 16, 1, 1.0))
        net.fc = L.Linear(16, 4)
    x = np.random.default_rng(1).normal(size=(2, 3, 24, 24)).astype(np.float32)
    net(x)
    with dbrdist.using_config("train", False):
        y = net(x).array
    image = np.random.default_rng(2).integers(0, 256, (9, 8, 3), np.uint8)
    augment = datasets.RandAugment(2, 9)
    it = iterators.SerialIterator(list(range(6)), 3, order_sampler=np.roll)
    next(it)
    made = {"resnet": net, "x": x, "y": y, "augment": augment, "image": image, "iterator": pickle.dumps(it)}
    made["augmented"] = augment((image, 0), np.random.default_rng(3))[0]
    made["batches"] = [next(it) for _ in range(4)]
    return made


def names() -> dict[str, list[str]]:
    """The public classes and functions of every module, by the module that defines them."""
    found = {}
    for info in pkgutil.walk_packages(dbrdist.__path__, "dbrdist."):
        if info.name.startswith("dbrdist.compat.__main__"):
            continue
        module = importlib.import_module(info.name)
        found[info.name] = sorted(
            n
            for n, v in vars(module).items()
            if not n.startswith("_")
            and (inspect.isclass(v) or inspect.isfunction(v))
            and getattr(v, "__module__", None) == info.name
        )
    return found


def main(folder: Path) -> None:
    """Write all files into ``folder``."""
    out = {}
    for name, link in links().items():
        out[name] = link
    (folder / "links.pickle").write_bytes(pickle.dumps(out, protocol=4))
    expected = {f"{n}/{k}": p.array for n, link in out.items() for k, p in link.namedparams() if p.is_initialized}
    np.savez_compressed(folder / "links.npz", **expected)
    (folder / "datasets.pickle").write_bytes(pickle.dumps(data(), protocol=4))
    its = made_iterators()
    (folder / "iterators.pickle").write_bytes(pickle.dumps(its, protocol=4))
    batches = {name: [int(i) for i in next(it)] for name, it in its.items()}
    (folder / "settled_later.pickle").write_bytes(pickle.dumps(settled_later(), protocol=4))
    model = L.Linear(3, 2)
    optimizer = optimizers.Adam().setup(model)
    optimizer.add_hook(dbrdist.optimizer_hooks.WeightDecay(0.1))
    for p in model.params():
        p.grad = np.ones_like(p.array)
    optimizer.update()
    (folder / "optimizer.pickle").write_bytes(pickle.dumps(optimizer, protocol=4))
    serializers.save_npz(folder / "optimizer.npz", optimizer)
    lines = ",\n  ".join(f"{json.dumps(module)}: {json.dumps(found)}" for module, found in names().items())
    version, after = json.dumps(dbrdist.__version__), json.dumps(batches)
    facts = f'{{"version": {version}, "batches": {after}, "names": {{\n  {lines}\n}}}}\n'
    (folder / "facts.json").write_text(facts)
    (folder / "config.yaml").write_text(CONFIG)
    for n in (1, 2):
        command = ["dbrdist-train", "config.yaml", f"out=run_of_{n}", "snapshot.keep=1"]
        subprocess.run(["mpiexec", "-n", str(n), *command], check=True, cwd=folder)
        for other in ("report", "log.txt", "summary.json"):  # what names the machine
            path = folder / f"run_of_{n}" / other
            shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
