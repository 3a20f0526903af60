"""Networks."""

from dbrdist.models.lenet import LeNet
from dbrdist.models.mlp import MLP
from dbrdist.models.resnet import ResNet, ResNet20, ResNet50, ResNet56, ResNetCIFAR

__all__ = ["MLP", "LeNet", "ResNet", "ResNet20", "ResNet50", "ResNet56", "ResNetCIFAR"]
