"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347) that balances a pole, on one or several ranks.

python examples/control/ppo.py
mpiexec -n 2 python examples/control/ppo.py

The ranks divide the simulations among themselves, and their gradients are averaged. The numbers that the program draws
do not depend on the number of ranks.
"""

import argparse
import time

import numpy as np
from dqn import LIMIT, cart_pole

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import comm as multi_node
from dbrdist import optimizers


class Network(dbrdist.Chain):
    """State -> scores of both pushes, and what the state is worth."""

    def __init__(self, units):
        super().__init__()
        with self.init_scope():
            self.policy = dbrdist.Sequential(L.Linear(4, units), F.tanh, L.Linear(units, units), F.tanh)
            self.choice = L.Linear(units, 2, initialW=dbrdist.initializers.LeCunNormal(0.01))  # nearly even at first
            self.worth = dbrdist.Sequential(
                L.Linear(4, units), F.tanh, L.Linear(units, units), F.tanh, L.Linear(units, 1)
            )

    def forward(self, state):
        state = state * self.xp.array([0.5, 0.5, 5.0, 0.5], np.float32)
        return self.choice(self.policy(state)), F.reshape(self.worth(state), (-1,))

    def of_arrays(self, state):
        """Log-probabilities of both pushes (N, 2) and values (N,) as arrays."""
        with dbrdist.no_backprop_mode():
            scores, worth = self(state.astype(np.float32))
            return F.log_softmax(scores).array, worth.array


class Simulations:
    """Carts and poles that go on from rollout to rollout: those of this rank, of `number` on all ranks."""

    def __init__(self, number, rank, size, rng):
        self.own = slice(number * rank // size, number * (rank + 1) // size)
        self.number, self.rng = number, rng
        self.state = self._start()[self.own]
        self.length = np.zeros(len(self.state), int)

    def _start(self):
        return self.rng.uniform(-0.05, 0.05, (self.number, 4))  # for all ranks, so that all draw the same

    def rollout(self, network, steps, discount, smoothing):
        """States, pushes, their log-probabilities, advantages and returns, each (steps, number of this rank, ...)."""
        seen = []
        for _ in range(steps):
            before = self.state
            log_p, worth = network.of_arrays(before)
            push = (self.rng.random(self.number)[self.own] < np.exp(log_p[:, 1])).astype(np.int32)
            after, failed = cart_pole(before, push)
            self.length += 1
            ended = failed | (self.length == LIMIT)
            then = np.where(failed, 0.0, network.of_arrays(after)[1])
            surprise = 1.0 + discount * then - worth
            seen.append((before.astype(np.float32), push, log_p[np.arange(len(push)), push], worth, surprise, ended))
            self.state = np.where(ended[:, None], self._start()[self.own], after)
            self.length[ended] = 0
        states, pushes, log_p, worths, surprises, ends = map(np.stack, zip(*seen))
        advantages, later = np.zeros_like(worths), 0.0
        for t in reversed(range(steps)):  # generalized advantage estimation (arXiv:1506.02438)
            advantages[t] = later = surprises[t] + discount * smoothing * np.where(ends[t], 0.0, later)
        return states, pushes, log_p, advantages, advantages + worths


def loss(network, states, pushes, old, advantages, returns, clip, entropy_weight):
    """Minus the clipped surrogate, plus half the squared error of the values, minus the entropy."""
    scores, worth = network(states)
    log_p = F.log_softmax(scores)
    ratio = F.exp(F.select_item(log_p, pushes) - old)
    surrogate = F.minimum(ratio * advantages, F.clip(ratio, 1.0 - clip, 1.0 + clip) * advantages)
    entropy = -F.sum(F.exp(log_p) * log_p, axis=1)
    return F.mean(0.5 * F.squared_error(worth, returns) - surrogate - entropy_weight * entropy)


def normalized(advantages, comm):
    """With mean 0 and standard deviation 1 over the simulations of all ranks."""
    sums = np.array([advantages.size, advantages.sum(), np.square(advantages).sum()], np.float64)
    count, total, squares = comm.allreduce_obj(sums)
    mean = total / count
    return ((advantages - mean) / (np.sqrt(max(squares / count - mean**2, 0.0)) + 1e-8)).astype(np.float32)


def evaluate(network, rng, episodes=100):
    """The mean length of episodes in which the more probable push is taken."""
    state, alive, total = rng.uniform(-0.05, 0.05, (episodes, 4)), np.ones(episodes, bool), 0
    for _ in range(LIMIT):
        total += alive.sum()
        state, failed = cart_pole(state, network.of_arrays(state)[0].argmax(axis=1))
        alive &= ~failed
        if not alive.any():
            break
    return total / episodes


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=60, help="at most")
    parser.add_argument("--simulations", type=int, default=32, help="on all ranks")
    parser.add_argument("--steps", type=int, default=128, help="of each simulation in a rollout")
    parser.add_argument("--epochs", type=int, default=4, help="passes over each rollout")
    parser.add_argument("--parts", type=int, default=4, help="batches in a pass")
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=1e-3, help="learning rate; it falls to 0")
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--smoothing", type=float, default=0.95, help="lambda of the advantage estimation")
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--entropy", type=float, default=0.01, help="weight of the entropy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    comm = multi_node.create_communicator()
    dbrdist.random.set_seed(args.seed)
    rng, begun, mean = np.random.default_rng(args.seed), time.perf_counter(), 0.0
    network = Network(args.units)
    optimizer = multi_node.create_multi_node_optimizer(optimizers.Adam(alpha=args.alpha), comm).setup(network)
    optimizer.add_hook(optimizers.GradientClipping(0.5))
    simulations = Simulations(args.simulations, comm.rank, comm.size, rng)
    if comm.rank == 0:
        print("rollout  mean length of 100 episodes  seconds")
    for rollout in range(1, args.rollouts + 1):
        optimizer.alpha = args.alpha * (1 - (rollout - 1) / args.rollouts)
        states, pushes, log_p, advantages, returns = simulations.rollout(
            network, args.steps, args.discount, args.smoothing
        )
        advantages = normalized(advantages, comm)
        for _ in range(args.epochs):
            for part in np.array_split(rng.permutation(args.steps), args.parts):
                batch = [a[part].reshape(-1, *a.shape[2:]) for a in (states, pushes, log_p, advantages, returns)]
                batch[2:] = [a.astype(np.float32) for a in batch[2:]]
                optimizer.update(loss, network, *batch, args.clip, args.entropy)
        if rollout % 5 == 0 or rollout == args.rollouts:
            mean = evaluate(network, np.random.default_rng(1000 + args.seed))
            if comm.rank == 0:
                print(f"{rollout:<7}  {mean:27.1f}  {time.perf_counter() - begun:7.0f}", flush=True)
            if mean >= 475:
                if comm.rank == 0:
                    print(f"solved after {rollout * args.steps * args.simulations:,} steps")
                break
    return mean


if __name__ == "__main__":
    main()
