"""ResNet-50 on ImageNet with the library, following Goyal et al. 2017: what config.yaml says, as a program.

mpiexec -n 8 python examples/imagenet/train.py ROOT
mpiexec -n 8 python examples/imagenet/train.py ROOT --resume
python examples/imagenet/train.py --synthetic --model resnet18 --size 64 --batch 8 --iterations 2

ROOT holds train/WNID/*.JPEG and val/WNID/*.JPEG (README.md). The rate grows with the batch: 0.1 for each 256 examples.
"""

import argparse
import sys

import numpy as np
from dbrdist.comm.extensions import StepAgreement, StopOnRequest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, models, optimizers, training
from dbrdist.comm import create_communicator, create_multi_node_evaluator, create_multi_node_optimizer
from dbrdist.comm.run.snapshots import AverageStatistics, LocalState, SharedSnapshot
from dbrdist.errors import StopRequested
from dbrdist.optimizers import schedules
from dbrdist.training import extensions
from dbrdist.training.triggers import EndTrigger

NORMAL = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # mean and standard deviation of each channel


def photographs(root: str, size: int) -> tuple[datasets.ImageFolder, datasets.ImageFolder]:
    """Training images in random parts and mirrored at random, validation images in the middle."""
    last = [datasets.Normalize(*NORMAL), datasets.ToCHW()]
    part = datasets.RandomResizedCrop(size, method="bilinear")
    train = datasets.Compose([part, datasets.RandomHorizontalFlip(), *last])
    test = datasets.Compose([datasets.Resize(size * 256 // 224, "bilinear"), datasets.CenterCrop(size), *last])
    return datasets.ImageFolder(f"{root}/train", train), datasets.ImageFolder(f"{root}/val", test)


def noise(size: int, num: int = 64) -> datasets.TupleDataset:
    """Images without content, to try the program and to measure its speed."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((num, 3, size, size)).astype(np.float32)
    return datasets.TupleDataset(images, rng.integers(0, 1000, num).astype(np.int32))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", help="the folder that holds train and val")
    parser.add_argument("--model", choices=["resnet18", "resnet50"], default="resnet50")
    parser.add_argument("--size", type=int, default=224, help="pixels of a training image's side")
    parser.add_argument("--batch", type=int, default=256, help="examples per step over all ranks")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--iterations", type=int, help="end after so many steps")
    parser.add_argument("--threads", type=int, default=2, help="that decode images, per rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--synthetic", action="store_true", help="train on noise, without ROOT")
    parser.add_argument("--out", default="result/imagenet-program")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete snapshot in --out")
    args = parser.parse_args()
    if (args.root is None) != args.synthetic:
        parser.error("expected ROOT, the folder that holds train and val, or --synthetic")
    return args


def main() -> None:
    args = arguments()
    dbrdist.random.set_seed(args.seed)
    comm = create_communicator()  # from here on, a failure on one rank ends the job
    train, test = (noise(args.size),) * 2 if args.synthetic else photographs(args.root, args.size)
    network = {"resnet18": models.ResNet18, "resnet50": models.ResNet50}[args.model](zero_gamma=True)
    model = L.Classifier(network)

    # Momentum without the learning rate in it needs no correction when that changes; scales and shifts do not decay.
    rate = 0.1 * args.batch / 256
    optimizer = create_multi_node_optimizer(optimizers.CorrectedMomentumSGD(rate, momentum=0.9), comm).setup(model)
    decaying = [p for path, p in model.namedparams() if not path.endswith(("/gamma", "/beta"))]
    optimizer.add_hook(optimizers.WeightDecay(1e-4, decaying))

    # All ranks hold all examples; each takes its block of every batch.
    share = {"rank": comm.rank, "size": comm.size, "seed": args.seed, "n_threads": args.threads}
    train_iterator = iterators.MultithreadIterator(train, args.batch, last="short", **share)
    test_iterator = iterators.MultithreadIterator(test, args.batch, repeat=False, shuffle=False, **share)

    end = EndTrigger(args.epochs, args.iterations)
    trainer = training.Trainer(training.StandardUpdater(train_iterator, optimizer), end, args.out)
    steps = schedules.step(rate, 0.1, [30, 60, 80])
    trainer.extend(extensions.FollowSchedule(schedules.warmup(steps, 5, 0.1 if rate > 0.1 else rate)))
    trainer.extend(StepAgreement(comm, train_iterator))  # the same loss on all ranks, and the same error if it is nan
    trainer.extend(AverageStatistics(comm, model), trigger=(1, "epoch"))  # of batch normalization, before evaluating

    def observed(x: np.ndarray, t: np.ndarray) -> None:
        y = network(x)
        values = {"loss": F.softmax_cross_entropy(y, t), "accuracy": F.accuracy(y, t)}
        dbrdist.report({**values, "top5_accuracy": F.top_k_accuracy(y, t)}, model)

    trainer.extend(create_multi_node_evaluator(extensions.Evaluator(test_iterator, model, eval_func=observed), comm))
    if comm.rank == 0:
        trainer.extend(extensions.observe_value("lr", lambda _: optimizer.lr), trigger=(1, "iteration"))
        trainer.extend(extensions.LogReport())
        columns = ["epoch", "main/loss", "main/accuracy", "validation/main/accuracy", "validation/main/top5_accuracy"]
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
        sys.exit(75)  # saved; start again with --resume


if __name__ == "__main__":
    main()
