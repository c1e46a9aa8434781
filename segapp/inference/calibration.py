"""Calibration of class probabilities by a temperature, which is fitted on a validation split and saved with the run.

A temperature T replaces the probabilities p of a pixel by p ** (1 / T), divided by their sum; for a single-pass
prediction this is the softmax of the logits divided by T (Guo et al., On Calibration of Modern Neural Networks, ICML
2017). The most likely class does not change. T minimizes the negative log-likelihood, a sum over pixels that is convex
in 1 / T.

The expected calibration error is the mean of |accuracy - confidence| over bins of equal width, weighted by their pixels
(Naeini et al., Obtaining Well Calibrated Probabilities Using Bayesian Binning, AAAI 2015).

Shapes: P pixels, C classes, H, W height and width in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.sampling import mix_seed
from segapp.errors import DataError
from segapp.inference.predict.predictor import Predictor
from segapp.inference.predict.tiles import plan_workspace, predict_strips

MAX_VALUES = 2**27
"""Maximum number of probabilities that are kept, for pixels sampled evenly from all images: 512 MiB."""
NUM_BINS = 15
_CHUNK = 2**18  # pixels that are converted to float64 at the same time
_LEAST, _MOST = 0.05, 20.0


@dataclass(frozen=True)
class ScoredPixels:
    """Predictions of pixels with a known class."""

    log_probabilities: Tensor  # (P, C) float32 on the CPU
    targets: Tensor  # (P,) int64 class ids


def score_pixels(
    predictor: Predictor,
    dataset: SegmentationDataset,
    *,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> ScoredPixels:
    """Predict the images of a data set and return pixels, equally many per image, which depend only on the seed.

    At most `MAX_VALUES` probabilities are returned, unless there are more images than that.

    Args:
        predictor: predicts one class per pixel, with a temperature of 1.
        dataset: data set with the evaluation transform.
        seed: seed for the sampling if there are too many pixels.
        progress: called with the number of images done.

    Raises:
        DataError: no pixel of the data set has a class.
    """
    scheme, workspace = dataset.scheme, plan_workspace(predictor)
    most_px = max(1, MAX_VALUES // (scheme.num_classes * len(dataset)))
    found: list[NDArray[np.float32]] = []
    targets: list[NDArray[np.int64]] = []
    for index in range(len(dataset)):
        sample = dataset[0, index]
        target = sample.target.numpy()
        target = target[0] if target.ndim == 3 else target  # distance maps follow
        place = np.flatnonzero(target != scheme.ignore_index)
        if len(place) > most_px:
            drawn = np.random.default_rng(mix_seed("calibration", seed, index)).choice(len(place), most_px, False)
            place = place[np.sort(drawn)]
        rows, columns = np.divmod(place, target.shape[1])
        image = np.ascontiguousarray(sample.image.numpy().transpose(1, 2, 0))
        for strip in predict_strips(predictor, image, workspace, with_probabilities=True):
            assert strip.probabilities is not None
            own = slice(*np.searchsorted(rows, [strip.rows.start, strip.rows.stop]))
            values = strip.probabilities[:, rows[own] - strip.rows.start, columns[own]].T
            found.append(np.log(np.maximum(values, np.finfo(np.float32).tiny), dtype=np.float32))
        targets.append(target.reshape(-1)[place].astype(np.int64))
        progress(index + 1)
    if not sum(map(len, targets)):
        raise DataError("no pixel of the split has a class: calibrate needs labeled images")
    return ScoredPixels(torch.from_numpy(np.concatenate(found)), torch.from_numpy(np.concatenate(targets)))


def negative_log_likelihood(pixels: ScoredPixels, temperature: float = 1.0) -> float:
    """Return the mean negative log-likelihood over the pixels."""
    scale = torch.tensor(1 / temperature, dtype=torch.float64)
    return sum(float(_sum_of(part, scale)) for part in _parts(pixels)) / len(pixels.targets)


def _sum_of(pixels: ScoredPixels, scale: Tensor) -> Tensor:
    """Return the sum of the negative log-likelihoods for a scale 1 / T of the logits, float64."""
    return F.cross_entropy(pixels.log_probabilities.double() * scale, pixels.targets, reduction="sum")


def _parts(pixels: ScoredPixels) -> Iterator[ScoredPixels]:
    for start in range(0, len(pixels.targets), _CHUNK):
        own = slice(start, start + _CHUNK)
        yield ScoredPixels(pixels.log_probabilities[own], pixels.targets[own])


def fit_temperature(pixels: ScoredPixels) -> float:
    """Return the temperature with the lowest negative log-likelihood, found by L-BFGS in float64.

    Raises:
        DataError: it would be below 0.05 or above 20: nearly all pixels are right, or the predictions carry no
            information.
    """
    log_scale = torch.zeros((), dtype=torch.float64, requires_grad=True)  # its exponential, the scale, is positive
    optimizer = torch.optim.LBFGS(
        [log_scale], max_iter=50, tolerance_grad=1e-10, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def mean() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in _parts(pixels):  # each has its own graph, which is freed
            scale = log_scale.clamp(-math.log(_MOST), -math.log(_LEAST)).exp()
            loss = _sum_of(part, scale) / len(pixels.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    optimizer.step(mean)  # type: ignore[no-untyped-call]
    temperature = math.exp(-log_scale.item())
    if not _LEAST < temperature < _MOST:
        bound = f"below {_LEAST:g}" if temperature <= _LEAST else f"above {_MOST:g}"
        raise DataError(
            f"the temperature would be {bound}: the model is right at nearly every pixel of the split, or its "
            "probabilities do not depend on the classes: use a split that it was not trained on, or train longer"
        )
    return temperature


@dataclass(frozen=True)
class Reliability:
    """Pixels by the confidence of their prediction, in bins of equal width from 0 to 1."""

    num_px: NDArray[np.int64]  # pixels of each bin
    confidence: NDArray[np.float64]  # mean of each bin, NaN without pixels
    accuracy: NDArray[np.float64]  # share of correct predictions in each bin, NaN without pixels

    @property
    def error(self) -> float:
        """The expected calibration error."""
        has_px = self.num_px > 0
        gaps = np.abs(self.accuracy - self.confidence)[has_px]
        return float((gaps * self.num_px[has_px]).sum() / self.num_px.sum())


def reliability(pixels: ScoredPixels, temperature: float = 1.0) -> Reliability:
    """Return the accuracy per confidence bin; bins include their upper end: (0, 1 / n], (1 / n, 2 / n], ..."""
    counts = np.zeros((3, NUM_BINS))
    for part in _parts(pixels):
        confidence, labels = (part.log_probabilities.double() / temperature).softmax(1).max(1)
        own = np.clip(np.ceil(confidence.numpy() * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
        is_right = (labels == part.targets).numpy()
        for row, weights in enumerate((None, confidence.numpy(), is_right)):
            counts[row] += np.bincount(own, weights, NUM_BINS)
    with np.errstate(invalid="ignore"):
        return Reliability(counts[0].astype(np.int64), counts[1] / counts[0], counts[2] / counts[0])
