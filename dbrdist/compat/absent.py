"""What Chainer has and dbrdist will not have: the sentence with which a program that needs it stops."""

from __future__ import annotations

import re

from dbrdist import links
from dbrdist.core.model.device_resident import DeviceResident
from dbrdist.core.names import missing_names
from dbrdist.core.tape.variable import Variable

_CHAINERX = (
    "ChainerX is not part of dbrdist: use NumPy's arrays (device -1 or '@numpy') or CuPy's (device 0 or '@cupy:0')"
)
_IDEEP = "iDeep is not part of dbrdist, whose CPU kernels use oneDNN anyway: use the device '@numpy'"
_CAFFE = (
    "Caffe's files are not supported: convert them with Chainer to .npz (chainer.serializers.save_npz), and load that "
    "into chainer.links.VGG16Layers, ResNet50Layers or your own Chain"
)
_THEANO = "Theano is not supported: write the function as a chainer.FunctionNode"

_FUNCTION_SET = "Chainer 2 removed it: write a chainer.Chain whose links are assigned within `with self.init_scope():`"

# By path, or by path and name. A path stands for everything below it.
_REASONS = {
    "chainer.FunctionSet": _FUNCTION_SET,
    "chainer.backend.from_chx": _CHAINERX,
    "chainer.backend.to_chx": _CHAINERX,
    "chainer.backends.intel64": _IDEEP,
    "chainer.exporters": "export to Caffe is not supported: dbrdist-train --export writes a .safetensors file",
    "chainer.functions.theano": _THEANO,
    "chainer.links.TheanoFunction": _THEANO,
    "chainer.links.caffe": _CAFFE,
    "chainer.links.theano": _THEANO,
    "chainerx": _CHAINERX,
}


# Arguments that Chainer 2 removed, and what took their place.
_USING_CONFIG = "write `with chainer.using_config({}):` around the call"
_REMOVED_ARGUMENTS = {
    "bias": "give initial_bias=bias",
    "deterministic": _USING_CONFIG.format("'cudnn_deterministic', ..."),
    "requires_x_grad": "leave it out",
    "test": _USING_CONFIG.format("'train', not test"),
    "train": _USING_CONFIG.format("'train', train"),
    "use_cudnn": _USING_CONFIG.format("'use_cudnn', 'always' or 'never'"),
    "volatile": "write `with chainer.no_backprop_mode():` around the calls",
    "wscale": "give initialW=chainer.initializers.LeCunNormal(scale=wscale)",
}


def explain_argument(error: TypeError) -> None:
    """Add to an error what took the place of an argument that Chainer 2 removed."""
    found = re.search(r"(?:unexpected (?:keyword )?argument '|unknown arguments: )(\w+)", str(error))
    if found is not None and found[1] in _REMOVED_ARGUMENTS:
        error.add_note(f"Chainer 2 removed the argument {found[1]}: {_REMOVED_ARGUMENTS[found[1]]}")


def reason(path: str, name: str) -> str | None:
    """Why ``name`` of Chainer's module ``path`` is not there and what to use instead, where that is known."""
    parts = f"{path}.{name}".split(".")
    for n in range(len(parts), 0, -1):
        found = _REASONS.get(".".join(parts[:n]))
        if found is not None:
            return found
    if path == "chainer.functions" and name[:1].isupper() and hasattr(links, name):
        return f"Chainer 2 removed it: write chainer.links.{name}"
    return None


# Methods that move links and Variables to what does not exist here.
_METHODS = {"from_chx": _CHAINERX, "to_chx": _CHAINERX, "to_intel64": _IDEEP}
_OWNERS = (DeviceResident, Variable)


class _AbsentMethod:
    """Reading it is an AttributeError with the reason, so that ``hasattr`` is False."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, obj: object, owner: type) -> None:
        words = f"{owner.__name__!r} object has no attribute {self._name!r}: {_METHODS[self._name]}"
        raise AttributeError(words, name=self._name, obj=obj)


def serve() -> None:
    """Let links and Variables explain the methods."""
    for owner in _OWNERS:
        for name in _METHODS:
            setattr(owner, name, _AbsentMethod(name))


def withdraw() -> None:
    """Take the explanations away again."""
    for owner in _OWNERS:
        for name in _METHODS:
            delattr(owner, name)


def error(path: str, name: str) -> Exception:
    """The error for ``name`` of the module ``path``: an ImportError in ``from path import name``."""
    return missing_names.absent(path, name, (), reason=reason(path, name))
