"""Links: functions with parameters."""

from typing import TYPE_CHECKING

from dbrdist.core.names.constructors import explain_constructors as _explain_constructors
from dbrdist.core.names.later import loaded_when_named as _loaded_when_named
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.links.classifier import Classifier
from dbrdist.links.connection import Bilinear, EmbedID, Linear
from dbrdist.links.convolution import Convolution2D, Deconvolution2D
from dbrdist.links.convolution_bn import Conv2DBNActiv, conv_bn
from dbrdist.links.normalization import (
    BatchNormalization,
    BatchRenormalization,
    DecorrelatedBatchNormalization,
    GroupNormalization,
    LayerNormalization,
    use_last_batch,
)

if TYPE_CHECKING:
    from dbrdist.links.attention import MultiHeadAttention, RMSNormalization, TransformerBlock
    from dbrdist.links.blocks import Highway, Inception, InceptionBN, Maxout, SimplifiedDropconnect
    from dbrdist.links.convolution_nd import (
        Convolution1D,
        Convolution3D,
        ConvolutionND,
        Deconvolution1D,
        Deconvolution3D,
        DeconvolutionND,
        DepthwiseConvolution2D,
        DilatedConvolution2D,
        MLPConvolution2D,
    )
    from dbrdist.links.elementwise import Bias, Parameter, PReLU, Scale, Swish
    from dbrdist.links.local_convolution import DeformableConvolution2D, LocalConvolution2D
    from dbrdist.links.loss import BinaryHierarchicalSoftmax, BlackOut, CRF1d, NegativeSampling
    from dbrdist.links.model.vision.googlenet import GoogLeNet
    from dbrdist.links.model.vision.resnet import ResNet50Layers, ResNet101Layers, ResNet152Layers
    from dbrdist.links.model.vision.vgg import VGG16Layers, VGG19Layers
    from dbrdist.links.n_step_rnn import (
        NStepBiGRU,
        NStepBiLSTM,
        NStepBiRNNReLU,
        NStepBiRNNTanh,
        NStepGRU,
        NStepLSTM,
        NStepRNNReLU,
        NStepRNNTanh,
    )
    from dbrdist.links.rnn import (
        GRU,
        LSTM,
        ChildSumTreeLSTM,
        NaryTreeLSTM,
        StatefulGRU,
        StatefulMGU,
        StatefulPeepholeLSTM,
        StatefulZoneoutLSTM,
        StatelessGRU,
        StatelessLSTM,
        StatelessMGU,
    )

# Files that are loaded when one of their links is first named: these explain their constructors themselves.
_LATER = {
    "attention": "MultiHeadAttention RMSNormalization TransformerBlock",
    "blocks": "Highway Inception InceptionBN Maxout SimplifiedDropconnect",
    "convolution_nd": (
        "Convolution1D Convolution3D ConvolutionND Deconvolution1D Deconvolution3D DeconvolutionND "
        "DepthwiseConvolution2D DilatedConvolution2D MLPConvolution2D"
    ),
    "elementwise": "Bias Parameter PReLU Scale Swish",
    "local_convolution": "DeformableConvolution2D LocalConvolution2D",
    "loss": "BinaryHierarchicalSoftmax BlackOut CRF1d NegativeSampling",
    "model.vision.googlenet": "GoogLeNet",
    "model.vision.resnet": "ResNet50Layers ResNet101Layers ResNet152Layers",
    "model.vision.vgg": "VGG16Layers VGG19Layers",
    "n_step_rnn": "NStepBiGRU NStepBiLSTM NStepBiRNNReLU NStepBiRNNTanh NStepGRU NStepLSTM NStepRNNReLU NStepRNNTanh",
    "rnn": (
        "GRU LSTM ChildSumTreeLSTM NaryTreeLSTM StatefulGRU StatefulMGU StatefulPeepholeLSTM StatefulZoneoutLSTM "
        "StatelessGRU StatelessLSTM StatelessMGU"
    ),
}

__all__ = [
    "GRU",
    "LSTM",
    "BatchNormalization",
    "BatchRenormalization",
    "Bias",
    "Bilinear",
    "BinaryHierarchicalSoftmax",
    "BlackOut",
    "CRF1d",
    "ChildSumTreeLSTM",
    "Classifier",
    "Conv2DBNActiv",
    "Convolution1D",
    "Convolution2D",
    "Convolution3D",
    "ConvolutionND",
    "Deconvolution1D",
    "Deconvolution2D",
    "Deconvolution3D",
    "DeconvolutionND",
    "DecorrelatedBatchNormalization",
    "DeformableConvolution2D",
    "DepthwiseConvolution2D",
    "DilatedConvolution2D",
    "EmbedID",
    "GoogLeNet",
    "GroupNormalization",
    "Highway",
    "Inception",
    "InceptionBN",
    "LayerNormalization",
    "Linear",
    "LocalConvolution2D",
    "MLPConvolution2D",
    "Maxout",
    "MultiHeadAttention",
    "NStepBiGRU",
    "NStepBiLSTM",
    "NStepBiRNNReLU",
    "NStepBiRNNTanh",
    "NStepGRU",
    "NStepLSTM",
    "NStepRNNReLU",
    "NStepRNNTanh",
    "NaryTreeLSTM",
    "NegativeSampling",
    "PReLU",
    "Parameter",
    "RMSNormalization",
    "ResNet50Layers",
    "ResNet101Layers",
    "ResNet152Layers",
    "Scale",
    "SimplifiedDropconnect",
    "StatefulGRU",
    "StatefulMGU",
    "StatefulPeepholeLSTM",
    "StatefulZoneoutLSTM",
    "StatelessGRU",
    "StatelessLSTM",
    "StatelessMGU",
    "Swish",
    "TransformerBlock",
    "VGG16Layers",
    "VGG19Layers",
    "conv_bn",
    "use_last_batch",
]

_explain_constructors(globals())
__getattr__, __dir__ = _loaded_when_named(__name__, _LATER, _explained(__name__))
