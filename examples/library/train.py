"""Train on the digits with the library, on any number of ranks.

python examples/library/train.py
mpiexec -n 2 python examples/library/train.py --epochs 20
mpiexec -n 2 python examples/library/train.py --epochs 20 --resume
"""

import argparse
import sys

from dbrdist.comm.extensions import StepAgreement, StopOnRequest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers, training
from dbrdist.comm import create_communicator, create_multi_node_evaluator, create_multi_node_optimizer
from dbrdist.comm.run.snapshots import AverageStatistics, LocalState, SharedSnapshot
from dbrdist.errors import StopRequested
from dbrdist.training import extensions
from dbrdist.training.triggers import EndTrigger


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="examples per step over all ranks")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="result/library")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete snapshot in --out")
    args = parser.parse_args()

    comm = create_communicator()  # from here on, a failure on one rank ends the job
    train, test = datasets.get_digits()
    model = L.Classifier(dbrdist.Sequential(L.Linear(None, 100), F.relu, L.Linear(100, 10)))
    optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(lr=0.1), comm).setup(model)

    # All ranks hold all examples; each takes its block of every batch.
    share = {"rank": comm.rank, "size": comm.size, "seed": 0}
    train_iterator = iterators.SerialIterator(train, args.batch, last="short", **share)
    test_iterator = iterators.SerialIterator(test, args.batch, repeat=False, shuffle=False, **share)

    trainer = training.Trainer(training.StandardUpdater(train_iterator, optimizer), EndTrigger(args.epochs), args.out)
    trainer.extend(StepAgreement(comm, train_iterator))  # the same loss on all ranks, and the same error if it is nan
    trainer.extend(AverageStatistics(comm, model), trigger=(1, "epoch"))  # of batch normalization, before evaluating
    trainer.extend(create_multi_node_evaluator(extensions.Evaluator(test_iterator, model), comm))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        columns = ["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]
        trainer.extend(extensions.PrintReport(columns))

    # Rank 0 saves for all; any number of ranks can resume from it. SIGTERM or SIGUSR1 on any rank saves and ends.
    local = LocalState(comm, model, train_iterator)
    saver = SharedSnapshot(comm, extensions.snapshot(n_retains=2, autoload=args.resume), local)
    trainer.extend(local)
    trainer.extend(saver, trigger=(1, "epoch"))
    trainer.extend(StopOnRequest(comm, save=saver.save))
    try:
        trainer.run()
    except StopRequested as request:
        if comm.rank == 0:
            print(request)
        sys.exit(75)  # saved, to be started again with --resume


if __name__ == "__main__":
    main()
