"""What a distribution is, and divergences, under Chainer's module name."""

from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.distributions.base import Distribution, cross_entropy, kl_divergence, register_kl

__all__ = ["Distribution", "cross_entropy", "kl_divergence", "register_kl"]

__getattr__ = _explained(__name__)
