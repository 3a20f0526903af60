"""Policies by themselves, with stand-ins for what is around them."""

from types import SimpleNamespace

from dbrdist import optimizers
from dbrdist.comm import create_communicator
from dbrdist.comm.steps.header import Steps
from dbrdist.comm.steps.step_options import StepOptions
from dbrdist.comm.steps.step_state import StepState
from tests.comm.training_contract import Net, batches


def policy_of(kind, zero_fill=True, **options):
    """A policy on one rank, of a small net whose parameters have their shapes."""
    model = Net()
    model(*next(batches(1)))
    comm, way = create_communicator("single"), StepOptions(**options)
    actual = optimizers.SGD(lr=0.5).setup(model)
    headers = Steps(comm, actual, way.words())
    headers.look()
    return kind(comm, actual, zero_fill, way, headers, StepState(comm, way))


def work(lossfun=None, *args, num_samples=3):
    return lossfun, args, {}, num_samples


class Headers:
    """Headers as given; verbs are those of one rank."""

    place, late = ("x.py", 1), ()

    def __init__(self, comm, header=None, plan="plan", is_small=False, overlap=None):
        self.comm, self.header, self.found, self.listener = comm, header, plan, overlap
        self.is_small, self.small_plan = lambda: is_small, None
        self.added, self.asked, self.posted, self.broken = [], [], [], []
        self.shown_plan = lambda: SimpleNamespace(
            add_up=lambda call, enclosed, *weights: self.added.append((enclosed, weights))
        )

    def exchange(self, call, *args):
        self.asked.append(args)
        call.enclosed = "enclosed"
        return self.header

    def post(self, *args):
        self.posted.append(args)

    def meet(self):
        return self.comm.gate.call("update")

    def wait(self, call):
        return self.header

    def wait_early(self):
        self.waited = True

    def poll(self):
        return self.header

    def plan(self):
        return self.found

    def overlap(self, division):
        return self.listener

    def break_off(self, error):
        self.broken.append(error)


def header_of(is_enclosed=False, same_runs=True, is_placed=True, stale=(), places=(5, 5)):
    return SimpleNamespace(
        is_enclosed=is_enclosed, same_runs=same_runs, is_placed=is_placed, known_weights=None,
        weights=lambda: ([0.5], 2.0), counts=(3,), stale=list(stale), places=places,
    )  # fmt: skip
