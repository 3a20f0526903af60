"""Saving and loading, under Chainer's module name."""

from dbrdist.core.hdf5 import HDF5Deserializer, HDF5Serializer, load_hdf5, save_hdf5
from dbrdist.core.missing_names import explained as _explained
from dbrdist.core.serializer import (
    AbstractSerializer,
    Deserializer,
    DictionarySerializer,
    NpzDeserializer,
    Serializer,
    load_npz,
    save_npz,
)

__all__ = [
    "AbstractSerializer",
    "Deserializer",
    "DictionarySerializer",
    "HDF5Deserializer",
    "HDF5Serializer",
    "NpzDeserializer",
    "Serializer",
    "load_hdf5",
    "load_npz",
    "save_hdf5",
    "save_npz",
]

__getattr__ = _explained(__name__)
