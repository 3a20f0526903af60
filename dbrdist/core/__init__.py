"""The engine: arrays, the tape that differentiates, links and their flat memory, updates, files. See README.md."""

from dbrdist.core.names.missing_names import explained as _explained

__getattr__ = _explained("dbrdist.core")
