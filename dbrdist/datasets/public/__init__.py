"""Public datasets and file formats: digits, MNIST, CIFAR, SVHN, PTB, npz, text, pickles, zip archives."""
