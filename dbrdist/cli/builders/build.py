"""From a checked configuration to the things it names: data, network, loss; `build_updates` has the optimizer."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from dbrdist import datasets
from dbrdist import functions as F
from dbrdist.cli.configuration import components as c
from dbrdist.cli.configuration import resolve
from dbrdist.cli.configuration.derived import made_by
from dbrdist.cli.configuration.document import KeyPath
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config, interval
from dbrdist.cli.configuration.settings import Custom, Settings
from dbrdist.cli.output.refuse import WRONG, Refused
from dbrdist.cli.output.words import said
from dbrdist.comm import open_images_once
from dbrdist.core.array.backend import DeviceSpec, get_device, is_floating
from dbrdist.core.array.config import get_dtype
from dbrdist.core.array.types import Array
from dbrdist.core.model.link import Link
from dbrdist.core.usage import mistakes
from dbrdist.datasets.image import transforms as T
from dbrdist.datasets.loading.base import Batch
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.datasets.loading.transfer import ConcatWithAsyncTransfer
from dbrdist.errors import ConfigError
from dbrdist.training.extension import as_extension

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.datasets.public.npz import NpzDataset
    from dbrdist.datasets.table.combine import AugmentedDataset, TupleDataset

# Of transforms whose settings are written in another way than the arguments of what they make.
_ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "random_resized_crop": lambda s: {
        "size": s.size, "scale": (s.smallest, s.largest), "ratio": s.ratio, "method": s.method
    },
    "random_erasing": lambda s: {"p": s.p, "area": (s.smallest, s.largest), "value": s.value},
}  # fmt: skip
_MADE_BY: dict[str, Callable[..., Any]] = {
    "random_resized_crop": T.RandomResizedCrop,
    "random_erasing": datasets.RandomErasing,
}


def transform_of(settings: Settings) -> Any:
    """What the settings of a transform make."""
    name = settings.name
    make = _MADE_BY[name] if name in _MADE_BY else made_by(settings)
    given = _ARGUMENTS[name](settings) if name in _ARGUMENTS else arguments(settings, "per_batch")
    size = given.pop("size", None)
    return make(**given) if size is None else _by_epoch(size, functools.partial(make, **given))


def _by_epoch(size: int | tuple[tuple[int, ...], ...], make: Callable[[int], Any]) -> Any:
    """A transform of one size, or of a size that changes with the epoch."""
    return make(size) if isinstance(size, int) else T.ByEpoch({epoch: make(n) for epoch, n in size})


class Data(NamedTuple):
    """Both parts of the data; `test` is None for no evaluation, the others where there are no classes, or no names."""

    train: Any
    test: Any
    num_classes: int | None
    classes: list[str] | None = None


def arguments(settings: Settings, *without: str) -> dict[str, Any]:
    """The settings of a component as keyword arguments."""
    return {name: getattr(settings, name) for name in type(settings).model_fields if name not in ("name", *without)}


# ---- data --------------------------------------------------------------------------------------------------------


FindImages = Callable[[str], datasets.ImageIndex]


def find_images(config: Config, origin: Origin, comm: CommunicatorBase) -> FindImages:
    """What :func:`data` finds folders of images by: one rank has looked for all. Collective, and so is its error."""
    settings, roots = config.data, []
    if isinstance(settings, c.Cifar10):
        roots = [os.path.join(settings.root, part) for part in ("train", "test")]
    elif isinstance(settings, c.ImageFolder):
        roots = [os.path.join(settings.root, part) for part in (settings.train, settings.test) if part is not None]
    try:
        return {root: open_images_once(root, comm) for root in roots}.__getitem__
    except (OSError, ValueError) as error:
        raise Refused(f"{origin.where(('data',))}: data: {said(error)}", WRONG) from error


def data(config: Config, origin: Origin, find: FindImages = datasets.open_images) -> Data:
    """Open the data; ``find`` gives the index of a folder of images.

    Raises ConfigError, with the place in the configuration, where it cannot be.
    """
    made = _repeated(config, origin, _unmixed(config, origin, find))
    mixings = [(i, s) for i, s in enumerate(config.transforms.train) if isinstance(s, c.MIXING)]
    if not mixings:
        return made
    num_classes = getattr(config.model, "num_classes", None) or made.num_classes
    if num_classes is None:
        place, name = origin.where(("transforms", "train", mixings[0][0])), mixings[0][1].name
        words = f"{name} needs the number of classes; give your training data an attribute num_classes"
        raise ConfigError(f"{place}: transforms.train.{mixings[0][0]}: {words}")
    per = _batch_of_a_worker(config) if any(s.per_batch for _, s in mixings) else 1
    mixed = datasets.MixedDataset(made.train, [transform_of(s) for _, s in mixings], num_classes, per)
    return made._replace(train=mixed)


def _batch_of_a_worker(config: Config) -> int:
    """Examples of a virtual worker, or of the batch where there are none."""
    return config.batch_size // (config.virtual_workers or 1)


def _repeated(config: Config, origin: Origin, made: Data) -> Data:
    """The training data with each image several times in an epoch, if so configured."""
    if config.repeats == 1:
        return made
    if config.repeats > config.batch_size:
        words = f"must be at most the batch, {config.batch_size}, got {config.repeats}"
        raise ConfigError(f"{origin.where(('repeats',))}: repeats: {words}")
    return made._replace(train=datasets.RepeatedDataset(made.train, config.repeats, config.batch_size))


def _unmixed(config: Config, origin: Origin, find: FindImages) -> Data:
    settings = config.data
    if isinstance(settings, Custom):
        return _custom_data(config, settings, origin)
    try:
        if isinstance(settings, c.Cifar10):
            on_corrupt = _on_corrupt(settings)
            parts = datasets.get_cifar10_folders(settings.root, settings.augment, on_corrupt=on_corrupt, find=find)
            return Data(*parts, len(parts[0].classes), parts[0].classes)
        if isinstance(settings, c.ImageFolder):
            return _folders(config, settings, origin, find)
        train, test = _arrays(config)
        num_classes = _classes(train, getattr(config.model, "num_classes", 1) is None)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{origin.where(('data',))}: data: {said(error)}") from error
    return Data(_transformed(train, config, origin, "train"), _transformed(test, config, origin, "test"), num_classes)


def _on_corrupt(settings: c.Cifar10 | c.ImageFolder) -> str:
    return "error" if settings.corrupt == "fail" else "skip"


def _folders(config: Config, settings: c.ImageFolder, origin: Origin, find: FindImages) -> Data:
    prepare = None if settings.resize is None else T.Resize(settings.resize)
    options: dict[str, Any] = {"prepare": prepare, "cache": settings.cache, "on_corrupt": _on_corrupt(settings)}
    options |= {"decode": settings.decode}

    def folder(name: str, part: str) -> datasets.ImageFolder:
        root = os.path.join(settings.root, name)
        chain = T.Compose(transforms(getattr(config.transforms, part), part, origin))
        return datasets.ImageFolder(root, chain, index=find(root), **options)

    train = folder(settings.train, "train")
    test = None if settings.test is None else folder(settings.test, "test")
    if test is not None:
        datasets.check_same_classes(train.classes, test.classes, str(train.root), str(test.root))
    return Data(train, test, len(train.classes), train.classes)


def _arrays(config: Config) -> tuple[Any, Any]:
    settings = config.data
    if isinstance(settings, c.Digits):
        return datasets.get_digits(ndim=3)
    assert isinstance(settings, c.Npz)
    test = None if settings.test is None else datasets.NpzDataset(settings.test)
    return datasets.NpzDataset(settings.train), test


def _classes(dataset: NpzDataset | TupleDataset, is_needed: bool = False) -> int | None:
    """The number of classes of a dataset of arrays (inputs, labels); an error where it is needed and not to be seen."""
    labels = np.asarray(dataset.columns[1])
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        if is_needed:
            raise ValueError(
                f"expected one integer for each example as its label, got {labels.dtype} of {labels.shape}; with other "
                "targets give the number of outputs as model.num_classes"
            )
        return None
    if not labels.size:
        raise ValueError("the training set is empty")
    if not (labels >= 0).any():
        raise ValueError("expected labels from 0, but all of them are -1 or less, which stands for no label")
    num_classes = int(labels.max()) + 1
    if is_needed and num_classes > max(len(labels), _FEW_CLASSES):
        mistakes.warn(
            f"labels up to {num_classes - 1:,} make a network of {num_classes:,} outputs, for {len(labels):,} training "
            "examples; number the classes from 0 without gaps, or give model.num_classes"
        )
    return num_classes


_FEW_CLASSES = 1000  # so many need no word, however few examples a trial has


def _transformed(
    dataset: Any, config: Config, origin: Origin, part: str
) -> AugmentedDataset | TupleDataset | list[tuple[Array, Array]]:
    settings = getattr(config.transforms, part)
    if dataset is None or not (settings or _are_whole_numbers(dataset)):
        return dataset
    return datasets.AugmentedDataset(dataset, T.Compose([_ToHWC(settings), *transforms(settings, part, origin)]))


def _are_whole_numbers(dataset: Any) -> bool:
    """Whether the inputs are images of integers, which the network gets as float32 without any transform too."""
    columns = getattr(dataset, "columns", None) or (None,)
    return _are_images_of_integers(columns[0])


def _are_images_of_integers(x: Any) -> bool:
    return getattr(x, "ndim", 0) >= 4 and x.dtype.kind in "biu"


_FOR_GRAY = ("normalize", "random_flip")  # they work on (H, W) too; nothing of ours works on rows of numbers


class _ToHWC(T.Transform):
    """Images (C, H, W) as (H, W, C), which transforms take; inputs that are no images as they are, if ours allow it."""

    def __init__(self, settings: Sequence[Any] = ()) -> None:
        until_own = itertools.takewhile(lambda s: not isinstance(s, Custom), settings)  # which may make images of all
        ours = [s.name for s in until_own if not isinstance(s, c.MIXING)]
        self._refusing = {1: ours, 2: [name for name in ours if name not in _FOR_GRAY]}
        self._is_looked_at = not settings

    def image(self, image: Any, rng: np.random.Generator | None) -> Any:
        if refusing := self._refusing.get(getattr(image, "ndim", 0)):
            gray = "; gray images (N, H, W) are x[:, None]" if image.ndim == 2 else ""
            raise ValueError(f"expected images (C, H, W) for {refusing[0]}, got an example of {image.shape}{gray}")
        if not _is_image(image):
            return image
        if not self._is_looked_at:
            self._is_looked_at = True
            _see_channels_first(image.shape)
        return np.moveaxis(image, -3, -1)


def _see_channels_first(shape: tuple[int, ...]) -> None:
    """Warn of examples (H, W, C): transforms would mirror their colours and cut off their channels."""
    height, width, channels = shape[-3:]
    if min(height, width) >= 8 and (channels in (3, 4) or (channels == 1 and height == width)):
        mistakes.warn(
            f"transforms take an example of {shape} as (C, H, W), {height} channels of {width}x{channels} pixels; if "
            "it is (H, W, C), write x.transpose(0, 3, 1, 2)"
        )


class _ToCHW(T.ToCHW):
    """The way back; inputs that are no images as they are."""

    def image(self, image: Array, rng: np.random.Generator | None) -> Any:
        return super().image(image, rng) if _is_image(image) else image


def _is_image(x: Array) -> bool:
    return getattr(x, "ndim", 0) >= 3


def transforms(settings: tuple[Any, ...], part: str, origin: Origin) -> list[Any]:
    """The transforms in order, and at the end images as (C, H, W)."""
    made = [
        _UserTransform(s, ("transforms", part, i), origin) if isinstance(s, Custom) else transform_of(s)
        for i, s in enumerate(settings)
        if not isinstance(s, c.MIXING)
    ]
    return [*made, _ToCHW()]


class _UserTransform:
    """A transform of the user's own, created again in each loader process: closures cannot be sent there."""

    def __init__(self, settings: Custom, path: KeyPath, origin: Origin):
        self._source = (settings, path, origin)
        self._transform = resolve.call(*self._source)

    def __call__(self, example: Any, rng: Any = None) -> Any:
        return self._transform(example, rng)

    def __reduce__(self) -> Any:
        return _UserTransform, self._source


