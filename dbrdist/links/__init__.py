"""Parameters that meet data."""

from dbrdist.links.convolution import Convolution2D, Deconvolution2D
from dbrdist.links.normalization import BatchNormalization

__all__ = ["BatchNormalization", "Convolution2D", "Deconvolution2D"]
