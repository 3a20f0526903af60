"""Differentiable operations. They take arrays or Variables and always return Variables."""

from collections.abc import Callable as _Callable
from typing import TYPE_CHECKING
from typing import Any as _Any

from dbrdist.core.names.later import loaded_when_named as _loaded_when_named
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.core.tape.elementwise_table import PUBLIC as _PUBLIC
from dbrdist.core.tape.named_errors import naming_errors as _naming_errors
from dbrdist.functions.activation import (
    crelu,
    gelu,
    log_softmax,
    maxout,
    prelu,
    softmax,
    swish,
)
from dbrdist.functions.array import (
    cast,
    concat,
    copy,
    dstack,
    hstack,
    identity,
    repeat,
    separate,
    split_axis,
    stack,
    tile,
    vstack,
)
from dbrdist.functions.class_loss import (
    softmax_cross_entropy,
)
from dbrdist.functions.connection import bilinear, embed_id, linear
from dbrdist.functions.convolution import convolution_2d, deconvolution_2d
from dbrdist.functions.convolution_nd import (
    convolution_1d,
    convolution_3d,
    convolution_nd,
    deconvolution_1d,
    deconvolution_3d,
    deconvolution_nd,
    depthwise_convolution_2d,
    dilated_convolution_2d,
)
from dbrdist.functions.evaluation import (
    accuracy,
    binary_accuracy,
    classification_summary,
    f1_score,
    precision,
    r2_score,
    recall,
)
from dbrdist.functions.loss import (
    absolute_error,
    hinge,
    huber_loss,
    mean_absolute_error,
    mean_squared_error,
    sigmoid_cross_entropy,
    sigmoid_focal_loss,
    squared_error,
)
from dbrdist.functions.math import (
    add,
    argmax,
    argmin,
    average,
    bias,
    ceil,
    clip,
    fix,
    floor,
    fmod,
    logsumexp,
    max,
    mean,
    min,
    scale,
    sign,
    sum,
)
from dbrdist.functions.n_step_rnn import (
    n_step_bigru,
    n_step_bilstm,
    n_step_birnn,
    n_step_gru,
    n_step_lstm,
    n_step_rnn,
)
from dbrdist.functions.noise import dropout, gaussian, gumbel_softmax, rrelu, simplified_dropconnect, zoneout
from dbrdist.functions.normalization import batch_normalization, fixed_batch_normalization
from dbrdist.functions.picking import (
    diagonal,
    flip,
    fliplr,
    flipud,
    get_item,
    permutate,
    scatter_add,
    select_item,
    where,
)
from dbrdist.functions.pooling import average_pooling_2d, global_average_pooling_2d, max_pooling_2d
from dbrdist.functions.products import (
    batch_matmul,
    matmul,
    tensordot,
)
from dbrdist.functions.rectifier import relu
from dbrdist.functions.shapes import (
    broadcast,
    broadcast_to,
    expand_dims,
    flatten,
    moveaxis,
    reshape,
    rollaxis,
    squeeze,
    sum_to,
    swapaxes,
    transpose,
)
from dbrdist.functions.special import (
    polygamma,
    zeta,
)

