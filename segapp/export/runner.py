"""Running an exported file: the same call for ONNX and for `torch.export`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segapp.errors import CheckpointError, ConfigError, RunError
from segapp.export.archive import open_archive
from segapp.export.info import ExportInfo

EXPORT_SUFFIXES = (".onnx", ".pt2")
Run = Callable[[NDArray[Any]], NDArray[Any]]


def is_exported(target: str) -> bool:
    """Whether a name means an exported file rather than a run or a checkpoint."""
    return Path(target).suffix.lower() in EXPORT_SUFFIXES


def needed(*packages: str) -> None:
    """Refuses to go on without some packages.

    Raises:
        ConfigError: names those that are missing.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"ONNX files need the package {', '.join(missing)}: pip install 'segapp[export]'")


class ExportedModel:
    """An exported file, ready to run.

    Args:
        path: a file that `segapp export` wrote, .onnx or .pt2.
        device: where to compute; ONNX files use CUDA where onnxruntime has it.

    Raises:
        ConfigError: onnxruntime is missing.
        CheckpointError: the file is missing, damaged, or not one of segapp.
    """

    def __init__(self, path: Path, device: torch.device | None = None) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: give a file that segapp export wrote")
        open_file = _open_onnx if path.suffix.lower() == ".onnx" else _open_pt2
        properties, self._run = open_file(path, device or torch.device("cpu"))
        self.info = ExportInfo.from_properties(properties, str(path))

    def __call__(self, images: NDArray[Any]) -> NDArray[Any]:
        """Logits float32 (N, C, H, W), or labels (N, H, W), as `info.output` says.

        Args:
            images: uint8 (N, H, W, 3), RGB.

        Raises:
            RunError: the file cannot run on such images.
        """
        try:
            return self._run(np.ascontiguousarray(images))
        except Exception as error:  # onnxruntime and torch report failures as a dozen exception types
            reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            raise RunError(
                f"{self.path} cannot run on images of {images.shape[1]}x{images.shape[2]} px ({reason}): predict with "
                "the run itself"
            ) from error


def _open_onnx(path: Path, device: torch.device) -> tuple[dict[str, str], Run]:
    needed("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised too
    options.intra_op_num_threads = torch.get_num_threads()
    wanted = ["CUDAExecutionProvider", "CPUExecutionProvider"] if device.type == "cuda" else ["CPUExecutionProvider"]
    providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:
        raise _unreadable(path, error) from None

    def run(images: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = session.run(None, {session.get_inputs()[0].name: images})[0]
        return found

    return dict(session.get_modelmeta().custom_metadata_map), run


def _open_pt2(path: Path, device: torch.device) -> tuple[dict[str, str], Run]:
    archive, properties = open_archive(path)
    try:
        program = torch.export.load(archive)
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        # The guards hold sizes of the images it was traced with, such as "more than one image"; the check after
        # writing shows that others are right too.
        module = program.module(check_guards=False)
    except Exception as error:
        raise _unreadable(path, error) from None

    @torch.no_grad()
    def run(images: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = module(torch.from_numpy(images).to(device)).cpu().numpy()
        return found

    return properties, run


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    return CheckpointError(
        f"{path} cannot be read ({reason}): the file is damaged or not an exported network; write it again"
    )
