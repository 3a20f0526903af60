"""What ranks carry through a snapshot besides parameters and optimizer state, as functions of a communicator."""

from __future__ import annotations

import copy
import operator
import pickle

import numpy as np

from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.comm.gradients.compression import PowerSGD, TopK
from dbrdist.core.files.serializer import NpzDeserializer, saved_state
from dbrdist.datasets.loading.base import block_bounds
from dbrdist.errors import CheckpointError, CommunicatorError
from tests.comm.contract import raises
from tests.comm.training_contract import Net, batches, close, weights

WAYS = {
    "PowerSGD": lambda: {"compression": PowerSGD(1)},
    "TopK": lambda: {"compression": TopK(0.1)},
    "accumulate": lambda: {"accumulate": 3},
    "accumulate with TopK": lambda: {"accumulate": 2, "compression": TopK(0.2)},
    "accumulate late": lambda: {"accumulate": 2, "double_buffering": True},
    "local_steps": lambda: {"local_steps": 3},
    "double_buffering": lambda: {"double_buffering": True},
}


def made(comm, way, seed=0, dtype=np.float32, kind=optimizers.Adam, **settings):
    model = Net(dtype, seed, num_hidden=20)
    model(*next(batches(1, dtype)))
    options = WAYS[way]() if isinstance(way, str) else way
    return model, create_multi_node_optimizer(kind(**settings).setup(model), comm, **options)


def steps(comm, model, optimizer, found):
    for x, t in found:
        begin, end = block_bounds(len(x), comm.rank, comm.size)
        optimizer.update(model, x[begin:end], t[begin:end], num_samples=end - begin)


def saved(comm, model, optimizer):
    """What rank 0 writes for all, on every rank."""
    with optimizer.whole_state():
        state = (saved_state(model), saved_state(optimizer)) if comm.rank == 0 else None
    return comm.bcast_obj(state)


def resumed(comm, state, way, **settings):
    model, optimizer = made(comm, way, seed=50 + comm.rank, **settings)
    for entries, obj in zip(state, (model, optimizer)):
        NpzDeserializer(entries).load(obj)
    return model, optimizer


def same(mine, expected):
    return all((mine[name] == expected[name]).all() for name in expected)


def check_resumed_runs_go_on_bit_for_bit(comm):
    """Cut after each number of steps, so at each place within a round; each rank has its own parameters too."""
    found = list(batches(6, np.float32))
    for way in WAYS:
        model, optimizer = made(comm, way)
        steps(comm, model, optimizer, found)
        expected = weights(model)
        for cut in (1, 2, 3):
            model, optimizer = made(comm, way)
            steps(comm, model, optimizer, found[:cut])
            again, optimizer2 = resumed(comm, saved(comm, model, optimizer), way)
            steps(comm, again, optimizer2, found[cut:])
            assert same(weights(again), expected), (way, cut)
        steps(comm, model, optimizer, found[cut:])  # saving has changed nothing
        assert same(weights(model), expected), way


def check_a_snapshot_at_once_after_a_resume_is_the_same(comm):
    found = list(batches(5, np.float32))
    for way in WAYS:
        model, optimizer = made(comm, way)
        steps(comm, model, optimizer, found)
        first = saved(comm, model, optimizer)
        second = saved(comm, *resumed(comm, first, way))
        for a, b in zip(first, second):
            assert list(a) == list(b), way
            assert all(np.array_equal(a[key], b[key]) for key in a), way


def check_loading_into_a_run_under_way(comm):
    """What was carried there is gone; also where the snapshot has nothing of the kind."""
    found = list(batches(7, np.float32))
    for way in WAYS:
        model, optimizer = made(comm, way)
        steps(comm, model, optimizer, found[:5])
        state = saved(comm, model, optimizer)
        steps(comm, model, optimizer, found[5:])
        expected = weights(model)
        for entries, obj in zip(state, (model, optimizer)):
            NpzDeserializer(entries).load(obj)
        steps(comm, model, optimizer, found[5:])
        assert same(weights(model), expected), way
        if way == "local_steps":
            continue  # a fresh one begins with a joint step
        plain = saved(comm, *made(comm, {}))
        for entries, obj in zip(plain, (model, optimizer)):
            NpzDeserializer(entries).load(obj)
        steps(comm, model, optimizer, found[:4])
        fresh, anew = resumed(comm, plain, way)
        steps(comm, fresh, anew, found[:4])
        assert same(weights(model), weights(fresh)), way


