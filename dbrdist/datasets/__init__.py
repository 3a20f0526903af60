"""Examples, their order, and how they become batches."""

from dbrdist.core.names.constructors import explain_constructors as _explain_constructors
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.datasets.image.augment import ColorJitter, PCALighting, RandAugment, RandomErasing, TrivialAugment
from dbrdist.datasets.image.folder import (
    ImageDataset,
    ImageFolder,
    LabeledImageDataset,
    check_same_classes,
    get_cifar10_folders,
    get_image_folders,
)
from dbrdist.datasets.image.index import ImageIndex, open_images
from dbrdist.datasets.image.mixing import CutMix, MixedDataset, Mixing, Mixup
from dbrdist.datasets.image.repeated import RepeatedDataset
from dbrdist.datasets.image.transforms import (
    ByEpoch,
    CenterCrop,
    CenterResizedCrop,
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToCHW,
    Transform,
)
from dbrdist.datasets.loading.base import Batch, DatasetMixin, SkipExample, block, block_bounds
from dbrdist.datasets.public.cifar import get_cifar10, get_cifar100
from dbrdist.datasets.public.digits import get_digits
from dbrdist.datasets.public.mnist import (
    get_fashion_mnist,
    get_fashion_mnist_labels,
    get_kuzushiji_mnist,
    get_kuzushiji_mnist_labels,
    get_mnist,
)
from dbrdist.datasets.public.npz import NpzDataset
from dbrdist.datasets.public.pickled import (
    PickleDataset,
    PickleDatasetWriter,
    open_pickle_dataset,
    open_pickle_dataset_writer,
)
from dbrdist.datasets.public.ptb import get_ptb_words, get_ptb_words_vocabulary
from dbrdist.datasets.public.svhn import get_svhn
from dbrdist.datasets.public.text import TextDataset
from dbrdist.datasets.public.zipped import LabeledZippedImageDataset, MultiZippedImageDataset, ZippedImageDataset
from dbrdist.datasets.table.combine import (
    AugmentedDataset,
    ConcatenatedDataset,
    DictDataset,
    TransformDataset,
    TupleDataset,
)
from dbrdist.datasets.table.split import (
    SubDataset,
    get_cross_validation_datasets,
    get_cross_validation_datasets_random,
    split_dataset,
    split_dataset_n,
    split_dataset_n_random,
    split_dataset_random,
)

__all__ = [
    "AugmentedDataset",
    "Batch",
    "ByEpoch",
    "CenterCrop",
    "CenterResizedCrop",
    "ColorJitter",
    "Compose",
    "ConcatenatedDataset",
    "CutMix",
    "DatasetMixin",
    "DictDataset",
    "ImageDataset",
    "ImageFolder",
    "ImageIndex",
    "LabeledImageDataset",
    "LabeledZippedImageDataset",
    "MixedDataset",
    "Mixing",
    "Mixup",
    "MultiZippedImageDataset",
    "Normalize",
    "NpzDataset",
    "PCALighting",
    "PickleDataset",
    "PickleDatasetWriter",
    "RandAugment",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RepeatedDataset",
    "Resize",
    "SkipExample",
    "SubDataset",
    "TextDataset",
    "ToCHW",
    "Transform",
    "TransformDataset",
    "TrivialAugment",
    "TupleDataset",
    "ZippedImageDataset",
    "block",
    "block_bounds",
    "check_same_classes",
    "get_cifar10",
    "get_cifar10_folders",
    "get_cifar100",
    "get_cross_validation_datasets",
    "get_cross_validation_datasets_random",
    "get_digits",
    "get_fashion_mnist",
    "get_fashion_mnist_labels",
    "get_image_folders",
    "get_kuzushiji_mnist",
    "get_kuzushiji_mnist_labels",
    "get_mnist",
    "get_ptb_words",
    "get_ptb_words_vocabulary",
    "get_svhn",
    "open_images",
    "open_pickle_dataset",
    "open_pickle_dataset_writer",
    "split_dataset",
    "split_dataset_n",
    "split_dataset_n_random",
    "split_dataset_random",
]

_explain_constructors(globals())
__getattr__ = _explained(__name__)
