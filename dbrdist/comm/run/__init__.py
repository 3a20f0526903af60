"""A whole run of several ranks: snapshots, checkpoints, trainer extensions, traces, audits of parameters."""