def check_each_rank_saves_its_own_outside_the_block(comm):
    """As the checkpointer does, with a file for each rank."""
    found = list(batches(8, np.float32))
    for way in WAYS:
        model, optimizer = made(comm, way)
        steps(comm, model, optimizer, found[:5])
        again, optimizer2 = resumed(comm, (saved_state(model), saved_state(optimizer)), way)
        steps(comm, again, optimizer2, found[5:])
        steps(comm, model, optimizer, found[5:])
        assert same(weights(again), weights(model)), way


def other_sizes(comm):
    """(communicator that saves, one that resumes), each None on ranks that are not in it."""
    fewer = comm.split(0 if comm.rank < comm.size - 1 else None, comm.rank)
    return [] if comm.size == 1 else [(comm, fewer), (fewer, comm)]


def moved(comm, before, now, way, found, **settings):
    """A run that one communicator began and another goes on with: (old model, the state, new model, optimizer)."""
    old = state = None
    if before is not None:
        old, optimizer = made(before, way, **settings)
        steps(before, old, optimizer, found)
        state = saved(before, old, optimizer)
    state = comm.bcast_obj(state)  # rank 0 is in both
    return old, state, *((None, None) if now is None else resumed(now, state, way, **settings))


def check_kept_gradients_keep_their_mean_on_another_number_of_ranks(comm):
    for before, now in other_sizes(comm):
        num_before = comm.size - (before is not comm)
        for way in ("PowerSGD", "TopK"):
            if num_before == 1:
                continue  # it sends nothing, and keeps nothing
            _, state, model, optimizer = moved(comm, before, now, way, list(batches(4, np.float32)))
            if now is None:
                continue
            optimizer._carried.take_up(model)
            for name in ("/l1/W", "/l2/W"):
                mean = kept_mean(state, name, num_before)
                mine = optimizer._way.compression.kept[dict(model.namedparams())[name]]
                np.testing.assert_allclose(np.mean(now.allgather_obj(mine), axis=0), mean, rtol=1e-5, atol=1e-8)
                assert np.abs(mean).max() > 0


def check_one_rank_alone_spends_what_was_kept(comm):
    """It sends nothing, so its first gradient gets all of it."""
    if comm.size == 1:
        return
    found = list(batches(3))
    alone = comm.split(0 if comm.rank == 0 else None, 0)
    settings = {"dtype": np.float64, "kind": optimizers.SGD, "lr": 0.1}
    _, state, model, optimizer = moved(comm, comm, alone, "TopK", found[:2], **settings)
    if alone is not None:
        means = {n: kept_mean(state, n, comm.size) for n, _ in named(model)}
        before, (x, t) = weights(model), found[2]
        loss = model(x, t)
        model.cleargrads()
        loss.backward()
        expected = {n: before[n] - 0.1 * (p.grad + means[n].reshape(p.shape)) for n, p in named(model)}
        optimizer.update(model, x, t, num_samples=len(x))
        close(weights(model), expected, 1e-12)
        assert not optimizer._way.compression.kept


def kept_mean(state, name, num_ranks):
    return np.mean([state[1][f"carried/rank{k}/kept{name}"] for k in range(num_ranks)], axis=0)


def named(model):
    return list(model.namedparams())


def check_gathered_gradients_count_on_another_number_of_ranks(comm):
    """The step has the mean of all examples, whoever had them: with and without numbers of examples."""
    found = list(batches(3))
    settings = {"dtype": np.float64, "kind": optimizers.SGD, "lr": 0.1}
    for before, now in other_sizes(comm):
        _, _, model, optimizer = moved(comm, before, now, "accumulate", found[:2], **settings)
        if now is not None:
            steps(now, model, optimizer, found[2:])
            alone, plain = Net(np.float64, 0, 20), optimizers.SGD(lr=0.1)
            plain.setup(alone)
            plain.update(alone, *(np.concatenate(arrays) for arrays in zip(*found)))
            close(weights(model), weights(alone), 1e-12)