def _custom_data(config: Config, settings: Custom, origin: Origin) -> Data:
    made = resolve.call(settings, ("data",), origin)
    if not isinstance(made, tuple) or len(made) != 2 or not hasattr(made[0], "__len__"):
        raise ConfigError(
            f"{origin.where(('data',))}: data: expected (train, test) of datasets from {settings.name!r} (test "
            f"None for no evaluation), got {type(made).__name__}"
        )
    train, test = made
    if test is not None and not (hasattr(test, "__len__") and hasattr(test, "__getitem__")):
        raise ConfigError(
            f"{origin.where(('data',))}: data: expected a dataset, with len() and [i], as the test data from "
            f"{settings.name!r}, or None for no evaluation, got {type(test).__name__}; list(...) makes one of an "
            "iterator"
        )
    num_classes = getattr(train, "num_classes", None)
    names = getattr(train, "classes", None)
    is_named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    for part in ("train", "test"):
        if getattr(config.transforms, part) and made[part == "test"] is None:
            raise ConfigError(f"{origin.where(('transforms', part))}: transforms.{part}: there is no {part} data")
    made_of = (_transformed(train, config, origin, "train"), _transformed(test, config, origin, "test"))
    return Data(*made_of, num_classes, list(names) if is_named and names else None)


def converter_for(config: Config) -> Callable[[Any, Any], Any]:
    """The converter of a run: a network of the program's own may take images of integers as they are."""
    convert = converter(config.dtype)
    if isinstance(config.model, Custom):
        return convert

    def convert_images(batch: Any, device: DeviceSpec | None = None) -> Any:
        arrays = convert(batch, device)
        if isinstance(arrays, tuple) and arrays and _are_images_of_integers(arrays[0]):
            return arrays[0].astype(get_dtype(config.dtype)), *arrays[1:]
        return arrays

    return convert_images


