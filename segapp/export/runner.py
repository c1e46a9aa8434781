"""Run an exported ONNX file with onnxruntime; the metadata of an exported file.

Shapes: N images, B bands, C classes, H x W pixels of an image.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import CheckpointError, ConfigError, RunError, install_command
from segapp.run.words import first_line


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
    precision: Literal["fp32", "fp16"]
    """Precision of weights and arithmetic; the dtypes of input and output do not change."""
    fixed_size_px: tuple[int, int] | None = None
    """Height and width of the images if the network accepts only one size; None: any size."""
    opset: int | None = None
    """ONNX opset; None in other formats."""

    @property
    def pixels(self) -> PixelFormat:
        """Bands and dtype of the images."""
        return PixelFormat(self.bands, self.dtype, self.value_range)

    @property
    def scheme(self) -> ClassScheme:
        """Classes, colors and ids of the data set."""
        label_map = {file_id: class_id for class_id, file_id in enumerate(self.file_ids)}
        is_plain = all(file_id == class_id for file_id, class_id in label_map.items())
        if self.multilabel:
            return ClassScheme(self.classes, self.palette, ignore_index=self.ignore_index, multilabel="bits")
        return ClassScheme(self.classes, self.palette, None if is_plain else label_map, self.ignore_index)

    def as_properties(self) -> dict[str, str]:
        """Return each field as JSON text, by name."""
        return {name: json.dumps(value) for name, value in self.model_dump(mode="json").items()}

    @classmethod
    def from_properties(cls, properties: Mapping[str, str], name: str) -> ExportInfo:
        """Read the metadata that `as_properties` returned; refuse a file that was not written by segapp export."""
        try:
            known = {key: json.loads(properties[key]) for key in cls.model_fields if key in properties}
            return cls.model_validate(known)
        except (ValidationError, ValueError):
            raise CheckpointError(
                f"{name} lacks the class names and colors that segapp stores: use a file written by segapp export",
                path=name,
            ) from None


def is_exported(target: str) -> bool:
    """Return True if a name means an exported file (.onnx or .pt2) rather than a run or a checkpoint."""
    return Path(target).suffix.lower() in (".onnx", ".pt2")


def require_packages(*packages: str) -> None:
    """Raise ConfigError if some of the packages for ONNX files are not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"ONNX files need the package {', '.join(missing)}: {install_command('export')}")


class ExportedModel:
    """An exported ONNX file, opened and ready to run.

    It computes on CUDA if the device is a CUDA device and onnxruntime supports it.

    Raises:
        ConfigError: onnxruntime is missing.
        CheckpointError: the file is missing or damaged, not ONNX, or was not written by segapp.
    """

    def __init__(self, path: Path, device: torch.device | None = None) -> None:
        self.path = path
        if path.suffix.lower() == ".pt2":
            raise CheckpointError(
                f"{path} is a pt2 file, which segapp writes but does not read: predict with the run, or with a file "
                "of segapp export --format onnx",
                path=path,
            )
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: give a file written by segapp export", path=path)
        require_packages("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised as well
        options.intra_op_num_threads = torch.get_num_threads()
        on_cuda = device is not None and device.type == "cuda"
        wanted = ["CUDAExecutionProvider", "CPUExecutionProvider"] if on_cuda else ["CPUExecutionProvider"]
        providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read ({first_line(error)[:200]}): the file is damaged or not an exported model; "
                "export it again",
                path=path,
            ) from None
        self.info = ExportInfo.from_properties(dict(self._session.get_modelmeta().custom_metadata_map), str(path))

    def __call__(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return float32 logits (N, C, H, W) or labels (N, H, W), according to `info.output`, for images (N, H, W, B).

        Raises:
            RunError: the network cannot run on images of this size.
        """
        try:
            feed = {self._session.get_inputs()[0].name: np.ascontiguousarray(images)}
            outputs: NDArray[Any] = self._session.run(None, feed)[0]
        except Exception as error:  # onnxruntime raises a dozen exception types
            raise RunError(
                f"{self.path} cannot run on images of {images.shape[1]}x{images.shape[2]} px "
                f"({first_line(error)[:300]}): predict with the run itself",
                path=self.path,
            ) from error
        return outputs
