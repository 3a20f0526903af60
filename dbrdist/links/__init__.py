"""Links: parameters that meet data."""

from dbrdist.core.missing_names import explained as _explained
from dbrdist.links.classifier import Classifier
from dbrdist.links.connection import Bilinear, EmbedID, Linear
from dbrdist.links.convolution import Convolution2D, Deconvolution2D
from dbrdist.links.elementwise import Bias, Parameter, PReLU, Scale, Swish
from dbrdist.links.normalization import BatchNormalization, GroupNormalization, LayerNormalization

__all__ = [
    "BatchNormalization",
    "Bias",
    "Bilinear",
    "Classifier",
    "Convolution2D",
    "Deconvolution2D",
    "EmbedID",
    "GroupNormalization",
    "LayerNormalization",
    "Linear",
    "PReLU",
    "Parameter",
    "Scale",
    "Swish",
]

__getattr__ = _explained(__name__)