def converter(dtype: DTypeLike) -> Callable[[Any, Any], Any]:
    """Stacks examples and casts floating numbers to `dtype`; a GPU gets them from pinned memory while it computes."""
    dtype = get_dtype(dtype)
    send = ConcatWithAsyncTransfer()

    def cast(x: Any) -> Array:
        own = x.dtype
        return x if own == dtype or own.kind in "biu" or not is_floating(own) else x.astype(dtype)

    def convert(batch: Any, device: DeviceSpec | None = None) -> Any:
        if device is not None and get_device(device).module != "numpy":
            arrays = send.convert(batch, device, dtype=dtype)
        else:
            is_here = device is None and isinstance(batch, Batch)
            arrays = batch.finished(dtype).arrays if is_here else concat_examples(batch, device)
        if isinstance(arrays, tuple):
            for x in arrays:
                if x.dtype != dtype and x.dtype.kind not in "biu":
                    return tuple(map(cast, arrays))
            return arrays
        return {key: cast(x) for key, x in arrays.items()} if isinstance(arrays, dict) else cast(arrays)

    return convert


# ---- the network -------------------------------------------------------------------------------------------------


def model_recipe(config: Config, origin: Origin, num_classes: int | None) -> dict[str, Any]:
    """How to make the network again without this configuration: an importable name and its keyword arguments."""
    settings = config.model
    if isinstance(settings, Custom):
        return {"callable": settings.name, "args": settings.args}
    args = arguments(settings)
    args["num_classes"] = args["num_classes"] or num_classes
    if args["num_classes"] is None:
        raise ConfigError(
            f"{origin.where(('model',))}: model.num_classes: is required with data that does not say how many classes "
            "it has"
        )
    return {"callable": f"dbrdist.models:{made_by(settings).__name__}", "args": args}


