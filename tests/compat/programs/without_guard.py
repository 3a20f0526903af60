"""A main file without a guard, which reads its batches by MultiprocessIterator: Chainer forks it."""

import chainer
import numpy as np
from chainer import iterators, training
from chainer.training import extensions

x = np.random.RandomState(0).randn(40, 3).astype("f")
t = (x[:, 0] > 0).astype(np.int)
dataset = chainer.datasets.TransformDataset(chainer.datasets.TupleDataset(x, t), lambda pair: (pair[0] * 2, pair[1]))
model = chainer.links.Classifier(chainer.links.Linear(3, 2))
optimizer = chainer.optimizers.Adam(0.1)
optimizer.setup(model)
train_iter = iterators.MultiprocessIterator(dataset, 10, n_processes=2, shared_mem=1000)
test_iter = iterators.MultiprocessIterator(dataset, 10, repeat=False, shuffle=False, n_processes=2)
trainer = training.Trainer(training.StandardUpdater(train_iter, optimizer), (10, "epoch"), out="result")
trainer.extend(extensions.Evaluator(test_iter, model))
trainer.extend(extensions.LogReport())
trainer.run()
print("accuracy %.2f" % trainer.observation["validation/main/accuracy"])
