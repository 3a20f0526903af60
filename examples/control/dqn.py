"""Deep Q-learning (Mnih et al. 2015; double estimate by van Hasselt et al. 2016) that balances a pole on a cart.

python examples/control/dqn.py
"""

import argparse
import math
import time

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers

LIMIT = 500  # steps of an episode; the task counts as solved at a mean of 475 over 100 episodes


def cart_pole(state, push):
    """The next states (N, 4) of carts and poles after 0.02 s, pushed left (0) or right (1), and which of them failed.

    A state is place, speed, angle and its speed, in m and rad (Barto, Sutton and Anderson 1983, without friction).
    """
    _, v, angle, w = state.T
    force, pole, mass, half = np.where(push == 1, 10.0, -10.0), 0.1, 1.1, 0.5  # N; kg of the pole, of all; m
    s, c = np.sin(angle), np.cos(angle)
    push = (force + pole * half * w**2 * s) / mass
    turn = (9.8 * s - c * push) / (half * (4 / 3 - pole * c**2 / mass))
    gain = push - pole * half * turn * c / mass
    after = state + 0.02 * np.stack([v, gain, w, turn], axis=1)
    return after, (abs(after[:, 0]) > 2.4) | (abs(after[:, 2]) > math.radians(12))


class Memory:
    """The last `size` steps: states, pushes, next states and whether the pole fell."""

    def __init__(self, size):
        self.size, self.count = size, 0
        self.before, self.after = np.zeros((2, size, 4), np.float32)
        self.push, self.failed = np.zeros(size, np.int32), np.zeros(size, np.float32)

    def add(self, before, push, after, failed):
        i = self.count % self.size
        self.before[i], self.push[i], self.after[i], self.failed[i] = before, push, after, failed
        self.count += 1

    def draw(self, number, rng):
        i = rng.integers(0, min(self.count, self.size), number)
        return self.before[i], self.push[i], self.after[i], self.failed[i]


class QNetwork(dbrdist.Sequential):
    """State -> what each of both pushes is worth. Angles are scaled, so that all four numbers are of one size."""

    def __init__(self, units):
        super().__init__(L.Linear(4, units), F.relu, L.Linear(units, units), F.relu, L.Linear(units, 2))

    def forward(self, state):
        scale = self.xp.array([0.5, 0.5, 5.0, 0.5], np.float32)
        return super().forward(state * scale)


def values(network, states, device):
    with dbrdist.no_backprop_mode():
        return dbrdist.backend.to_cpu(network(device.send(states.astype(np.float32))).array)


def update(network, target, optimizer, batch, discount, device):
    """One step towards reward + discount * (the target network's value of what the network would do next)."""
    before, push, after, failed = batch
    best = values(network, after, device).argmax(axis=1)
    worth = values(target, after, device)[np.arange(len(best)), best]
    goal = device.send((1.0 + discount * (1.0 - failed) * worth).astype(np.float32))
    found = F.select_item(network(device.send(before)), device.send(push))
    loss = F.mean(F.huber_loss(found, goal, 1.0, reduce="no"))
    network.cleargrads()
    loss.backward()
    optimizer.update()


def evaluate(network, device, rng, episodes=100):
    """The mean length of episodes in which the network decides alone."""
    state, alive, total = rng.uniform(-0.05, 0.05, (episodes, 4)), np.ones(episodes, bool), 0
    for _ in range(LIMIT):
        total += alive.sum()
        state, failed = cart_pole(state, values(network, state, device).argmax(axis=1))
        alive &= ~failed
    return total / episodes


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15000, help="of the simulation, at most")
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--memory", type=int, default=50000)
    parser.add_argument("--alpha", type=float, default=1e-3, help="learning rate; it falls to 0")
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--follow", type=float, default=0.01, help="how far the target goes to the network per step")
    parser.add_argument("--explore", type=int, default=2000, help="steps over which random pushes fall to 5 percent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="@numpy")
    args = parser.parse_args(argv)

    dbrdist.random.set_seed(args.seed)
    rng, start = np.random.default_rng(args.seed), time.perf_counter()
    device = dbrdist.get_device(args.device)
    device.use()
    network = QNetwork(args.units)
    network.to_device(device)
    target = network.copy("copy")
    optimizer = optimizers.Adam(alpha=args.alpha).setup(network)
    optimizer.add_hook(optimizers.GradientClipping(10.0))
    memory, state, length, mean = Memory(args.memory), rng.uniform(-0.05, 0.05, 4), 0, 0.0

    print("step    mean length of 100 episodes  seconds")
    for step in range(1, args.steps + 1):
        explores = rng.random() < max(0.05, 1 - step / args.explore)
        push = rng.integers(2) if explores else values(network, state[None], device)[0].argmax()
        after, failed = (found[0] for found in cart_pole(state[None], np.array([push])))
        memory.add(state, push, after, failed)
        state, length = after, length + 1
        if failed or length == LIMIT:
            state, length = rng.uniform(-0.05, 0.05, 4), 0
        optimizer.alpha = args.alpha * (1 - step / (args.steps + 1))
        if step >= min(500, args.explore):
            update(network, target, optimizer, memory.draw(args.batch, rng), args.discount, device)
        for slow, fast in zip(target.params(), network.params()):
            slow.array += args.follow * (fast.array - slow.array)
        if step % 500 == 0:
            mean = evaluate(network, device, np.random.default_rng(1000 + args.seed))
            print(f"{step:<6}  {mean:27.1f}  {time.perf_counter() - start:7.0f}", flush=True)
            if mean >= 475:
                print(f"solved after {step} steps")
                break
    return mean


if __name__ == "__main__":
    main()
