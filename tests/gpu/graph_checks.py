"""What captured steps of several ranks must do under pure_nccl; see programs/graph_ranks.py."""

import os
import re
import sys
import time
import warnings

import capture
import clocks
import numpy as np
import stand_in_nccl

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, Reporter, kernels, report, using_config
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.functions.normalization import multi_node_batch_normalization
from dbrdist.comm.gradients import stream_overlap
from dbrdist.core.array import backend, random, spans
from dbrdist.errors import UsageWarning
from dbrdist.iterators import SerialIterator
from dbrdist.kernels.gpu import cublaslt
from dbrdist.optimizers import SGD, Adam, MomentumSGD
from dbrdist.optimizers.hooks import GradientClipping, WeightDecay
from dbrdist.training import StandardUpdater, graph_of_joint_step


class Net(Chain):
    """Linear layers, normalization and dropout, and one parameter that the loss never reaches."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.unused = L.Linear(3, 3)
            self.first, self.bn, self.second = L.Linear(6, 16), L.BatchNormalization(16), L.Linear(16, 5)

    def forward(self, x, t):
        h = F.dropout(F.relu(self.bn(self.first(x))), 0.3)
        loss = F.softmax_cross_entropy(self.second(h), t)
        report({"loss": loss}, self)
        return loss


class Reads(Net):
    """A step that cannot be captured."""

    def forward(self, x, t):
        loss = super().forward(x, t)
        assert float(loss.array) < 1e9
        return loss


class Meets(Net):
    """Ranks communicate within the forward pass."""

    comm = None

    def forward(self, x, t):
        loss = super().forward(x, t)
        return loss + 0.0 * self.comm.allreduce(loss.array)


class Together(Net):
    """Batch normalization over ranks."""

    comm = None

    def forward(self, x, t):
        h = multi_node_batch_normalization(self.comm, self.first(x), self.bn.gamma, self.bn.beta)
        loss = F.softmax_cross_entropy(self.second(h), t)
        report({"loss": loss}, self)
        return loss


class Uneven(Net):
    """A layer that is used on rank 0 alone."""

    comm = None

    def forward(self, x, t):
        loss = super().forward(x, t)
        return loss if self.comm.rank else loss + F.sum(self.unused(x[:, :3]) ** 2)


class Data(SerialIterator):
    """Batches of this rank, of the sizes that ``sizes(step)`` gives."""

    sizes, step = staticmethod(lambda step: 4), 0

    def next(self):
        batch = super().next()[: self.sizes(self.step)]
        self.step += 1
        return batch


def data_of(comm, dtype):
    numbers = np.random.default_rng(7 + comm.rank)
    return [(numbers.standard_normal(6).astype(dtype), np.int32(numbers.integers(5))) for _ in range(20)]


def train(comm, device, capture, steps=6, make=Net, optimizer=Adam, mode="float32", sizes=None, hooks=(), each=None,
          scale=None, **config):  # fmt: skip
    """What this rank has after some steps: parameters, states, statistics, reports, counts; and its updater."""
    random.set_seed(3)
    for name, value in {"overlap": True, "allreduce_grad_dtype": None, **config}.items():
        comm.set_config(name, value)
    with using_config("dtype", mode if mode == "mixed16" else np.dtype(mode)):
        net = make() if device is None else make().to_device(device)
        net.comm = comm
        own = create_multi_node_optimizer(optimizer(), comm).setup(net)
        for hook in hooks:
            own.add_hook(hook)
        if scale == "dynamic":
            own.loss_scaling(interval=3)
        iterator = Data(data_of(comm, np.float16 if mode == "mixed16" else mode), 4, seed=1)
        iterator.sizes = sizes or iterator.sizes
        updater = StandardUpdater(iterator, own, device=device, capture=capture)
        reporter, losses = Reporter(), []
        reporter.add_observer("main", net)
        for k in range(steps):
            own.hyperparam.put("alpha" if optimizer is Adam else "lr", 0.05 / (1 + k % 5))
            if each is not None:
                each(k, net, own, updater)
            with reporter.scope({}):
                updater.update()
                losses += [float(backend.to_cpu(v)) for v in reporter.observation.values()]
    found = {n: backend.to_cpu(p.lend()) for n, p in net.namedparams()}
    found |= {f"gradient of {n}": backend.to_cpu(p.grad) for n, p in net.namedparams() if p.grad is not None}
    for n, p in net.namedparams():
        found |= {f"{n}: {k}": backend.to_cpu(v) for k, v in (p.update_rule.state or {}).items()}
    found |= {f"bn {n}": backend.to_cpu(getattr(net.bn, n)) for n in ("avg_mean", "avg_var")}
    counts = [own.t, *[p.update_rule.t for _, p in sorted(net.namedparams())], own.actual_optimizer.loss_scale or 0.0]
    return {**found, "losses": np.array(losses), "counts": np.array(counts)}, updater


def both(comm, device, num_graphs=1, wanted=True, are_alike=True, **options):
    """The same bits with graphs as without; returns what was warned of, and the updater with graphs."""
    num_calls = [len(stand_in_nccl.calls)]
    eager, _ = train(comm, device, False, **options)
    num_calls.append(len(stand_in_nccl.calls))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        captured, updater = train(comm, device, wanted, **options)
    num_calls.append(len(stand_in_nccl.calls))
    assert num_calls[2] - num_calls[1] == num_calls[1] - num_calls[0], "replays reduce as eager steps do"
    assert captured.keys() == eager.keys()
    for name in eager:
        np.testing.assert_array_equal(captured[name], eager[name], name)
    if num_graphs is not None and wanted:
        assert updater._captured.num_graphs == num_graphs, (comm.rank, updater._captured.num_graphs)
    same = comm.allgather_obj({n: a.tobytes() for n, a in captured.items() if n.startswith("/")})
    assert not are_alike or all(theirs == same[0] for theirs in same)
    return [str(w.message) for w in said if w.category is UsageWarning and "CUDA graph" in str(w.message)], updater


def check_many_steps(comm, device):
    """60 steps of a dynamic loss scale, dropout, a schedule and running statistics, cut at each bucket."""
    launched, launch = [], capture.Graph.launch

    def noting(graph, stream=None):
        launched.append(len(stand_in_nccl.calls))
        launch(graph, stream)

    def each(k, *args):
        if k % 10 == 7 and comm.rank == comm.size - 1:
            time.sleep(0.02)  # others wait for this rank before they launch all of backward

    capture.Graph.launch = noting
    said, updater = both(comm, device, steps=50, scale="dynamic", each=each)
    capture.Graph.launch = launch
    [step] = updater._captured._steps.values()
    num = len(step.graphs)
    assert not said and num >= 5 and len(launched) == 46 * num, (said, num, len(launched))
    for k in range(0, len(launched), num):  # buckets begin between the parts, all of them before the last
        started = np.subtract(launched[k : k + num], launched[k])
        assert started[1] == 1 and started[-2] == started[-1] == 5, started


def check_kinds(comm, device):
    both(comm, device, optimizer=MomentumSGD, hooks=(GradientClipping(0.1), WeightDecay(1e-2)))
    both(comm, device, mode="mixed16", scale="dynamic", steps=7)
    hooks = WeightDecay(0.1), GradientClipping(0.1)
    both(comm, device, make=Uneven, optimizer=SGD, overlap=False, allreduce_grad_dtype="bfloat16", hooks=hooks)
    both(comm, device, make=Uneven, allreduce_grad_dtype="float16")


def check_other_batches(comm, device):
    """Ranks whose batches differ, among themselves and from step to step: each replays what it has captured."""
    last = comm.rank == comm.size - 1
    said, updater = both(comm, device, None, steps=12, sizes=lambda step: 2 if last and step % 2 else 3 + comm.rank % 2)
    assert not said and updater._captured.num_graphs == 1 + last


def check_some_eager(comm, device):
    """One rank whose step cannot be captured, and one that wants no graphs: the others replay."""
    last = comm.size > 1 and comm.rank == comm.size - 1
    said, _ = both(comm, device, 1 - last, make=Reads if last else Net)
    assert len(said) == last and all("a read or a wait of the host" in words for words in said), said
    both(comm, device, wanted=not last)


def check_meetings(comm, device):
    """A forward pass in which ranks meet is not captured, and no rank is left waiting."""
    said, _ = both(comm, device, 0 if comm.size > 1 else None, make=Meets)
    assert comm.size == 1 or re.search("it calls allreduce of a communicator.*in forward", *said), said
    said, _ = both(comm, device, 0, make=Together)
    assert re.search("batch normalization over ranks reads their sums on the host.*in forward", *said), said


def check_changes(comm, device):
    """Frozen layers, evaluation, cleared gradients, a snapshot, and hooks that come between steps."""

    def each(k, net, optimizer, updater):
        if k in (6, 13):
            (net.first.disable_update if k == 6 else net.first.enable_update)()
        if k in (5, 11):
            net.cleargrads()
        if k % 4 == 3:
            with using_config("train", False):
                net(*[put(device, a) for a in (np.ones((3, 6), np.float32), np.zeros(3, np.int32))])

    both(comm, device, steps=18, each=each)
    said, _ = both(comm, device, 0 if comm.size > 1 else None, each=lambda k, net, o, u: setattr(o, "zero_fill", False))
    assert comm.size == 1 or ["zero_fill=False" in words for words in said] == [True] * (comm.rank == 0)


def check_spans(comm, device):
    """A trace shows the same of replayed steps as of eager ones."""
    for is_captured in (False, True):
        recorder = spans.Recorder()
        spans.record(recorder)
        train(comm, device, is_captured, steps=8)
        spans.record(None)
        names = [{s.name for s in recorder.spans if s.step == step} for step in (3, 7)]
        wanted = {"step", "data wait", "forward", "backward", "exposed wait", "update"}
        assert all(wanted <= found for found in names), names


def check_interrupted(comm, device):
    """Between two parts of its capture: no part is left, and the step is captured later."""
    cut = graph_of_joint_step.GraphOfJointStep._cut

    def interrupt(step):
        cut(step)
        graph_of_joint_step.GraphOfJointStep._cut = cut
        raise KeyboardInterrupt

    def each(k, net, optimizer, updater):
        if k != 4:
            return
        if updater._captured is None:
            updater.get_iterator("main").next()
            return
        graph_of_joint_step.GraphOfJointStep._cut = interrupt
        try:
            updater.update()
        except KeyboardInterrupt:
            return
        raise AssertionError("not captured")

    said, _ = both(comm, device, each=each)
    assert not said


def check_one_on_the_host(comm, device):
    """The last rank's model is in host memory: all gradients go there, and no rank replays."""
    device = None if comm.rank and comm.rank == comm.size - 1 else device
    said, _ = both(comm, device, 0 if comm.size > 1 else None, steps=10, are_alike=False)
    words = "not on the GPU that it uses for NCCL"
    assert comm.size == 1 or [words in line for line in said] == [True] * (comm.rank == 0), said


