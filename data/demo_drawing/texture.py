"""Texture as a function of the position in the world: hashes, noise, lines."""

from __future__ import annotations

import numpy as np

from demo_drawing.constants import Array, Mask


def hash_cells(x: Array, y: Array, seed: int) -> Array:
    """Return a number in [0, 1) for each integer cell (x, y), from an integer hash: equal on every machine."""
    h = x.astype(np.int64).astype(np.uint32) * np.uint32(0x9E3779B1)
    h ^= y.astype(np.int64).astype(np.uint32) * np.uint32(0x85EBCA77)
    h ^= np.uint32(seed * 0xC2B2AE3D & 0xFFFFFFFF)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x2C1B3C6D)
    h = (h ^ (h >> np.uint32(12))) * np.uint32(0x297A2D39)
    return np.asarray((h ^ (h >> np.uint32(15))) / 2.0**32)


def noise(x: Array, y: Array, seed: int) -> Array:
    """Return smooth noise in [-1, 1] with features about one unit wide."""
    x0, y0 = np.floor(x), np.floor(y)
    s, t = x - x0, y - y0
    s, t = s * s * (3 - 2 * s), t * t * (3 - 2 * t)
    below = hash_cells(x0, y0, seed) * (1 - s) + hash_cells(x0 + 1, y0, seed) * s
    above = hash_cells(x0, y0 + 1, seed) * (1 - s) + hash_cells(x0 + 1, y0 + 1, seed) * s
    return 2 * (below * (1 - t) + above * t) - 1


def fractal(x: Array, y: Array, seed: int, octaves: int = 3) -> Array:
    """Return the sum of noise over octaves, each half as wide and half as strong as the one before; in [-1, 1]."""
    total = np.zeros(x.shape)
    for i in range(octaves):
        total += 0.5**i * noise(x * 2**i, y * 2**i, seed + i)
    return total / (2 - 0.5 ** (octaves - 1))


def is_line(position: Array, pitch: float, width: float) -> Mask:
    """Return True within `width` after every multiple of `pitch`."""
    return np.mod(position, pitch) < width
