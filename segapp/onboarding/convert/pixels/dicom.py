"""Pixels of DICOM files, with pydicom (the extra `dicom`): the only module that imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import shown
from segapp.onboarding.convert.sources import missing_extra
from segapp.run.words import first_line


def _dataset(file: Path, *, has_pixels: bool) -> Any:
    """Return the data set of a file.

    Raises:
        DataError: pydicom is not installed.
        ValueError: the file is no DICOM file of pixels.
    """
    try:
        import pydicom
        from pydicom.errors import InvalidDicomError
    except ImportError:
        raise missing_extra("pydicom", "DICOM files", "dicom") from None
    try:
        dataset = pydicom.dcmread(file, stop_before_pixels=not has_pixels)
    except (InvalidDicomError, OSError, EOFError) as error:
        raise ValueError(f"no DICOM file that can be read ({str(error).partition('. ')[0]})") from error
    if "Rows" not in dataset or "Columns" not in dataset:
        raise ValueError("a DICOM file without pixels")
    return dataset


def dicom_head(file: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the type of `dicom_array`.

    Raises:
        DataError: pydicom is not installed.
        ValueError: the file is no DICOM file of pixels.
    """
    dataset = _dataset(file, has_pixels=False)
    frames, samples = int(dataset.get("NumberOfFrames") or 1), int(dataset.get("SamplesPerPixel") or 1)
    shape = (int(dataset.Rows), int(dataset.Columns))
    with_frames = (frames, *shape) if frames > 1 else shape
    return ((*with_frames, samples), np.dtype(np.uint8)) if samples > 1 else (with_frames, np.dtype(np.float32))


def dicom_array(file: Path) -> NDArray[Any]:
    """Return the pixels of a file: colours of 8 bits, or values with rescale slope and intercept applied, as float32.

    Values of MONOCHROME1, where the largest is black, are negated, so that larger is brighter.

    Raises:
        DataError: pydicom is not installed.
        ValueError: the pixels cannot be decoded.
    """
    dataset = _dataset(file, has_pixels=True)
    try:
        pixels = np.asarray(dataset.pixel_array)
    except Exception as error:  # pydicom raises other types for each of its decoders
        reason = first_line(error)
        raise ValueError(f"{shown(file)}: its pixels cannot be decoded ({reason}): pip install pylibjpeg") from error
    if int(dataset.get("SamplesPerPixel") or 1) > 1:
        return pixels.astype(np.uint8)
    values = pixels.astype(np.float32) * float(dataset.get("RescaleSlope") or 1)
    values += float(dataset.get("RescaleIntercept") or 0)
    return -values if dataset.get("PhotometricInterpretation") == "MONOCHROME1" else values
