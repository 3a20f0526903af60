"""Sequence to sequence in small: the encoder on rank 0, the decoder on rank 1, its states are sent between them.

The task is to say a number of up to 8 digits backwards. The decoder is told the digits before (teacher forcing).

mpiexec -n 2 python examples/multi_node/seq2seq.py
"""

import argparse

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import comm as chainermn
from dbrdist import optimizers
from dbrdist.comm.links import create_multi_node_n_step_rnn

BEGIN = 10  # beside the digits 0 to 9


def embedded(embed, sequences):
    """Each sequence as an array (L, units)."""
    ends = np.cumsum([len(s) for s in sequences[:-1]])
    return list(F.split_axis(embed(np.concatenate(sequences)), ends, 0))


class Encoder(dbrdist.Chain):
    def __init__(self, comm, units):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(11, units)
            self.rnn = create_multi_node_n_step_rnn(L.NStepLSTM(1, units, units, 0.0), comm, rank_out=1)

    def forward(self, sources):
        *_, delegate_variable = self.rnn(embedded(self.embed, sources))
        return delegate_variable


class Decoder(dbrdist.Chain):
    def __init__(self, comm, units):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(11, units)
            self.rnn = create_multi_node_n_step_rnn(L.NStepLSTM(1, units, units, 0.0), comm, rank_in=0)
            self.output = L.Linear(units, 10)

    def forward(self, targets):
        before = [np.concatenate((np.array([BEGIN], np.int32), t[:-1])) for t in targets]
        *_, ys, _ = self.rnn(embedded(self.embed, before))
        y, t = self.output(F.concat(ys, axis=0)), np.concatenate(targets)
        self.accuracy = float(F.accuracy(y, t).array)
        return F.softmax_cross_entropy(y, t)


def numbers(step, batch):
    """The same on both ranks."""
    rng = np.random.default_rng(step)
    return [rng.integers(0, 10, rng.integers(1, 9)).astype(np.int32) for _ in range(batch)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--units", type=int, default=64)
    args = parser.parse_args()

    comm = chainermn.create_communicator()
    if comm.size != 2:
        raise SystemExit(f"encoder and decoder lie on 2 ranks, got {comm.size}")
    model = (Encoder if comm.rank == 0 else Decoder)(comm, args.units)
    optimizer = optimizers.Adam(alpha=3e-3).setup(model)
    for step in range(1, args.steps + 1):
        batch = numbers(step, args.batch)
        optimizer.update(model, batch if comm.rank == 0 else [s[::-1].copy() for s in batch])
        if comm.rank == 1 and step % max(args.steps // 10, 1) == 0:
            print(f"step {step}: {model.accuracy:.3f} of the digits right", flush=True)

    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        batch = numbers(0, 1000)  # none of which was seen
        model(batch if comm.rank == 0 else [s[::-1].copy() for s in batch])
    if comm.rank == 1:
        print(f"accuracy {model.accuracy:.4f}")


if __name__ == "__main__":
    main()
