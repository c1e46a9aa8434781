"""The metadata of an exported file."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict

from segapp.datasets.images.pixel_format import PixelFormat


class ExportInfo(BaseModel):
    """Metadata of an exported file, as JSON: one property per field in ONNX, the extra file `segapp.json` in pt2."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    segapp_version: str
    """Version of segapp that wrote the file."""
    run: str
    """Name of the run's folder; SWEEP/RUN for a run of a sweep, the name in the config for a file outside a run."""
    run_id: str | None = None
    """Unique id of the run, as in its `run.json`; None for a file outside a run."""
    checkpoint: str
    """File name of the checkpoint."""
    epoch: int
    """The epoch of the checkpoint's last step."""
    step: int
    """Number of optimizer steps the checkpoint was trained for."""
    network: str
    """Library, name and backbone of the network."""
    classes: tuple[str, ...]
    """Class names in the order of their ids."""
    palette: tuple[tuple[int, int, int], ...]
    """One RGB color per class."""
    file_ids: tuple[int, ...]
    """For each class, its id in the files of the data set."""
    ignore_index: int
    """Id of pixels that training ignored."""
    mean: tuple[float, ...]
    """Mean of the normalization that the file applies, for each band in 0..1."""
    std: tuple[float, ...]
    """Standard deviation of the normalization that the file applies, for each band in 0..1."""
    bands: tuple[int, ...] | None = None
    """Bands of an image file that make the input, counted from 1; None: RGB."""
    dtype: str = "uint8"
    """Dtype of the input."""
    value_range: tuple[tuple[float, float], ...] | None = None
    """Lowest and highest value of each band in the normalization; None: 0 and 255."""
    resize_px: tuple[int, int] | None = None
    """Height and width to which the file resizes every image before the network; None: not resized. The output has the
    size of the image."""
    align_corners: bool
    """`align_corners` of the upsampling in the file."""
    input: str = "images: uint8 (batch, height, width, 3), RGB"
    """Name, type and shape of the input."""
    output: Literal["logits", "labels"]
    """Name of the output: logits, float32 (batch, classes, height, width), or labels, (batch, height, width)."""
    multilabel: bool = False
    """The logits are for sigmoids: a pixel may have several classes, or none."""
    threshold: float | None = None
    """A class is predicted if its probability is above this (multilabel)."""
    fixed_size_px: tuple[int, int] | None = None
    """Height and width of the images if the network accepts only one size; None: any size."""
    size_multiple: int = 1
    """Images whose height or width is no multiple of this are padded with the mean color at the bottom and right."""
    opset: int | None = None
    """ONNX opset; None in other formats."""

    @property
    def pixels(self) -> PixelFormat:
        """What the images hold, and how the file prepares them."""
        return PixelFormat(self.bands, self.dtype, self.value_range, self.mean, self.std, self.resize_px)

    def as_properties(self) -> dict[str, str]:
        return {name: json.dumps(value) for name, value in self.model_dump(mode="json").items()}
