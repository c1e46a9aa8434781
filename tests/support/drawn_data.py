"""Small drawn images and masks; nothing here is a photograph."""

import numpy as np

NUM_CLASSES = 5
FILE_IDS = np.array([0, 7, 9, 11, 26, *range(5, 256)], np.uint8)
"""The id in a file of each class; 255 stays."""
LABEL_MAP = {7: 1, 9: 2, 11: 3, 26: 4}


def draw_image(seed: int, height: int, width: int) -> np.ndarray:
    """Return an image of smooth colours with some texture, uint8 (H, W, 3)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / rng.uniform(3, 9) + rng.uniform(0, 6)) + np.cos(y / rng.uniform(3, 9)) for _ in range(3)]
    return np.clip(np.stack(waves, -1) * 60 + 127 + rng.normal(0, 4, (height, width, 3)), 0, 255).astype(np.uint8)


def draw_mask(seed: int, height: int, width: int, num_classes: int = NUM_CLASSES) -> np.ndarray:
    """Return a mask of rectangles of classes and a few ignored pixels, uint8 (H, W)."""
    rng = np.random.default_rng(seed)
    mask = np.full((height, width), rng.integers(num_classes), np.uint8)
    for _ in range(6):
        top, left = rng.integers(height), rng.integers(width)
        mask[top : top + height // 2, left : left + width // 2] = rng.integers(num_classes)
    mask[: height // 10] = 255
    return mask
