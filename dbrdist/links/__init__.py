"""Links: parameters that meet data."""

from dbrdist.links.classifier import Classifier
from dbrdist.links.connection import Bilinear, EmbedID, Linear
from dbrdist.links.elementwise import Bias, Parameter, PReLU, Scale, Swish

__all__ = [
    "Bias",
    "Bilinear",
    "Classifier",
    "EmbedID",
    "Linear",
    "PReLU",
    "Parameter",
    "Scale",
    "Swish",
]
