"""Vectors of words by skip-gram (Mikolov et al. 2013), with negative sampling, hierarchical softmax or a full one.

python examples/text/word2vec.py --loss negative text.txt more.txt
python examples/text/word2vec.py --loss hierarchical text.txt more.txt
"""

import argparse
import collections
import os
import time

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import iterators, optimizers


def read(paths, minimum):
    """All words that occur `minimum` times, the most frequent first, their counts, and the text as numbers."""
    texts = []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            texts += f.read().lower().split()
    counts = [(word, n) for word, n in collections.Counter(texts).most_common() if n >= minimum]
    numbers = {word: i for i, (word, _) in enumerate(counts)}
    ids = np.array([numbers[word] for word in texts if word in numbers], np.int32)
    return [word for word, _ in counts], np.array([n for _, n in counts]), ids


def pairs(ids, counts, window, often, rng):
    """Centre words and one word of their context each, windows shrunk at random; frequent words are thinned."""
    share = counts[ids] / len(ids)
    ids = ids[rng.random(len(ids)) < np.sqrt(often / share) + often / share]
    centers, contexts = [], []
    reach = rng.integers(1, window + 1, len(ids))
    for distance in range(1, window + 1):
        near = np.flatnonzero(reach[distance:-distance] >= distance) + distance
        for other in (near - distance, near + distance):
            centers.append(ids[near])
            contexts.append(ids[other])
    return np.concatenate(centers), np.concatenate(contexts)


class FullSoftmax(dbrdist.Chain):
    """What the two other losses approximate."""

    def __init__(self, units, num_words):
        super().__init__()
        with self.init_scope():
            self.out = L.Linear(units, num_words, initialW=0)

    def forward(self, h, t):
        return F.softmax_cross_entropy(self.out(h), t) * t.size


class SkipGram(dbrdist.Chain):
    def __init__(self, counts, units, kind):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(len(counts), units, initialW=dbrdist.initializers.Uniform(1 / units))
            if kind == "negative":
                self.loss = L.NegativeSampling(units, counts, 5)
            elif kind == "hierarchical":
                tree = L.BinaryHierarchicalSoftmax.create_huffman_tree(dict(enumerate(counts)))
                self.loss = L.BinaryHierarchicalSoftmax(units, tree)
            else:
                self.loss = FullSoftmax(units, len(counts))

    def forward(self, center, context):
        """Words (N,) and words near them (N,): the loss per pair."""
        return self.loss(self.embed(center), context) / len(center)


def neighbours(vectors, words, word, number=5):
    """The words whose vectors have the largest cosines with this one's."""
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    order = np.argsort(-directions @ directions[words.index(word)])
    return [words[i] for i in order if words[i] != word][:number]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "texts", nargs="+", help="files of text, words separated by spaces, such as the Penn Treebank's"
    )
    parser.add_argument("--loss", choices=["negative", "hierarchical", "full"], default="negative")
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--minimum", type=int, default=5, help="leave out words that occur less often")
    parser.add_argument("--often", type=float, default=1e-3, help="thin words whose share of the text is larger")
    parser.add_argument("--batch", type=int, default=1000, help="pairs of words")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--show", nargs="*", default=["monday", "million", "president", "stock", "he"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="@numpy")
    args = parser.parse_intermixed_args(argv)
    for path in args.texts:
        if not os.path.exists(path):
            parser.error(f"{path}: no such file; any text of some 100,000 words does, such as ptb.train.txt")

    dbrdist.random.set_seed(args.seed)
    device = dbrdist.get_device(args.device)
    device.use()
    words, counts, ids = read(args.texts, args.minimum)
    print(f"{len(ids):,} words of text, {len(words):,} different ones")
    model = SkipGram(counts, args.units, args.loss)
    model.to_device(device)
    optimizer = optimizers.Adam(alpha=2e-3).setup(model)
    rng, start = np.random.default_rng(args.seed), time.perf_counter()
    print("epoch  loss per pair  seconds")
    for epoch in range(1, args.epochs + 1):
        data = dbrdist.datasets.TupleDataset(*pairs(ids, counts, args.window, args.often, rng))
        losses = []
        for batch in iterators.SerialIterator(data, args.batch, repeat=False, seed=epoch):
            loss = model(*dbrdist.dataset.concat_examples(batch, device))
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(float(loss.array))
        print(f"{epoch:<5}  {np.mean(losses):13.3f}  {time.perf_counter() - start:7.0f}", flush=True)

    vectors = dbrdist.backend.to_cpu(model.embed.W.array)
    for word in args.show:
        if word in words:
            print(f"{word}: {', '.join(neighbours(vectors, words, word))}")
    return words, vectors


if __name__ == "__main__":
    main()
