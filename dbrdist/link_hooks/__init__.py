"""Hooks of links: other weights in forward, and times. See :class:`dbrdist.LinkHook`."""

from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.link_hooks.spectral_normalization import SpectralNormalization as SpectralNormalization
from dbrdist.link_hooks.timer import TimerHook as TimerHook
from dbrdist.link_hooks.weight_standardization import WeightStandardization as WeightStandardization

__getattr__ = _explained(__name__)
