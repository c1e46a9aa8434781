"""What an exported file says about itself: enough to feed it, to read its output and to know where it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import CheckpointError


class ExportInfo(BaseModel):
    """The metadata of an exported file; in ONNX one property a field, in pt2 the extra file `segapp.json`.

    Every value is JSON.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    segapp_version: str
    """Version that wrote the file."""
    run: str
    """Name of the run."""
    checkpoint: str
    """File name of the checkpoint."""
    epoch: int
    """Epochs that the checkpoint was trained for."""
    step: int
    """Steps that the checkpoint was trained for."""
    network: str
    """Library, name and backbone of the network."""
    classes: tuple[str, ...]
    """Class names in the order of their ids."""
    palette: tuple[tuple[int, int, int], ...]
    """One RGB colour a class."""
    file_ids: tuple[int, ...]
    """For each class the id that stands for it in the data set's own files."""
    ignore_index: int
    """Id of pixels that counted nowhere in training."""
    mean: tuple[float, float, float]
    """Mean of the normalisation inside the file, RGB in 0..1."""
    std: tuple[float, float, float]
    """Standard deviation of the normalisation inside the file, RGB in 0..1."""
    align_corners: bool
    """Of the upsampling inside the file."""
    input: str = "images: uint8 (batch, height, width, 3), RGB"
    """What the file takes."""
    output: Literal["logits", "labels"]
    """What it gives: logits float32 (batch, classes, height, width), or labels (batch, height, width)."""
    precision: Literal["fp32", "fp16"]
    """Of weights and arithmetic; input and output do not depend on it."""
    fixed_size_px: tuple[int, int] | None = None
    """Height and width of the images where the network takes one size only."""
    opset: int | None = None
    """Of ONNX."""

    @property
    def scheme(self) -> ClassScheme:
        """Classes and colours."""
        label_map = {file_id: class_id for class_id, file_id in enumerate(self.file_ids)}
        is_plain = all(file_id == class_id for file_id, class_id in label_map.items())
        return ClassScheme(self.classes, self.palette, None if is_plain else label_map, self.ignore_index)

    def as_properties(self) -> dict[str, str]:
        """One JSON text a field."""
        return {name: json.dumps(value) for name, value in self.model_dump(mode="json").items()}

    @classmethod
    def from_properties(cls, properties: Mapping[str, str], name: str) -> ExportInfo:
        """What `as_properties` gave.

        Args:
            properties: the file's metadata.
            name: the file, for the message.

        Raises:
            CheckpointError: the file was not written by segapp export.
        """
        try:
            known = {key: json.loads(properties[key]) for key in cls.model_fields if key in properties}
            return cls.model_validate(known)
        except (ValidationError, ValueError):
            raise CheckpointError(
                f"{name} holds no class names and colours of segapp: predict with a file that segapp export wrote"
            ) from None
