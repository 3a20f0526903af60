"""Programs that say ``import chainer`` and ``import chainermn`` run on dbrdist.

    python -m dbrdist.compat script.py arguments...

runs a script unchanged; ``dbrdist.compat.install()`` at the top of a program does the same for what it imports after
that. Every import path of Chainer 7.8.1 is there, also those deep inside (``chainer.functions.loss.vae``), and serves
the names that dbrdist has. A name that it does not have raises an error that says so.
"""

from dbrdist.compat.finder import install, uninstall
from dbrdist.compat.numpy_1.numpy_names import restore_numpy_names

__all__ = ["install", "restore_numpy_names", "uninstall"]