if TYPE_CHECKING:
    from dbrdist.functions import fused_block as fused_block
    from dbrdist.functions import residual as residual
    from dbrdist.functions.attention import multi_head_attention, rms_normalization, scaled_dot_product_attention
    from dbrdist.functions.classification import binary_cross_entropy, top_k_accuracy
    from dbrdist.functions.cumulative import (
        cumprod,
        cumsum,
        prod,
    )
    from dbrdist.functions.embedding_loss import (
        contrastive,
        cross_covariance,
        decov,
        discriminative_margin_based_clustering_loss,
        triplet,
    )
    from dbrdist.functions.example_normalization import (
        group_normalization,
        layer_normalization,
        local_response_normalization,
        normalize,
    )
    from dbrdist.functions.image import (
        depth2space,
        im2col,
        resize_images,
        space2depth,
        spatial_transformer_grid,
        spatial_transformer_sampler,
    )
    from dbrdist.functions.likelihood import (
        bernoulli_nll,
        gaussian_kl_divergence,
        gaussian_nll,
        laplace_nll,
    )
    from dbrdist.functions.linalg import (
        batch_det,
        batch_inv,
        batch_l2_norm_squared,
        cholesky,
        det,
        einsum,
        fft,
        ifft,
        inv,
    )
    from dbrdist.functions.local_convolution import deformable_convolution_2d_sampler, local_convolution_2d, shift
    from dbrdist.functions.padding import pad
    from dbrdist.functions.pooling_nd import (
        average_pooling_1d,
        average_pooling_3d,
        average_pooling_nd,
        max_pooling_1d,
        max_pooling_3d,
        max_pooling_nd,
        spatial_pyramid_pooling_2d,
        unpooling_1d,
        unpooling_2d,
        unpooling_3d,
        unpooling_nd,
        upsampling_2d,
    )
    from dbrdist.functions.recompute import forget
    from dbrdist.functions.regions import (
        roi_average_align_2d,
        roi_average_pooling_2d,
        roi_max_align_2d,
        roi_max_pooling_2d,
        roi_pooling_2d,
    )
    from dbrdist.functions.rnn import lstm, slstm, tree_lstm
    from dbrdist.functions.sequence import (
        pad_sequence,
        transpose_sequence,
    )
    from dbrdist.functions.sequence_loss import (
        argmax_crf1d,
        black_out,
        connectionist_temporal_classification,
        crf1d,
        negative_sampling,
    )
    from dbrdist.functions.sparse import sparse_matmul
    from dbrdist.functions.strided import as_strided
    from dbrdist.functions.whitening import (
        batch_renormalization,
        decorrelated_batch_normalization,
        fixed_batch_renormalization,
        fixed_decorrelated_batch_normalization,
    )

# Files that are loaded when one of their functions is first named; not those that are called as a function is.
_LATER = {
    "attention": "multi_head_attention rms_normalization scaled_dot_product_attention",
    "classification": "binary_cross_entropy top_k_accuracy",
    "cumulative": "cumprod cumsum prod",
    "embedding_loss": "contrastive cross_covariance decov discriminative_margin_based_clustering_loss triplet",
    "example_normalization": "group_normalization layer_normalization local_response_normalization normalize",
    "fused_block": "",
    "image": "depth2space im2col resize_images space2depth spatial_transformer_grid spatial_transformer_sampler",
    "likelihood": "bernoulli_nll gaussian_kl_divergence gaussian_nll laplace_nll",
    "linalg": "batch_det batch_inv batch_l2_norm_squared cholesky det einsum fft ifft inv",
    "local_convolution": "deformable_convolution_2d_sampler local_convolution_2d shift",
    "padding": "pad",
    "pooling_nd": (
        "average_pooling_1d average_pooling_3d average_pooling_nd max_pooling_1d max_pooling_3d max_pooling_nd "
        "spatial_pyramid_pooling_2d unpooling_1d unpooling_2d unpooling_3d unpooling_nd upsampling_2d"
    ),
    "recompute": "forget",
    "regions": "roi_average_align_2d roi_average_pooling_2d roi_max_align_2d roi_max_pooling_2d roi_pooling_2d",
    "residual": "",
    "rnn": "lstm slstm tree_lstm",
    "sequence": "pad_sequence transpose_sequence",
    "sequence_loss": "argmax_crf1d black_out connectionist_temporal_classification crf1d negative_sampling",
    "sparse": "sparse_matmul",
    "strided": "as_strided",
    "whitening": (
        "batch_renormalization decorrelated_batch_normalization fixed_batch_renormalization "
        "fixed_decorrelated_batch_normalization"
    ),
}

