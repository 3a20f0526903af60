"""The LSTM language models of examples/text against the same models in PyTorch: what both reach by the same training.

Both start from the same values and see the same batches. Goal: bits per character and perplexity within 2 % of PyTorch.

    python benchmarks/language_models.py char tinyshakespeare.txt --torch-python TORCH_VENV/bin/python --record
    python benchmarks/language_models.py ptb ptb.train.txt ptb.test.txt --torch-python TORCH_VENV/bin/python --record
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import harness
import numpy as np

EXAMPLES = {"char": "char_lstm", "ptb": "ptb_lstm"}


def example(name: str) -> Any:
    """The example as a module."""
    path = harness.ROOT / "examples" / "text" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_dbrdist(kind: str, texts: list[str], epochs: int, folder: str) -> float:
    """Run the example. Its first act, making the model from seed 0, is done before, to keep the initial values."""
    from dbrdist import random, serializers

    module = example(EXAMPLES[kind])
    random.set_seed(0)
    if kind == "char":
        with open(texts[0], encoding="utf-8") as f:
            model = module.CharLSTM(len(set(f.read())), 128)
        words = ["--sample", "0"]
    else:
        vocabulary = {"<unk>": 0}
        module.read(texts[0], vocabulary, grow=True)
        model = module.WordLSTM(len(vocabulary), 200)
        words = ["--out", folder]
    serializers.save_npz(os.path.join(folder, "initial.npz"), model)
    return float(module.main([*texts, "--epochs", str(epochs), *words]))


def torch_model(initial: Any, dropout: float) -> Any:
    """Embedding, LSTM and linear layer with these values of dbrdist's model; the gates stand in the same order."""
    import torch

    size, units = initial["embed/W"].shape
    layers = len({name.split("/")[1] for name in initial.files if name.startswith("rnn/")})

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = torch.nn.Embedding(size, units), torch.nn.Linear(units, size)
            self.rnn = torch.nn.LSTM(units, units, layers, dropout=dropout)
            self.drop = torch.nn.Dropout(dropout)

        def forward(self, x: Any, state: Any) -> Any:
            y, state = self.rnn(self.drop(self.embed(x)), state)
            return self.out(self.drop(y)).flatten(0, 1), tuple(s.detach() for s in state)

    def four(prefix: str, first: int) -> Any:
        return torch.from_numpy(np.concatenate([initial[f"{prefix}{i}"] for i in range(first, first + 4)]))

    values = {"embed.weight": initial["embed/W"], "out.weight": initial["out/W"], "out.bias": initial["out/b"]}
    state = {name: torch.from_numpy(value) for name, value in values.items()}
    for i in range(layers):
        state[f"rnn.weight_ih_l{i}"], state[f"rnn.weight_hh_l{i}"] = four(f"rnn/{i}/w", 0), four(f"rnn/{i}/w", 4)
        state[f"rnn.bias_ih_l{i}"], state[f"rnn.bias_hh_l{i}"] = four(f"rnn/{i}/b", 0), four(f"rnn/{i}/b", 4)
    model = Model()
    model.load_state_dict(state)
    return model


def with_torch(kind: str, texts: list[str], epochs: int, folder: str) -> float:
    """The same training, written with PyTorch; the texts are read and cut by the example's own functions."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = example(EXAMPLES[kind])
    batch, steps = (32, 64) if kind == "char" else (20, 35)
    if kind == "char":
        with open(texts[0], encoding="utf-8") as f:
            text = f.read()
        characters = sorted(set(text))
        ids = np.array([characters.index(c) for c in text])
        train, test = np.split(ids, [len(ids) * 9 // 10])
    else:
        vocabulary = {"<unk>": 0}
        train, test = module.read(texts[0], vocabulary, True), module.read(texts[1], vocabulary, False)
    model = torch_model(np.load(os.path.join(folder, "initial.npz")), 0.0 if kind == "char" else 0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def walk(ids: Any, batch: int, steps: int, update: bool) -> float:
        state, nats, count = None, 0.0, 0
        model.train(update)
        for x, t in example(EXAMPLES["char"]).windows(ids.astype(np.int64), batch, steps):
            with torch.set_grad_enabled(update):
                y, state = model(torch.tensor(x), state)
                loss = torch.nn.functional.cross_entropy(y, torch.tensor(t).flatten())
            if update:
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
            nats, count = nats + loss.item() * t.size, count + t.size
        return nats / count

    for epoch in range(1, epochs + 1):
        losses = walk(train, batch, steps, True), walk(test, *((50, 200) if kind == "char" else (20, 35)), False)
        print(epoch, *losses, flush=True)
    return losses[1] / float(np.log(2)) if kind == "char" else float(np.exp(losses[1]))


def ask(python: str, side: str, words: list[str], folder: str) -> dict[str, Any]:
    """One side in a process of its own, with its results."""
    paths = os.pathsep.join([str(harness.ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([python, __file__, *words, "--worker", side, "--folder", folder], check=True, env=env)
    with open(os.path.join(folder, f"{side}.json")) as f:
        return dict(json.load(f))


def work(args: argparse.Namespace) -> None:
    """What a process of one side does."""
    start = time.process_time()
    train = with_dbrdist if args.worker == "dbrdist" else with_torch
    found = {"figure": train(args.kind, args.texts, args.epochs, args.folder)}
    found["cpu_seconds"] = time.process_time() - start
    versions = {n: sys.modules[n].__version__ for n in ("numpy", "torch", "dbrdist") if n in sys.modules}
    with open(os.path.join(args.folder, f"{args.worker}.json"), "w") as f:
        json.dump({**found, "versions": versions}, f)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=list(EXAMPLES))
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter of an environment that has PyTorch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=["dbrdist", "torch"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.worker:
        work(args)
        return
    words = [args.kind, *args.texts, "--epochs", str(args.epochs)]
    with tempfile.TemporaryDirectory() as folder:
        ours = ask(sys.executable, "dbrdist", words, folder)
        theirs = ask(args.torch_python, "torch", words, folder)
    about = {"dbrdist": ours.pop("versions"), "torch": theirs.pop("versions")}
    unit = "bits per character" if args.kind == "char" else "perplexity"
    results = {"unit": unit, "dbrdist": ours, "torch": theirs, "ratio": ours["figure"] / theirs["figure"]}
    print(f"{unit}: dbrdist {ours['figure']:.4g}, PyTorch {theirs['figure']:.4g}, ratio {results['ratio']:.4f}")
    if args.record:
        texts = [os.path.basename(path) for path in args.texts]
        print(harness.record(f"language-model-{args.kind}", {"texts": texts, "epochs": args.epochs}, results, about))


if __name__ == "__main__":
    main()
