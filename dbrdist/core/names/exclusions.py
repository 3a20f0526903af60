"""Which ways of making a step exclude each other: declared once, for multi-node optimizers and for configurations.

The API and the configuration name what is chosen in their own words, and get the same verdicts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Each of these decides what is sent between ranks, and when.
SENDING = ("zero", "compression", "local_steps", "double_buffering")


class Exclusion(NamedTuple):
    """Two options that do not go together; ``words`` says why, of how both are written."""

    one: str
    other: str
    words: str


_ONLY_ONE = "{one} and {other} cannot be combined; use only one of them"
_EARLIER = "{other} uses gradients of earlier steps, which does not work with {one}; set a constant loss scale"
_OWN = "{other} has each rank follow its own overflows, which does not work with {one}; set a constant loss scale"
_EVERY = "{one} does not work with {other}, which needs a gradient of every parameter"

EXCLUSIONS = (
    *(Exclusion(one, other, _ONLY_ONE) for one, other in itertools.combinations(SENDING, 2)),
    Exclusion("accumulate", "local_steps", _ONLY_ONE),
    *(
        Exclusion("virtual_workers", option, "{other} does not work with {one}, which add in their own way")
        for option in (*SENDING, "accumulate")
    ),
    Exclusion("dynamic_loss_scale", "compression", _EARLIER),
    Exclusion("dynamic_loss_scale", "double_buffering", _EARLIER),
    Exclusion("dynamic_loss_scale", "local_steps", _OWN),
    *(Exclusion("no_zero_fill", option, _EVERY) for option in SENDING if option != "zero"),
    Exclusion("compression", "gradient_dtype", "{one} sends in its own way; use only one of {one} and {other}"),
    Exclusion("local_steps", "parameter_audit", "{one} gives ranks different parameters; leave out one of them"),
)


def conflicts(chosen: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(the option at fault, what is wrong) for each two that exclude each other.

    Args:
        chosen: the options that are in use, each with how it is written.
    """
    for one, other, words in EXCLUSIONS:
        if one in chosen and other in chosen:
            yield other, words.format(one=chosen[one], other=chosen[other])