__all__ = [
    "absolute_error",
    "accuracy",
    "add",
    "argmax",
    "argmax_crf1d",
    "argmin",
    "as_strided",
    "average",
    "average_pooling_1d",
    "average_pooling_2d",
    "average_pooling_3d",
    "average_pooling_nd",
    "batch_det",
    "batch_inv",
    "batch_l2_norm_squared",
    "batch_matmul",
    "batch_normalization",
    "batch_renormalization",
    "bernoulli_nll",
    "bias",
    "bilinear",
    "binary_accuracy",
    "binary_cross_entropy",
    "black_out",
    "broadcast",
    "broadcast_to",
    "cast",
    "ceil",
    "cholesky",
    "classification_summary",
    "clip",
    "concat",
    "connectionist_temporal_classification",
    "contrastive",
    "convolution_1d",
    "convolution_2d",
    "convolution_3d",
    "convolution_nd",
    "copy",
    "crelu",
    "crf1d",
    "cross_covariance",
    "cumprod",
    "cumsum",
    "deconvolution_1d",
    "deconvolution_2d",
    "deconvolution_3d",
    "deconvolution_nd",
    "decorrelated_batch_normalization",
    "decov",
    "deformable_convolution_2d_sampler",
    "depth2space",
    "depthwise_convolution_2d",
    "det",
    "diagonal",
    "dilated_convolution_2d",
    "discriminative_margin_based_clustering_loss",
    "dropout",
    "dstack",
    "einsum",
    "embed_id",
    "expand_dims",
    "f1_score",
    "fft",
    "fix",
    "fixed_batch_normalization",
    "fixed_batch_renormalization",
    "fixed_decorrelated_batch_normalization",
    "flatten",
    "flip",
    "fliplr",
    "flipud",
    "floor",
    "fmod",
    "forget",
    "gaussian",
    "gaussian_kl_divergence",
    "gaussian_nll",
    "gelu",
    "get_item",
    "global_average_pooling_2d",
    "group_normalization",
    "gumbel_softmax",
    "hinge",
    "hstack",
    "huber_loss",
    "identity",
    "ifft",
    "im2col",
    "inv",
    "laplace_nll",
    "layer_normalization",
    "linear",
    "local_convolution_2d",
    "local_response_normalization",
    "log_softmax",
    "logsumexp",
    "lstm",
    "matmul",
    "max",
    "max_pooling_1d",
    "max_pooling_2d",
    "max_pooling_3d",
    "max_pooling_nd",
    "maxout",
    "mean",
    "mean_absolute_error",
    "mean_squared_error",
    "min",
    "moveaxis",
    "multi_head_attention",
    "n_step_bigru",
    "n_step_bilstm",
    "n_step_birnn",
    "n_step_gru",
    "n_step_lstm",
    "n_step_rnn",
    "negative_sampling",
    "normalize",
    "pad",
    "pad_sequence",
    "permutate",
    "polygamma",
    "precision",
    "prelu",
    "prod",
    "r2_score",
    "recall",
    "relu",
    "repeat",
    "reshape",
    "resize_images",
    "rms_normalization",
    "roi_average_align_2d",
    "roi_average_pooling_2d",
    "roi_max_align_2d",
    "roi_max_pooling_2d",
    "roi_pooling_2d",
    "rollaxis",
    "rrelu",
    "scale",
    "scaled_dot_product_attention",
    "scatter_add",
    "select_item",
    "separate",
    "shift",
    "sigmoid_cross_entropy",
    "sigmoid_focal_loss",
    "sign",
    "simplified_dropconnect",
    "slstm",
    "softmax",
    "softmax_cross_entropy",
    "space2depth",
    "sparse_matmul",
    "spatial_pyramid_pooling_2d",
    "spatial_transformer_grid",
    "spatial_transformer_sampler",
    "split_axis",
    "squared_error",
    "squeeze",
    "stack",
    "sum",
    "sum_to",
    "swapaxes",
    "swish",
    "tensordot",
    "tile",
    "top_k_accuracy",
    "transpose",
    "transpose_sequence",
    "tree_lstm",
    "triplet",
    "unpooling_1d",
    "unpooling_2d",
    "unpooling_3d",
    "unpooling_nd",
    "upsampling_2d",
    "vstack",
    "where",
    "zeta",
    "zoneout",
]

# A function made from a row is public where it is declared, without a line here.
_of_rows = [name for name in _PUBLIC if name not in __all__]
globals().update({name: _PUBLIC[name] for name in _of_rows})
__all__.extend(_of_rows)


def _shown(function: _Callable[..., _Any]) -> _Callable[..., _Any]:
    """What stands here for a file's function: it names its operands in errors, and pickle finds it here."""
    shown = _naming_errors(function)
    shown.__module__ = __name__
    return shown


for _name in __all__:  # but for functions made from rows, which do so themselves, and those that are not loaded yet
    if _name in globals() and globals()[_name].__module__ != __name__:
        globals()[_name] = _shown(globals()[_name])

__getattr__, __dir__ = _loaded_when_named(__name__, _LATER, _explained(__name__), _shown)
