"""Hooks of functions, links and optimizers, in a loop written by hand."""

import io

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import function_hooks, optimizers
from chainer import link_hook as link_hook_module
from chainer.function_hook import FunctionHook
from chainer.optimizer_hooks import gradient_clipping


class CountingHook(FunctionHook):
    name = "CountingHook"

    def __init__(self):
        self.forwards = 0
        self.backwards = 0

    def forward_postprocess(self, function, in_data):
        self.forwards += 1

    def backward_postprocess(self, function, in_data, out_grad):
        self.backwards += 1


class ShapeHook(link_hook_module.LinkHook):
    name = "ShapeHook"

    def __init__(self):
        self.shapes = []

    def forward_postprocess(self, args):
        if isinstance(args.link, L.Linear):
            self.shapes.append((args.link.name, args.out.shape))


class Net(chainer.Chain):
    def __init__(self):
        super(Net, self).__init__()
        with self.init_scope():
            self.fc1 = L.Linear(3, 5)
            self.fc2 = L.Linear(5, 1)

    def __call__(self, x):
        return self.fc2(F.tanh(self.fc1(x)))


def main():
    model = Net()
    optimizer = optimizers.MomentumSGD(lr=0.05)
    optimizer.setup(model)
    optimizer.add_hook(gradient_clipping.GradientClipping(1.0))
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-5), name="decay")
    x = np.linspace(-1, 1, 30, dtype="f").reshape(10, 3)
    t = np.sin(x.sum(axis=1, keepdims=True))

    counting, timer, shapes = CountingHook(), function_hooks.TimerHook(), ShapeHook()
    first = last = None
    with counting, timer, shapes:
        for _ in range(60):
            loss = F.mean_squared_error(model(x), t)
            model.cleargrads()
            loss.backward()
            optimizer.update()
            last = float(loss.array)
            first = last if first is None else first
    assert last < first * 0.5, (first, last)
    assert counting.forwards > 0 and counting.backwards > 0
    assert shapes.shapes[:2] == [("fc1", (10, 5)), ("fc2", (10, 1))]

    text = io.StringIO()
    timer.print_report(file=text)
    lines = text.getvalue().splitlines()
    assert lines[0].split() == ["FunctionName", "ElapsedTime", "Occurrence"], lines
    assert timer.total_time() > 0
    summary = timer.summary()
    assert all(row["occurrence"] % 60 == 0 for row in summary.values()), summary
    text = io.StringIO()
    with function_hooks.PrintHook(file=text):
        F.relu(chainer.Variable(x[:1]))
    assert text.getvalue().startswith("function\t"), text.getvalue()
    print("all hooks were called")


if __name__ == "__main__":
    main()
