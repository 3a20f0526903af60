"""Networks."""

from dbrdist.core.names.constructors import explain_constructors as _explain_constructors
from dbrdist.models.lenet import LeNet
from dbrdist.models.mlp import MLP
from dbrdist.models.resnet import (
    ResNet,
    ResNet18,
    ResNet20,
    ResNet34,
    ResNet50,
    ResNet56,
    ResNet101,
    ResNet152,
    ResNetCIFAR,
)

__all__ = [
    "MLP",
    "LeNet",
    "ResNet",
    "ResNet18",
    "ResNet20",
    "ResNet34",
    "ResNet50",
    "ResNet56",
    "ResNet101",
    "ResNet152",
    "ResNetCIFAR",
]

_explain_constructors(globals())
