"""What the networks of this package share: layers by name, images in, weights from a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from dbrdist import functions as F
from dbrdist.core.array.backend import is_array
from dbrdist.core.array.config import no_backprop_mode, using_config
from dbrdist.core.array.types import Array
from dbrdist.core.files import safetensors
from dbrdist.core.files.dataset_root import get_dataset_root
from dbrdist.core.files.serializer import NpzDeserializer, read_npz
from dbrdist.core.model.chain import Chain
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.errors import CheckpointError
from dbrdist.links.model.vision import pixels
from dbrdist.utils.imgproc import oversample as ten_crops

Functions: TypeAlias = "dict[str, list[Callable[[Variable], Variable]]]"  # of each stage, by its name


class VisionLayers(Chain):
    """A network of named layers, for images of 224 x 224 pixels and the 1000 classes of ImageNet.

    A subclass lists its layers in :attr:`functions`. Its weights come from a file that you name:

    - `.npz` as Chainer saves them (`serializers.save_npz`);
    - `.safetensors` in torchvision's names, or with the paths of an .npz file with dots (`conv1_1.W`).

    With torchvision's weights the network computes as torchvision does, `extract` and `predict` prepare images as
    there, and `convention` is "torchvision". An .npz file that you save from it does not know that: after loading it,
    call `use_torchvision()`.

    `pretrained_model="auto"` takes Chainer's file from `pfnet/chainer/models` below
    :func:`dbrdist.dataset.get_dataset_root`. Nothing is downloaded. None draws initial values.
    """

    num_classes: ClassVar[int] = 1000
    mean: ClassVar[tuple[float, float, float]]  # of blue, green and red, which Chainer's weights expect less
    features: ClassVar[str]  # the layer that extract gives
    branches: ClassVar[Mapping[str, str]] = {}  # layers beside the trunk: where each begins
    convention = "chainer"
    weights_name: str  # of Chainer's file

    @property
    def functions(self) -> Functions:
        """The layers by name: each is a list of functions, called one after the other."""
        raise NotImplementedError(f"{type(self).__name__} must define functions")

    @property
    def available_layers(self) -> list[str]:
        """The names of the layers."""
        return list(self.functions)

    def forward(self, x: Operand, layers: Iterable[str] | None = None) -> dict[str, Any]:
        """The outputs of the layers that are asked for, by name.

        Args:
            x: (N, 3, 224, 224), prepared images.
            layers: names in :attr:`available_layers`; None for `["prob"]`, the probabilities (N, num_classes).
        """
        functions = self.functions
        wanted = ["prob"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
        unknown = [name for name in wanted if name not in functions]
        if unknown:
            raise ValueError(
                f"{type(self).__name__}: layers: expected names of {', '.join(functions)}, got {unknown[0]!r}"
            )
        kept: dict[str, Any] = {}
        h = x
        for name, calls in functions.items():
            if all(other in kept for other in wanted):
                break
            if name in self.branches:
                if name not in wanted:
                    continue
                h = kept[self.branches[name]]
            for call in calls:
                h = call(h)
            if name in wanted or name in self.branches.values():
                kept[name] = h
        return {name: kept[name] for name in wanted}

    def extract(
        self, images: Sequence[Any], layers: Iterable[str] | None = None, size: tuple[int, int] | None = (224, 224)
    ) -> dict[str, Any]:
        """As a call, for images as they are: Pillow's, or arrays of (H, W), (3, H, W) or (H, W, 3) from 0 to 255.

        Args:
            images: a sequence of such images, of any sizes.
            layers: as for a call; None for the layer before the last.
            size: columns and rows that they are resized to; None where all have one size already.

        Training mode and recording of the graph are those of the configuration: for features alone, call it within
        `using_config("train", False)` and `no_backprop_mode()`.
        """
        return self(self._send(self._batch(images, size)), [self.features] if layers is None else layers)

    def predict(self, images: Sequence[Any], oversample: bool = True) -> Any:
        """The probabilities (N, num_classes) of images; with `oversample` the mean over ten crops of each.

        Args:
            images: as for :meth:`extract`.
            oversample: whether ten crops of each image are averaged; default True.
        """
        x = self._batch(images, (256, 256))
        x = ten_crops(x, (224, 224)).astype(x.dtype) if oversample else x[:, :, 16:240, 16:240]
        with no_backprop_mode(), using_config("train", False):
            y = self(self._send(x), ["prob"])["prob"]
            return F.mean(F.reshape(y, (len(images), 10, -1)), axis=1) if oversample else y

    def _batch(self, images: Sequence[Any], size: tuple[int, int] | None) -> Array:
        if (is_array(images) and images.ndim < 3) or not len(images):
            raise ValueError(f"{type(self).__name__}: images: expected a list of images, got {images!r}")
        return np.stack([self._prepare(image, size) for image in images])

    def _send(self, x: Array) -> Variable:
        return Variable(self.device.send(x))

    def _prepare(self, image: Array, size: tuple[int, int] | None) -> Array:
        if self.convention == "torchvision":
            return pixels.standardize(image, size)
        return pixels.subtract_mean(image, size, self.mean)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def use_torchvision(self) -> None:
        """Prepare images and compute as torchvision does, for weights from there."""
        self.convention = "torchvision"

    def _load(self, pretrained_model: os.PathLike[str] | str | None) -> None:
        """Fill the weights from a file. Raises FileNotFoundError, or CheckpointError where it does not fit."""
        if not pretrained_model:
            return
        path = self._find(os.fspath(pretrained_model))
        try:
            if path.endswith(".safetensors"):
                self._fill(safetensors.load(path))
            else:
                NpzDeserializer(read_npz(path)).load(self)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error

    def _find(self, path: str) -> str:
        where = type(self).__name__
        if path.endswith(".caffemodel"):
            raise ValueError(f"{where}: pretrained_model: expected an .npz or .safetensors file, got Caffe's {path}")
        found = (
            os.path.join(get_dataset_root(), "pfnet", "chainer", "models", self.weights_name)
            if path == "auto"
            else path
        )
        if os.path.isfile(found):
            return found
        asked = f"pretrained_model='auto' takes {found}" if path == "auto" else f"pretrained_model={path!r}"
        raise FileNotFoundError(
            f"{where}: {asked}, and there is no such file; nothing is downloaded: put {self.weights_name} there, as "
            "Chainer saved it, or name another file (.npz of Chainer or dbrdist, .safetensors), or take "
            "pretrained_model=None for random weights"
        )

    def _fill(self, arrays: dict[str, Array]) -> None:
        own = list(self._paths())
        if any(name.endswith((".W", ".gamma")) for name in arrays):  # as dbrdist exports them
            NpzDeserializer({name.replace(".", "/"): array for name, array in arrays.items()}).load(self)
            return
        names = {path: name for path in own if (name := self._torchvision_name(path)) is not None}
        missing = sorted(set(names.values()) - set(arrays))
        unknown = sorted(set(arrays) - set(names.values()))
        unknown = [name for name in unknown if not name.endswith("num_batches_tracked")]
        if missing or unknown:
            found = f"{missing[0]} is not in it" if missing else f"{unknown[0]} has no place"
            raise CheckpointError(f"expected the weights of torchvision's {type(self).__name__[:-6]}, but {found}")
        NpzDeserializer({path: arrays[name] for path, name in names.items()}, strict=False).load(self)
        self.use_torchvision()

    def _paths(self) -> Iterator[str]:
        """The paths of all parameters and running statistics."""
        for path, link in self.namedlinks():
            for name in (*link._params, *link._persistent):
                if getattr(getattr(link, name), "ndim", 0):
                    yield f"{path}/{name}".strip("/")

    def _torchvision_name(self, path: str) -> str | None:
        """What torchvision calls the array at a path; None where it has no such array, and zeros stay."""
        name = type(self).__name__
        raise CheckpointError(f"expected weights of Chainer's {name}: that of torchvision is another network")


LAST_NAMES = {
    "W": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "avg_mean": "running_mean", "avg_var": "running_var"
}  # fmt: skip
