"""Latency and bandwidth from measured times, and what they say of a model."""

from __future__ import annotations


def latency_and_bandwidth(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(seconds, bytes per second) of t = latency + bytes / bandwidth, by least squares of relative errors.

    Each point counts as 1/t^2: otherwise the largest message alone would decide, and the latency be noise.
    """
    weights = [1.0 / (seconds * seconds) for _, seconds in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points)) / total
    mean_time = sum(w * seconds for w, (_, seconds) in zip(weights, points)) / total
    above = sum(w * (size - mean_size) * (seconds - mean_time) for w, (size, seconds) in zip(weights, points))
    below = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points))
    slope = max(above / below, 1e-15)
    return max(mean_time - slope * mean_size, 0.0), 1.0 / slope


def parse_count(text: str) -> int:
    """25.6M -> 25600000; k, M, G and B (10^9) are understood."""
    units = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    value = float(number) * (units[unit] if unit else 1.0)
    if not 1.0 <= value < 1e15:
        raise ValueError(text)
    return int(value)


def allreduce_seconds(num_bytes: int, ranks: int, latency: float, bandwidth: float, measured_ranks: int) -> float:
    """An allreduce over `ranks`, from one that took latency + bytes / bandwidth over `measured_ranks`.

    As a ring does it: 2 (P - 1) rounds, in each of which a P-th of the bytes is sent.
    """
    rounds, before = 2 * (ranks - 1), 2 * (measured_ranks - 1)
    share = (rounds / ranks) / (before / measured_ranks)
    return latency * rounds / before + num_bytes / bandwidth * share
