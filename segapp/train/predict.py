"""Prediction: images in; label maps, colour pictures and overlays out, at each image's own size and name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from segapp.datasets.formats import ClassScheme
from segapp.datasets.masks import read_image
from segapp.errors import DataError, StorageError
from segapp.losses import upsample_argmax
from segapp.train.inference import Inference

if TYPE_CHECKING:
    from segapp.models import SegmentationModel

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
OVERLAY_ALPHA = 0.5


@dataclass(frozen=True)
class ImageFile:
    """An image and the name, without ending, that its outputs get (with folders for those found in a folder)."""

    path: Path
    name: str


def find_images(paths: Sequence[str | Path]) -> list[ImageFile]:
    """Files as given, and every image below a folder, each once.

    Raises:
        DataError: a path that is not there, or a folder without images.
    """
    found: dict[Path, ImageFile] = {}
    for given in map(Path, paths):
        if given.is_file():
            found.setdefault(given.resolve(), ImageFile(given, given.stem))
        elif given.is_dir():
            files = sorted(p for p in given.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
            if not files:
                endings = " ".join(sorted(IMAGE_SUFFIXES))
                raise DataError(f"{given} holds no image: put files there that end in one of {endings}")
            for file in files:
                found.setdefault(file.resolve(), ImageFile(file, str(file.relative_to(given).with_suffix(""))))
        else:
            raise DataError(f"{given} is neither a file nor a folder: check the path")
    return _distinct(list(found.values()))


def _distinct(images: list[ImageFile]) -> list[ImageFile]:
    """Where two images would get the same name (a.jpg, a.png), both keep their ending in it, then a number."""
    names: dict[str, int] = {}
    for image in images:
        names[image.name] = names.get(image.name, 0) + 1
    taken: set[str] = set()
    result = []
    for image in images:
        name = image.name if names[image.name] == 1 else image.name + image.path.suffix
        base, number = name, 2
        while name in taken:
            name, number = f"{base}-{number}", number + 1
        taken.add(name)
        result.append(ImageFile(image.path, name))
    return result


@torch.no_grad()
def predict_image(
    model: SegmentationModel, inference: Inference, image: NDArray[Any], device: torch.device
) -> NDArray[Any]:
    """Class ids of one image.

    Args:
        model: in eval mode.
        inference: how logits are computed.
        image: uint8 (H, W, 3), RGB.
        device: where the model is.

    Returns:
        uint8 (H, W), or uint16 where there are more than 256 classes.
    """
    images = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))).unsqueeze(0).to(device)
    images = inference.normalizer(images)
    views, size = inference.views(model, images)
    prediction = upsample_argmax(views, size, align_corners=inference.align_corners)
    labels = prediction[0, : image.shape[0], : image.shape[1]].cpu().numpy()
    return labels if labels.dtype == np.uint8 else labels.astype(np.uint16)


def colorize(labels: NDArray[Any], scheme: ClassScheme) -> NDArray[Any]:
    """Class ids (H, W) as a uint8 RGB picture (H, W, 3)."""
    table = np.array(scheme.palette, dtype=np.uint8)
    colors: NDArray[np.uint8] = table[labels]
    return colors


def predict_files(
    model: SegmentationModel,
    inference: Inference,
    images: Sequence[ImageFile],
    out: Path,
    scheme: ClassScheme,
    device: torch.device,
    *,
    label_ids: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Predicts images and writes out/labels/NAME.png, out/color/NAME.png and out/overlay/NAME.png.

    Args:
        model: gives the logits; put into eval mode.
        inference: how logits are computed.
        images: what to predict.
        out: folder, made if missing.
        scheme: classes, colours, and the files' label ids.
        device: where the model is.
        label_ids: write the data set's own ids (Cityscapes: 7 for road) instead of class ids.
        progress: called with the number of images done.

    Returns:
        One line for each image that could not be read; the others are done all the same.

    Raises:
        StorageError: an output cannot be written.
    """
    model.eval()
    to_file_id = label_id_table(scheme) if label_ids else None
    problems = []
    for number, image_file in enumerate(images, start=1):
        try:
            image = read_image(image_file.path)
        except DataError as error:
            problems.append(str(error))
            continue
        labels = predict_image(model, inference, image, device)
        color = colorize(labels, scheme)
        overlay = cv2.addWeighted(image, 1 - OVERLAY_ALPHA, color, OVERLAY_ALPHA, 0.0)
        written = labels if to_file_id is None else to_file_id[labels]
        _write_png(out / "labels" / f"{image_file.name}.png", written)
        _write_png(out / "color" / f"{image_file.name}.png", color[..., ::-1])
        _write_png(out / "overlay" / f"{image_file.name}.png", overlay[..., ::-1])
        progress(number)
    return problems


def label_id_table(scheme: ClassScheme) -> NDArray[Any]:
    """Class id -> id in the data set's own files, as an array of num_classes values."""
    return np.array(scheme.file_ids, dtype=np.uint8 if max(scheme.file_ids) < 256 else np.uint16)


def _write_png(path: Path, image: NDArray[Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _, data = cv2.imencode(".png", image)
        path.write_bytes(data.tobytes())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}: free space or choose another --out") from None
