"""Serializers and file formats: npz, HDF5, safetensors."""
