"""Latency and bandwidth from measured times."""

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
