"""Distance maps of targets against SciPy's Euclidean distance transform and the authors' formula."""

import numpy as np
import pytest
from scipy.ndimage import distance_transform_edt

from segapp.datasets.distances import with_distances


def authors_map(own, valid):
    """Return the signed distances as LIViAETS/boundary-loss computes them, where ignored pixels are nobody's."""
    others = valid & ~own
    if not own.any() or not others.any():
        return np.zeros(own.shape)
    outside, inside = distance_transform_edt(~own), distance_transform_edt(~others)
    return outside * ~own - (inside - 1) * own


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("ignored", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("size", [(40, 57), (1, 9), (200, 3)])
def test_maps_match_scipy(size, ignored, multilabel):
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 8 if multilabel else 3, (size[0] // 8 + 1, size[1] // 8 + 1))
    mask = np.kron(coarse, np.ones((8, 8), int))[: size[0], : size[1]].astype(np.int16)
    mask[generator.random(size) < ignored] = 255
    found = with_distances(mask, 4, 255, multilabel=multilabel)
    assert found.dtype == np.int32
    assert np.array_equal(found[0], mask)
    for c in range(4):
        valid = mask != 255
        own = (((mask >> c) & 1 == 1) if multilabel else mask == c) & valid
        squared = found[1 + c].astype(float)
        distances = np.where(squared < 0, 1 - np.sqrt(-np.minimum(squared, 0)), np.sqrt(np.maximum(squared, 0)))
        np.testing.assert_allclose(distances, authors_map(own, valid), atol=1e-12)


def test_distances_are_exact_up_to_2048_pixels():
    mask = np.zeros((1024, 2048), np.uint8)
    mask[3, 5] = 1
    rows, columns = np.mgrid[:1024, :2048]
    expected = np.where(mask == 1, 1, (rows - 3) ** 2 + (columns - 5) ** 2)
    difference = np.abs(np.abs(with_distances(mask, 2, 255)[2]) - expected)
    assert difference[expected < 2048**2].max() == 0
    assert difference.max() <= 1  # OpenCV's distances are float32
