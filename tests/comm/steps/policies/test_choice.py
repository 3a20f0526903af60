"""Each setting has its policy; one rank has one of its own."""

from types import SimpleNamespace

from dbrdist import optimizers
from dbrdist.comm import create_communicator
from dbrdist.comm.gradients.compression import TopK
from dbrdist.comm.steps.policies.all_ranks import AllRanks
from dbrdist.comm.steps.policies.choice import policy_for
from dbrdist.comm.steps.policies.compressed import Compressed
from dbrdist.comm.steps.policies.delayed import Delayed
from dbrdist.comm.steps.policies.local import Local
from dbrdist.comm.steps.policies.one_rank import OneRank
from dbrdist.comm.steps.policies.sharded import Sharded
from dbrdist.comm.steps.step_options import StepOptions
from dbrdist.core.names.exclusions import SENDING
from tests.each import each

KINDS = {
    "zero": (1, Sharded), "compression": (TopK(0.5), Compressed), "local_steps": (2, Local),
    "double_buffering": (True, Delayed), "accumulate": (3, AllRanks),
}  # fmt: skip


@each(option=[*KINDS, None], size=[1, 2])
def test_each_setting_has_its_policy(option, size):
    value, kind = KINDS.get(option, (None, AllRanks))
    way = StepOptions(**({} if option is None else {option: value}))
    comm = create_communicator("single")
    found = policy_for(SimpleNamespace(size=size, rank=0), optimizers.SGD(), True, way, None, None)
    assert type(found) is (OneRank if size == 1 else kind) and found.way is way and comm.size == 1


def test_every_way_of_sending_is_listed():
    assert {*SENDING, "accumulate"} == set(KINDS)