def check_gathered_gradients_without_numbers_of_examples(comm):
    found = list(batches(2))
    settings = {"dtype": np.float64, "kind": optimizers.SGD, "lr": 0.1}
    for before, now in other_sizes(comm):
        state = None
        if before is not None:
            model, optimizer = made(before, {"accumulate": 2}, **settings)
            optimizer.update(model, *found[0])  # the same examples on every rank
            state = saved(before, model, optimizer)
        state = comm.bcast_obj(state)
        if now is not None:
            model, optimizer = resumed(now, state, {"accumulate": 2}, **settings)
            optimizer.update(model, *found[1])
            alone = Net(np.float64, 0, 20)
            losses = [alone(*batch) for batch in found]
            (losses[0] + losses[1]).backward()
            close(weights(model), {n: p.array - 0.1 * p.grad / 2 for n, p in named(alone)}, 1e-12)


def check_local_sgd_begins_a_round_with_means_on_another_number_of_ranks(comm):
    settings = {"dtype": np.float64, "kind": optimizers.MomentumSGD, "lr": 0.1}
    for before, now in other_sizes(comm):
        old, _, model, optimizer = moved(comm, before, now, "local_steps", list(batches(3)), **settings)
        expected = None
        if before is not None:
            everyone = before.allgather_obj((weights(old), velocities(old)))
            expected = [{n: np.mean([e[i][n] for e in everyone], axis=0) for n in everyone[0][i]} for i in (0, 1)]
        expected = comm.bcast_obj(expected)
        if now is not None:
            optimizer._carried.take_up(model)
            close(weights(model), expected[0], 1e-12)
            close(velocities(model), expected[1], 1e-12)
            assert not optimizer.num_local_steps


def velocities(model):
    return {name: p.update_rule.state["v"].copy() for name, p in named(model)}


def check_late_gradients_arrive_on_another_number_of_ranks(comm):
    settings = {"dtype": np.float64, "kind": optimizers.SGD, "lr": 0.1}
    found = list(batches(3))
    for before, now in other_sizes(comm):
        if comm.size == 2:
            continue  # on one rank nothing is late
        _, state, model, optimizer = moved(comm, before, now, "double_buffering", found[:2], **settings)
        if now is not None:
            start = weights(model)
            steps(now, model, optimizer, found[2:])
            expected = {n: start[n] - 0.1 * state[1][f"carried/all/arriving{n}"].reshape(start[n].shape) for n in start}
            close(weights(model), expected, 1e-12)


def check_ranks_that_resume_at_different_moments_raise_on_all(comm):
    if comm.size == 1:
        return
    found = list(batches(3, np.float32))
    model, optimizer = made(comm, "accumulate")
    steps(comm, model, optimizer, found[:1])
    early = saved(comm, model, optimizer)
    steps(comm, model, optimizer, found[1:2])
    late = saved(comm, model, optimizer)
    again, optimizer = resumed(comm, early if comm.rank == 0 else late, "accumulate")
    raises(CommunicatorError, "the same moment of a run", lambda: steps(comm, again, optimizer, found))


def check_frozen_and_missing_parameters(comm):
    """Paths that the model does not have any more are passed over; a frozen layer keeps what it has."""
    found = list(batches(6, np.float32))
    for way in WAYS:
        results = []
        for cut in (False, True):
            model, optimizer = made(comm, way)
            steps(comm, model, optimizer, found[:3])
            model.l2.disable_update()
            steps(comm, model, optimizer, found[3:4])
            if cut:
                state = saved(comm, model, optimizer)
                state[1]["carried/all/right/gone/W"] = np.zeros(3)
                model, optimizer = resumed(comm, state, way)
                model.l2.disable_update()
            steps(comm, model, optimizer, found[4:5])
            model.l2.enable_update()
            steps(comm, model, optimizer, found[5:])
            results.append(weights(model))
        assert same(*results), way


def check_other_settings_than_before(comm):
    """More calls gathered than a step has now, one call a step, another rank of PowerSGD, wider parameters."""
    found = list(batches(4))
    settings = {"dtype": np.float64, "kind": optimizers.SGD, "lr": 0.1}
    model, optimizer = made(comm, {"accumulate": 3}, **settings)
    steps(comm, model, optimizer, found[:2])
    state = saved(comm, model, optimizer)
    for num_calls, calls in [(2, found[:3]), (1, found[2:3])]:
        options = {"accumulate": num_calls, "compression": TopK(1.0)}  # which sends all
        again, optimizer = resumed(comm, state, options, **settings)
        steps(comm, again, optimizer, found[2:3])
        assert optimizer.t == 1
        alone = Net(np.float64, 0, 20)
        plain = optimizers.SGD(lr=0.1).setup(alone)
        plain.update(alone, *(np.concatenate(arrays) for arrays in zip(*calls)))
        close(weights(again), weights(alone), 1e-12)
    for before, after in [({"compression": PowerSGD(2)}, "PowerSGD"), ("TopK", "PowerSGD"), ("PowerSGD", "TopK")]:
        model, optimizer = made(comm, before)
        steps(comm, model, optimizer, batches(2, np.float32))
        again, optimizer = resumed(comm, saved(comm, model, optimizer), after, dtype=np.float64)
        steps(comm, again, optimizer, found)
        assert optimizer.t == 6