def model(config: Config, origin: Origin, recipe: dict[str, Any]) -> Link:
    """Make the network."""
    settings = config.model
    if not isinstance(settings, Custom):
        made: Link = made_by(settings)(**recipe["args"])
        return made
    made = resolve.call(settings, ("model",), origin)
    if not isinstance(made, Link):
        raise ConfigError(
            f"{origin.where(('model',))}: model: expected a Link from {settings.name!r}, got {type(made).__name__}"
        )
    return made


def loss(config: Config, origin: Origin) -> Callable[[Any, Any], Any] | None:
    """The loss as a function of outputs and labels; None where the model gives it itself."""
    settings = config.loss
    if isinstance(settings, Custom):
        return functools.partial(resolve.find(settings, ("loss",), origin), **settings.args)
    if isinstance(settings, c.PlainLoss):
        return None if settings.name == "model" else F.mean_squared_error
    function, fields = made_by(settings), type(settings).model_fields
    given = {name: value for name, value in arguments(settings).items() if value != fields[name].default}
    return functools.partial(function, **given) if given else function


def metrics(config: Config, origin: Origin) -> dict[str, Callable[[Any, Any], Any]]:
    """Functions of outputs and labels, by the name under which they are reported."""
    found: dict[str, Callable[[Any, Any], Any]] = {}
    for i, settings in enumerate(config.metrics):
        if isinstance(settings, c.TopKAccuracy):
            found[f"top{settings.k}_accuracy"] = functools.partial(F.top_k_accuracy, **arguments(settings))
            continue
        function = resolve.find(settings, ("metrics", i), origin)
        found[settings.name.rpartition(":")[2]] = functools.partial(function, **settings.args)
    return found


def extensions(config: Config, origin: Origin) -> list[tuple[Any, Any]]:
    """The user's own extensions with their triggers, None for their own.

    The arguments are part of what an extension's state is about, such as the name of a metric: with others it begins
    anew. Of several that one callable makes, each is found by its arguments, whatever their order is.
    """
    made = []
    for i, settings in enumerate(config.extensions):
        own = resolve.call(settings, ("extensions", i), origin)
        try:
            extension = as_extension(own)
        except TypeError as error:
            where = origin.where(("extensions", i))
            raise ConfigError(f"{where}: extensions.{i}: {settings.name!r}: {error}") from error
        extension.subject = extension.subject or f"{settings.name} {settings.args}"
        made.append((extension, None if settings.every is None else interval(settings.every)))
    return made
