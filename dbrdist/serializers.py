"""Saving and loading, under Chainer's module name."""

from dbrdist.core.files.hdf5 import HDF5Deserializer, HDF5Serializer, load_hdf5, save_hdf5
from dbrdist.core.files.serializer import (
    AbstractSerializer,
    Deserializer,
    DictionarySerializer,
    NpzDeserializer,
    Serializer,
    load_npz,
    save_npz,
)
from dbrdist.core.names.missing_names import explained as _explained

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