def put(device, a):
    return backend.to_device(a, device)


def check_refused(comm, device):
    """Communicators that stage gradients through host memory, and options that need the host in each step."""
    flat = create_communicator("flat")
    said, _ = both(flat, device, 0 if comm.size > 1 else None)
    words = "FlatCommunicator sends gradients through host memory"
    assert comm.size == 1 or [words in line for line in said] == [True] * (comm.rank == 0), said
    flat.finalize()


def check_events(comm, device):
    """Without the events that order streams, replays race."""
    for name in ("here", "join"):
        other = create_communicator("pure_nccl")
        before = getattr(stream_overlap.SideStream, name)

        def each(k, net, optimizer, updater, name=name):
            if k == 5:
                setattr(stream_overlap.SideStream, name, lambda side: side.stream)

        try:
            train(other, device, True, each=each)
        except clocks.Race:
            pass
        else:
            raise AssertionError(f"no race without {name}")
        setattr(stream_overlap.SideStream, name, before)


def fails(comm, device):
    """The last rank raises in the forward pass of the step that is captured."""

    class Fails(Net):
        calls = 0

        def forward(self, x, t):
            Fails.calls += 1
            if Fails.calls > 3 and comm.rank == comm.size - 1:
                raise KeyError("mine")
            return super().forward(x, t)

    train(comm, device, True, make=Fails)


def leaves(comm, device):
    """The last rank ends after some replays."""

    def each(k, net, optimizer, updater):
        if k == 6 and comm.rank == comm.size - 1:
            sys.exit(3)

    train(comm, device, True, steps=9, each=each)


def main():
    rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    os.environ["STAND_IN_BUS"] = str(rank)
    device = backend.get_device("@cupy:0")
    device.use()
    comm = create_communicator("pure_nccl")
    stream_overlap.StreamOverlap.__init__.__defaults__ = (256,)
    backend.capturing.product = cublaslt.serve  # in eager steps, too
    with kernels.use("cuda", "cudnn"), using_config("cudnn_deterministic", True):
        for check in [globals()[name] for name in sys.argv[2:]] or CHECKS:
            check(comm, device)
    comm.finalize()
    print("all right", comm.rank, flush=True)


CHECKS = (
    check_many_steps, check_kinds, check_other_batches, check_some_eager, check_meetings, check_changes, check_refused,
    check_events, check_spans, check_interrupted, check_one_on_the_host,
)  # fmt: skip
main()
