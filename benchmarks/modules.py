"""Where a training step spends its bytecode, module by module: what is worth compiling (pyproject.toml).

Counts the instructions of the interpreter in one step of four small networks, which no load of the machine changes, and
the seconds of one core that each module takes to compile, as far as Cython is installed (``pip install cython
setuptools``).

    python benchmarks/modules.py
"""

from __future__ import annotations

import collections
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers
from dbrdist.models import ResNet20

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def step_of(model: Any, optimizer: Any, loss: Callable[[], Any]) -> Callable[[], None]:
    """A full step: forward, backward, update."""
    optimizer.setup(model)

    def step() -> None:
        y = loss()
        model.cleargrads()
        y.backward()
        optimizer.update()

    return step


def mlp(optimizer: Any) -> Callable[[], None]:
    """The network of benchmarks/overhead.py."""
    model = dbrdist.Sequential(L.Linear(8, 8), F.relu, L.Linear(8, 8), F.relu, L.Linear(8, 8))
    x, t = np.ones((8, 8), np.float32), np.arange(8)
    return step_of(model, optimizer, lambda: F.softmax_cross_entropy(model(x), t))


def resnet() -> Callable[[], None]:
    """ResNet-20 on one image of 8x8."""
    model, x, t = ResNet20(10), np.ones((1, 3, 8, 8), np.float32), np.zeros(1, int)
    return step_of(model, optimizers.MomentumSGD(0.01), lambda: F.softmax_cross_entropy(model(x), t))


def gates() -> Callable[[], None]:
    """Arithmetic, activations, splitting and joining, dropout, as in a recurrent cell."""
    model = dbrdist.ChainList(L.Linear(8, 16), L.Linear(8, 4))
    x, t = np.ones((8, 8), np.float32), np.zeros((8, 4), np.float32)

    def loss() -> Any:
        a, b = F.split_axis(F.dropout(model[0](x), 0.2), 2, 1)
        h = F.tanh(a) * F.sigmoid(b) + x
        return F.mean_squared_error(model[1](F.concat([h[:, :4], F.exp(-h[:, 4:])])), t)

    return step_of(model, optimizers.Adam(), loss)


def count(step: Callable[[], None]) -> dict[str, float]:
    """Per cent of the step's instructions, for each module of dbrdist."""
    counts: collections.Counter[str] = collections.Counter()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename.rpartition("/dbrdist/")[2]
        if event == "call" and name == frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counts[name] += event == "opcode"
        return trace

    for _ in range(3):  # shapes, plans and memory are there afterwards
        step()
    sys.settrace(trace)
    step()
    sys.settrace(None)
    return {name: 100 * n / counts.total() for name, n in counts.items()}


def seconds_to_compile(name: str) -> float | None:
    """Seconds of processor time; None without Cython."""
    try:
        from hatch_build import compiled
    except ImportError:
        return None
    before = [sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    with tempfile.TemporaryDirectory() as directory:
        compiled(str(ROOT), [f"dbrdist/{name}"], Path(directory))
    after = [sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(after) - sum(before)


def main() -> None:
    steps = {
        "MLP": mlp(optimizers.MomentumSGD(0.01)),
        "MLP, Adam": mlp(optimizers.Adam()),
        "ResNet-20": resnet(),
        "gates": gates(),
    }
    found = {name: count(step) for name, step in steps.items()}
    modules = sorted({m for c in found.values() for m in c}, key=lambda m: -sum(c.get(m, 0) for c in found.values()))
    print(
        f"{'module':36}",
        *(f"{name:>10}" for name in found),
        f"{'seconds':>10}",
    )
    for module in modules:
        seconds = seconds_to_compile(module)
        shown = "-" if seconds is None else f"{seconds:.1f}"
        print(f"{module:36}", *(f"{c.get(module, 0):9.1f}%" for c in found.values()), f"{shown:>10}", flush=True)


if __name__ == "__main__":
    main()
