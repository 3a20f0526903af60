"""Random configurations by a grammar: each runs two steps, or ends with sentences that name file, line and key.

As a program it tries many, each in this process, and prints what it found; the fast suite takes a few of them:

    python tests/cli/random_configurations.py --number 5000 --record
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import yaml

ODD = [None, True, -1, 0, 1, 2, 7.5, 1e-3, 1e300, -1e300, 10**30, "", "yes", "1", "x", "own:nothing", [], {}, [1, "a"]]
OWN = """
import numpy as np
import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers, training
from dbrdist.training import StandardUpdater, make_extension


class Net(dbrdist.Chain):
    def __init__(self, width=4):
        super().__init__()
        with self.init_scope():
            self.bn = L.BatchNormalization(64)
            self.l = L.Linear(64, width)
            self.out = L.Linear(width, 10)

    def forward(self, x):
        return self.out(F.relu(self.l(self.bn(x.reshape(len(x), -1)))))


def broken(**args):
    raise RuntimeError("broken on purpose")


def few(n=12, labels=3):
    rng = np.random.default_rng(0)
    rows = [(rng.standard_normal((1, 8, 8)).astype(np.float32), np.int32(i % labels)) for i in range(n)]
    return rows, rows[: n // 2]


def focal(outputs, labels, gamma=2.0):
    loss = F.softmax_cross_entropy(outputs, labels, reduce="no")
    return F.mean((1 - F.exp(-loss)) ** gamma * loss)


def top(outputs, labels, k=1):
    return float((outputs.array.argmax(1) == labels).mean()) * k


def half(epochs, first=0.1):
    return first * 0.5**epochs


def noise(scale=0.1):
    return lambda example, rng: (example[0] + scale, *example[1:])


def adam(alpha=0.001):
    return optimizers.Adam(alpha)


def count(every=1):
    return make_extension(trigger=(every, "iteration"))(lambda trainer: None)


class Mine(StandardUpdater):
    def __init__(self, iterator, optimizer, converter, device, extra=0):
        super().__init__(iterator, optimizer, converter, input_device=device)
"""


class Grammar:
    """Makes configurations from a seed; about every second one is meant to be right."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.error_rate = self.draw.choice([0.0, 0.0, 0.03, 0.15])

    def some(self, *choices, wrong=()):
        """One of these; now and then something wrong, or odd, in its place."""
        if self.draw.random() < self.error_rate:
            return self.draw.choice([*wrong, *wrong, *ODD])
        return self.draw.choice(choices)

    def keys(self, required=(), **rules):
        """A mapping with some of these keys, each by its own rule; now and then one that nobody knows."""
        made = {key: rule() for key, rule in rules.items() if key in required or self.draw.random() < 0.3}
        if self.draw.random() < self.error_rate:
            made[self.draw.choice(["naem", "lrr", "", "0", "x.y", "args"])] = self.draw.choice(ODD)
        return made

    def component(self, *options):
        """A name, or a mapping with the name and keys; `options` are a name, its rules, and those that it needs."""
        name, rules, *needed = self.draw.choice(options)
        if ":" not in name:
            name = self.draw.choice([name, name, name.title(), name.upper().replace("_", "-")])
        name = self.some(name)
        return name if not needed and self.draw.random() < 0.3 else {"name": name, **self.keys(needed, **rules)}

    def number(self, *values, wrong=()):
        return lambda: self.some(*values, wrong=wrong)

    def wrong(self, option):
        """An option that is wrong by itself, where this configuration has mistakes at all."""
        return [option] if self.draw.random() < self.error_rate else []

    def model(self):
        return self.component(
            ("mlp", {"units": self.number([4], [3, 5], wrong=[[0]]), "dropout": self.number(0, 0.5, 0.99, wrong=[1])}),
            (
                "lenet",
                {
                    "channels": self.number([2, 3]),
                    "units": self.number(4, 8),
                    "num_classes": self.number(12, wrong=[3]),
                },
            ),
            ("own:Net", {"args": self.number({"width": 3}, {}, wrong=[{"wdth": 3}])}),
            *self.wrong(("own:broken", {})),
        )

    def data(self):
        sizes = self.number({"n": 12}, {"n": 4}, {}, wrong=[{"n": 0}, {"n": 1}, {"labels": 40}, {"m": 2}])
        return self.component(
            ("digits", {}),
            ("digits", {}),
            ("own:few", {"args": sizes}),
            *self.wrong(("npz", {"train": self.number("x")})),
        )

    def schedule(self):
        warm = {"warmup_epochs": self.number(0, 0.01, 0.5, wrong=[99]), "warmup_start": self.number(0, 0.1)}
        return self.component(
            ("constant", warm),
            (
                "step",
                {"milestones": self.number([0.01], [0.01, 0.5], wrong=[[2, 1]]), "gamma": self.number(0.1, 2), **warm},
                "milestones",
            ),
            ("exponential", {"gamma": self.number(0.5, 0.9), **warm}, "gamma"),
            ("polynomial", {"power": self.number(1, 2.5), "end": self.number(0, 0.01), **warm}),
            ("cosine", {"end": self.number(0, 0.01), **warm}),
            ("own:half", {"args": self.number({"first": 0.5}, wrong=[{"frist": 1}]), **warm}),
        )

    def hooks(self):
        group = {"only": self.number(["*/W"], ["*"], wrong=[["/nothing"]]), "skip": self.number(["*/b"], [])}
        return [
            self.component(
                ("weight_decay", {"rate": self.number(1e-3, 0), **group}, "rate"),
                ("lasso", {"rate": self.number(1e-3), **group}, "rate"),
                ("gradient_clipping", {"threshold": self.number(1, 0.1)}, "threshold"),
                (
                    "gradient_hard_clipping",
                    {"lower_bound": self.number(-1, wrong=[2]), "upper_bound": self.number(1)},
                    "lower_bound", "upper_bound",
                ),
                ("gradient_noise", {"eta": self.number(0.01)}, "eta"),
                *self.wrong(("own:broken", {})),
            )
            for _ in range(self.draw.choice([0, 1, 1, 2, 3]))
        ]  # fmt: skip

    def optimizer(self):
        more = {"hooks": self.hooks, "schedule": self.schedule}
        rate = self.number(0.01, 0.1, 1e-8)
        return self.component(
            ("sgd", {"lr": rate, **more}),
            ("momentum_sgd", {"lr": rate, "momentum": self.number(0.9, 0), **more}),
            ("adam", {"alpha": rate, "beta1": self.number(0.5), "eps": self.number(1e-8), **more}),
            ("adam", {"lr": rate, "beta1": self.number(0.5), **more}),
            ("lars", {"lr": rate, "skip_vectors": self.number(True, False), **more}),
            ("lamb", {"weight_decay_rate": self.number(0, 0.1), **more}),
            ("rmsprop", {"lr": rate, "alpha": self.number(0.9), **more}),
            ("adadelta", {"rho": self.number(0.5), "hooks": self.hooks}),
            ("own:adam", {"args": self.number({"alpha": 0.1}, wrong=[{"beta": 3}]), **more}),
        )

    def transforms(self):
        def chain(part):
            chance = (
                ()
                if part == "test" and self.draw.random() > self.error_rate
                else (
                    ("random_crop", {"size": self.number(8, 4, wrong=[30]), "padding": self.number(0, 1)}, "size"),
                    ("random_flip", {}),
                )
            )
            return [
                self.component(
                    *chance,
                    ("center_crop", {"size": self.number(8, 4, wrong=[9])}, "size"),
                    (
                        "normalize",
                        {"mean": self.number([0.5]), "std": self.number([0.5], wrong=[[1, 1, 1]])},
                        "mean",
                        "std",
                    ),
                    ("own:noise", {"args": self.number({"scale": 0.5}, wrong=[{"sc": 0}])}),
                )
                for _ in range(self.draw.choice([0, 1, 2]))
            ]

        return self.keys(train=lambda: chain("train"), test=lambda: chain("test"))

    def schedules(self, made):
        """Of numbers that this configuration has."""
        optimizer = made["optimizer"] if isinstance(made["optimizer"], dict) else {}
        keys = ["optimizer.eps"] * (str(optimizer.get("name")).lower() == "adam")
        hooks = optimizer.get("hooks")
        if isinstance(hooks, list):
            keys += [
                f"optimizer.hooks.{i}.rate" for i, hook in enumerate(hooks) if isinstance(hook, dict) and "rate" in hook
            ]
        keys += ["loss_scale"] * isinstance(made.get("loss_scale"), int)
        wrong = ("optimizer.lr", "optimizer.nothing", "x", "optimizer.hooks.9.rate")
        return [{"of": self.some(key, wrong=wrong), "schedule": self.schedule()} for key in keys]

    def period(self):
        return self.some("1 epoch", "0.5 epochs", "2 iterations", wrong=["often", "-1 epoch", "1 minute"])

    def ways(self):
        """Rules of the keys that change how gradients become updates: one, or several that do not go together."""
        rules = {
            "zero": self.number(0, 1, 2, wrong=[3]),
            "compression": lambda: self.component(
                ("none", {}),
                ("power_sgd", {"rank": self.number(1, 4, wrong=[0])}),
                ("top_k", {"fraction": self.number(0.1, 1.0, wrong=[0, 1.5])}),
            ),
            "local_steps": self.number(1, 2, wrong=[0]),
            "double_buffering": self.number(True, False),
        }
        chosen = rules if self.draw.random() < self.error_rate else [self.draw.choice(list(rules))]
        more = {"accumulate": self.number(1, 2, wrong=[0]), "parameter_audit": self.period}
        return {key: rules[key] for key in chosen} | more

    def config(self):
        """One configuration as plain data."""
        virtual = {"virtual_workers": 2, "per_worker": 2}
        batch = self.some(2, 4, 5, virtual, wrong=[virtual])
        made = {
            "model": self.model(),
            "data": self.data(),
            "batch": batch,
            "epochs": self.some(1, 2.5),
            "optimizer": self.optimizer(),
            **self.keys(
                loss=lambda: self.component(
                    ("softmax_cross_entropy", {"label_smoothing": self.number(0, 0.1)}),
                    ("own:focal", {"args": self.number({"gamma": 1.0}, wrong=[{"g": 1}])}),
                    *self.wrong(("mean_squared_error", {})),
                    *self.wrong(("model", {})),
                ),
                transforms=self.transforms,
                ema=self.number(0.9, {"decay": 0.5, "warmup": False}, wrong=[1.0]),
                seed=self.number(0, 3, 2**62),
                dtype=self.number("float32", "float64", "float16", "mixed16", "bfloat16"),
                loss_scale=self.number("auto", 8, wrong=[1e6]),
                metrics=self.number(["own:top"], [{"name": "own:top", "args": {"k": 2}}], wrong=[["own:nothing"]]),
                extensions=self.number(["own:count"], [{"name": "own:count", "every": "1 iteration"}]),
                init_from=self.number(None, wrong=["nowhere.npz", {"path": "run.yaml", "skip": ["l"]}]),
                extends=self.number("base.yaml", wrong=["run.yaml", "nowhere.yaml"]),
                threads=self.number(0, 1),
                communicator=self.number("auto", wrong=["pure_nccl", "dummy"]),
                **self.ways(),
                evaluation=lambda: self.keys(every=self.period, batch=self.number(3, 100)),
                snapshot=lambda: self.keys(
                    every=self.number("1 epoch", "1 minute", "1 epoch or 1 second"), keep=self.number(1, 2),
                    best=self.number("main/loss", "validation/main/loss", wrong=["validation/x"]),
                    mode=self.number("auto", "max"),
                ),
                log=lambda: self.keys(every=self.period, tensorboard=self.number(True, False)),
            ),
        }  # fmt: skip
        if self.draw.random() < 0.2:
            made["updater"] = self.some("own:Mine", {"name": "own:Mine", "args": {"extra": 1}}, wrong=["own:half"])
            made["batch"] = self.some(4)
        if made["batch"] == virtual:
            made |= self.keys(reproducible=self.number(True, False))
        if self.draw.random() < 0.3:
            made["schedules"] = self.schedules(made)
        for key in list(made):
            if self.draw.random() < self.error_rate / 3:
                del made[key]
        return made


SENTENCE = re.compile(r"(?:[\w./]+\.(?:yaml|py):\d+:\d+|command line '[^']*'|run\.yaml|base\.yaml)(?:: [\w.*²]+)*: \S")


def judge(code: int, err: str) -> str | None:
    """What is wrong with an ending; None for a run of two steps, and for sentences that name file, line and key."""
    if "Traceback" in err:
        return "a traceback"
    if code == 0:
        return None
    lines = [line for line in err.splitlines() if line and not line.startswith("dbrdist: ")]
    if code == 2 and lines and all(SENTENCE.match(line) for line in lines):
        return None
    if code == 1 and "NonFiniteLossError" in err:  # the loss of a wild learning rate is a fact of the run
        return None
    return f"code {code}"


def attempt(seed: int, call) -> tuple[str, str | None, str]:
    """Write the configuration of a seed here, and run it: its kind of ending, what is wrong, and what was said."""
    text = yaml.safe_dump(Grammar(seed).config(), sort_keys=False)
    Path("run.yaml").write_text(text)
    Path("base.yaml").write_text("seed: 5\noptimizer: {name: adam}\nlog: {every: 1 epoch}\n")
    shutil.rmtree("result", ignore_errors=True)
    code, err = call("run.yaml", "iterations=2", "workers=0")
    wrong = judge(code, err)
    return {0: "ran", 1: "not finite", 2: "refused"}.get(code, f"code {code}"), wrong, f"seed {seed}\n{text}\n{err}"


# ---- as a program ----------------------------------------------------------------------------------------------------


def _call(*words):
    from dbrdist.cli import train
    from dbrdist.errors import NonFiniteLossError

    read, write = os.pipe()
    kept = os.dup(2)
    os.dup2(write, 2)
    sys.argv = ["dbrdist-train", *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = train._main()
    except NonFiniteLossError as error:
        code, words = 1, f"NonFiniteLossError: {error}"
        os.write(2, words.encode())
    except BaseException:
        code = 99
        os.write(2, traceback.format_exc().encode()[-60_000:])
    finally:
        os.dup2(kept, 2)
        os.close(write)
        os.close(kept)
    with os.fdopen(read, "rb") as file:
        return code, file.read().decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--number", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    words = sys.argv
    root, began = Path(__file__).resolve().parents[2], time.time()
    endings: Counter[str] = Counter()
    faults = []
    import dbrdist
    from dbrdist.core.array import random as streams

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("own.py").write_text(OWN)
        handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
        for seed in range(args.first, args.first + args.number):
            dbrdist.global_config.dtype = "float32"
            streams.set_seed(0)
            ending, wrong, said = attempt(seed, _call)
            endings[ending] += 1
            if wrong:
                faults.append({"wrong": wrong, "said": said})
                print(f"---- {wrong}: {said}", flush=True)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        os.chdir(root)
    sys.argv = words
    print(dict(endings), f"{len(faults)} faults in {time.time() - began:.0f} s")
    if args.record:
        sys.path.insert(0, str(root / "benchmarks"))
        import harness

        settings = {"number": args.number, "first": args.first}
        print(harness.record("random-configurations", settings, {"endings": endings, "faults": faults}))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
