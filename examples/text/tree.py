"""A tree-structured LSTM (Tai et al. 2015) that learns what sentences of a small grammar mean, against a bag of words.

python examples/text/tree.py
"""

import argparse
import time

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import iterators, optimizers

# sentence = word | "not" sentence | sentence "and" sentence | sentence "or" sentence. It is true or false.
WORDS = {"fire is hot": True, "ice is cold": True, "birds fly": True, "stones swim": False, "night is bright": False}
WORDS |= {"fish walk": False}
NAMES = [*WORDS, "not", "and", "or"]


def sentence(rng, size):
    """A random tree with `size` leaves: a word, or (word of logic, sentence[, sentence])."""
    if rng.random() < 0.3:
        return ("not", sentence(rng, size))
    if size == 1:
        return NAMES[rng.integers(len(WORDS))]
    left = int(rng.integers(1, size))
    return (("and", "or")[rng.integers(2)], sentence(rng, left), sentence(rng, size - left))


def is_true(tree):
    """What the sentence means."""
    if isinstance(tree, str):
        return WORDS[tree]
    kind, *parts = tree
    found = [is_true(part) for part in parts]
    return not found[0] if kind == "not" else all(found) if kind == "and" else any(found)


def leaves(tree):
    """The names in the tree, those of its nodes included."""
    return [tree] if isinstance(tree, str) else [tree[0], *(name for part in tree[1:] for name in leaves(part))]


class TreeNet(dbrdist.Chain):
    """The state of a node is made from its name and the states of its parts, up to the root: a graph per sentence."""

    def __init__(self, units):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(len(NAMES), units)
            self.lstm = L.NaryTreeLSTM(units, units, n_ary=2)
            self.out = L.Linear(units, 2)

    def state(self, tree):
        """Cell and output of a tree's root, each (1, units)."""
        name, *parts = (tree,) if isinstance(tree, str) else tree
        states = [self.state(part) for part in parts] + [(None, None)] * (2 - len(parts))
        x = self.embed(self.xp.array([NAMES.index(name)]))
        return self.lstm(*(c for c, _ in states), *(h for _, h in states), x)

    def forward(self, trees):
        """Scores (N, 2) of false and true."""
        return self.out(F.concat([self.state(tree)[1] for tree in trees], axis=0))


class BagOfWords(dbrdist.Chain):
    """The same question to a network that sees how often each name occurs, but not the tree."""

    def __init__(self, units):
        super().__init__()
        with self.init_scope():
            self.hidden, self.out = L.Linear(len(NAMES), units), L.Linear(units, 2)

    def forward(self, trees):
        counts = [np.bincount([NAMES.index(name) for name in leaves(tree)], minlength=len(NAMES)) for tree in trees]
        return self.out(F.relu(self.hidden(self.xp.array(counts, np.float32))))


def make(number, rng, sizes):
    """Sentences with their truth."""
    trees = [sentence(rng, int(rng.integers(sizes[0], sizes[1] + 1))) for _ in range(number)]
    return [(tree, int(is_true(tree))) for tree in trees]


def accuracy(model, pairs):
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        y = model([tree for tree, _ in pairs])
        return float(F.accuracy(y, model.xp.array([t for _, t in pairs])).array)


def train(model, pairs, args):
    """Learn from the pairs."""
    optimizer = optimizers.Adam(alpha=5e-3).setup(model)
    for epoch in range(args.epochs):
        for batch in iterators.SerialIterator(pairs, args.batch, repeat=False, seed=epoch):
            loss = F.softmax_cross_entropy(model([tree for tree, _ in batch]), model.xp.array([t for _, t in batch]))
            model.cleargrads()
            loss.backward()
            optimizer.update()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="@numpy")
    args = parser.parse_args(argv)

    dbrdist.random.set_seed(args.seed)
    device = dbrdist.get_device(args.device)
    device.use()
    rng = np.random.default_rng(args.seed)
    pairs = make(args.sentences, rng, (1, 6))
    test, longer = make(args.sentences // 2, rng, (1, 6)), make(args.sentences // 2, rng, (7, 12))
    print("network        as long  longer than any it learned from  seconds")
    for network in (BagOfWords, TreeNet):
        start, model = time.perf_counter(), network(args.units)
        model.to_device(device)
        train(model, pairs, args)
        found = accuracy(model, test), accuracy(model, longer)
        trained, longer_trees = (100 * share for share in found)
        took = time.perf_counter() - start
        print(f"{network.__name__:<13}  {trained:5.1f} %  {longer_trees:29.1f} %  {took:7.0f}", flush=True)
    return found


if __name__ == "__main__":
    main()
