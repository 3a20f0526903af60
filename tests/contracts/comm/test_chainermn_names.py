"""ChainerMN's iterators, extensions and checkpoints, on ranks that are threads."""

import pytest

from dbrdist.comm import create_communicator, run_threads
from dbrdist.comm.run.extensions import create_multi_node_checkpointer
from tests.comm import chainermn_contract
from tests.each import each


@pytest.mark.parametrize("check", chainermn_contract.CHECKS, ids=chainermn_contract.by_name)
@pytest.mark.filterwarnings(chainermn_contract.DAMAGE_IS_MEANT)
@each(num_ranks=[1, 3])
def test_chainermn_names_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)


def test_a_damaged_checkpoint_is_told(tmp_path):
    comm = create_communicator("single")
    saver = create_multi_node_checkpointer("n", comm, path=tmp_path)
    trainer, _, _ = chainermn_contract.trainer_of(comm, tmp_path, 1)
    trainer.extend(saver, trigger=(1, "iteration"))
    trainer.run()
    (tmp_path / "snapshot_n_0_1").write_text("damage")
    with pytest.warns(UserWarning) as caught:
        assert saver.maybe_load(trainer) is False
    texts = [str(w.message) for w in caught]
    assert texts[0].endswith("snapshot_n_0_1: damaged on ranks [0]; an earlier one is used")
    assert texts[1].startswith("no checkpoint of 'n' is loaded: no generation is complete on all ranks")
