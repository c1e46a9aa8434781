"""Run an exported ONNX file with onnxruntime.

Shapes: N images, B bands, C classes, H x W pixels of an image.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segapp.errors import CheckpointError, ConfigError, RunError, install_command
from segapp.export.info import ExportInfo
from segapp.run.words import first_line


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
