"""Deep learning with the vocabulary of Chainer, made for training on many nodes."""
