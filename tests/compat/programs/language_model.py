"""A recurrent language model with truncated backpropagation, on a text made by a rule."""

import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions


class RNNForLM(chainer.Chain):
    def __init__(self, n_vocab, n_units):
        super(RNNForLM, self).__init__()
        with self.init_scope():
            self.embed = L.EmbedID(n_vocab, n_units)
            self.l1 = L.LSTM(n_units, n_units)
            self.l2 = L.LSTM(n_units, n_units)
            self.l3 = L.Linear(n_units, n_vocab)
        for param in self.params():
            param.array[...] = np.random.uniform(-0.1, 0.1, param.shape)

    def reset_state(self):
        self.l1.reset_state()
        self.l2.reset_state()

    def forward(self, x):
        h0 = self.embed(x)
        h1 = self.l1(F.dropout(h0, 0.1))
        h2 = self.l2(F.dropout(h1, 0.1))
        return self.l3(F.dropout(h2, 0.1))


class ParallelSequentialIterator(chainer.dataset.Iterator):
    def __init__(self, dataset, batch_size, repeat=True):
        super(ParallelSequentialIterator, self).__init__()
        self.dataset, self.batch_size, self.repeat = dataset, batch_size, repeat
        self.offsets = [i * len(dataset) // batch_size for i in range(batch_size)]
        self.epoch, self.iteration, self.is_new_epoch = 0, 0, False
        self._previous_epoch_detail = -1.0

    def __next__(self):
        length = len(self.dataset)
        if not self.repeat and self.iteration * self.batch_size >= length:
            raise StopIteration
        cur_words = self.get_words()
        self._previous_epoch_detail = self.epoch_detail
        self.iteration += 1
        next_words = self.get_words()
        epoch = self.iteration * self.batch_size // length
        self.is_new_epoch = self.epoch < epoch
        if self.is_new_epoch:
            self.epoch = epoch
        return list(zip(cur_words, next_words))

    @property
    def epoch_detail(self):
        return self.iteration * self.batch_size / len(self.dataset)

    @property
    def previous_epoch_detail(self):
        return None if self._previous_epoch_detail < 0 else self._previous_epoch_detail

    def get_words(self):
        return [self.dataset[(offset + self.iteration) % len(self.dataset)] for offset in self.offsets]

    def serialize(self, serializer):
        self.iteration = serializer("iteration", self.iteration)
        self.epoch = serializer("epoch", self.epoch)


class BPTTUpdater(training.updaters.StandardUpdater):
    def __init__(self, train_iter, optimizer, bprop_len, device):
        super(BPTTUpdater, self).__init__(train_iter, optimizer, device=device)
        self.bprop_len = bprop_len

    def update_core(self):
        loss = 0
        train_iter = self.get_iterator("main")
        optimizer = self.get_optimizer("main")
        for i in range(self.bprop_len):
            batch = train_iter.__next__()
            x, t = self.converter(batch, self.device)
            loss += optimizer.target(x, t)
        optimizer.target.cleargrads()
        loss.backward()
        loss.unchain_backward()
        optimizer.update()


def compute_perplexity(result):
    result["perplexity"] = np.exp(result["main/loss"])
    if "validation/main/loss" in result:
        result["val_perplexity"] = np.exp(result["validation/main/loss"])


def main():
    np.random.seed(0)
    text = np.array([(i * i + i // 7) % 9 for i in range(2000)], dtype=np.int32)
    train_iter = ParallelSequentialIterator(text[:1600], 10)
    val_iter = ParallelSequentialIterator(text[1600:], 1, repeat=False)
    rnn = RNNForLM(9, 24)
    model = L.Classifier(rnn)
    model.compute_accuracy = False
    optimizer = chainer.optimizers.Adam(0.01)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))
    updater = BPTTUpdater(train_iter, optimizer, 10, -1)
    trainer = training.Trainer(updater, (8, "epoch"), out="lm")
    eval_model = model.copy()
    eval_rnn = eval_model.predictor
    trainer.extend(extensions.Evaluator(val_iter, eval_model, device=-1, eval_hook=lambda _: eval_rnn.reset_state()))
    trainer.extend(extensions.LogReport(postprocess=compute_perplexity, trigger=(2, "epoch")))
    trainer.extend(extensions.PrintReport(["epoch", "iteration", "perplexity", "val_perplexity"]))
    trainer.extend(extensions.snapshot(filename="model_iter_{.updater.iteration}"))
    trainer.run()
    evaluator = extensions.Evaluator(copy.copy(val_iter), eval_model)
    eval_rnn.reset_state()
    print("test perplexity: {:.2f}".format(float(np.exp(evaluator()["main/loss"]))))


if __name__ == "__main__":
    main()