def check_damaged_entries_raise_on_all(comm):
    model, optimizer = made(comm, "accumulate")
    found = list(batches(2, np.float32))
    steps(comm, model, optimizer, found[:1])
    state = saved(comm, model, optimizer)
    last = f"carried/rank{comm.size - 1}/gradient/l1/W"
    state[1][last] = state[1][last][:2]
    again, optimizer = resumed(comm, state, "accumulate")
    text = "gradient/l1/W: expected 100 elements as in the model, found 40"
    raises(CheckpointError, text, lambda: steps(comm, again, optimizer, found[1:]))
    del state[1][last]
    raises(CheckpointError, "gradient/l1/W", lambda: resumed(comm, state, "accumulate"))
    state[1]["carried/about"] = np.array('{"size": 2')
    raises(CheckpointError, "carried/about: cannot be read", lambda: resumed(comm, state, "accumulate"))


COPIED = {**WAYS, "plain": dict, "zero 1": lambda: {"zero": 1}, "zero 2": lambda: {"zero": 2}}


def check_deep_copies_go_on_like_the_original(comm):
    found = list(batches(9, np.float32))
    for way, settings in COPIED.items():
        straight, optimizer = made(comm, settings())
        steps(comm, straight, optimizer, found)
        for num_before in (0, 1, 4):
            model, original = made(comm, settings())
            steps(comm, model, original, found[:num_before])
            twin = copy.deepcopy(original)
            assert twin.communicator is comm, way
            assert twin.target is not model, way
            at_copy = weights(model)
            steps(comm, twin.target, twin, found[num_before:])
            assert same(weights(model), at_copy), (way, num_before)  # its own memory
            steps(comm, model, original, found[num_before:])
            for each in (model, twin.target):
                assert same(weights(each), weights(straight)), (way, num_before)
            assert twin.t == original.t == optimizer.t, way


def check_copies_of_models_and_optimizers_belong_together(comm):
    model, optimizer = made(comm, {})
    found = list(batches(4, np.float32))
    steps(comm, model, optimizer, found[:2])
    teacher = copy.deepcopy(model)  # an average of weights, say
    before = weights(teacher)
    both = copy.deepcopy({"model": model, "optimizer": optimizer})
    assert both["optimizer"].target is both["model"]
    steps(comm, both["model"], both["optimizer"], found[2:])
    steps(comm, model, optimizer, found[2:])
    assert same(weights(both["model"]), weights(model))
    assert same(weights(teacher), before)
    assert not same(weights(model), before)


def check_shallow_copies_share_everything(comm):
    model, optimizer = made(comm, {})
    found = list(batches(4, np.float32))
    for twin in (optimizer, copy.copy(optimizer), optimizer, copy.copy(optimizer)):
        steps(comm, model, twin, [found.pop()])
    assert optimizer.t == 4
    assert copy.copy(optimizer).target is model
    assert copy.copy(comm) is comm


def check_neither_communicators_nor_their_optimizers_are_pickled(comm):
    model, optimizer = made(comm, {})
    steps(comm, model, optimizer, batches(2, np.float32))
    raises(TypeError, "cannot be pickled", lambda: pickle.dumps(comm))
    raises(TypeError, "pickle its actual_optimizer", lambda: pickle.dumps(optimizer))
    for p in model.params():
        p.initializer = None  # those of this model are functions within functions
    again = pickle.loads(pickle.dumps(optimizer.actual_optimizer))
    wrapped = create_multi_node_optimizer(again, comm)
    found = list(batches(3, np.float32))
    steps(comm, wrapped.target, wrapped, found)
    steps(comm, model, optimizer, found)
    assert same(weights(wrapped.target), weights(model))


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
