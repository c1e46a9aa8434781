"""TensorBoard scalars, made from the events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class TensorBoardListener:
    """Writes `step` and `val` events as scalars.

    Args:
        folder: where TensorBoard's event files go.
        classes: names for the per-class IoU curves.
        purge_step: on resume, later points of an earlier attempt are hidden.
    """

    def __init__(self, folder: Path, classes: Sequence[str], purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.classes = list(classes)
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)

    def __call__(self, event: dict[str, Any]) -> None:
        """Takes one event as it stands in events.jsonl."""
        if event["type"] == "step":
            for key in ("loss", "lr", "images_per_s", "data_wait_frac", "grad_norm", "loss_scale"):
                self._scalar(f"train/{key}", event.get(key), event["step"])
        elif event["type"] == "val":
            for key in ("loss", "miou", "pixel_accuracy"):
                self._scalar(f"val/{key}", event.get(key), event["step"])
            for name, iou in zip(self.classes, event["iou"], strict=True):
                self._scalar(f"iou/{name}", iou, event["step"])

    def close(self) -> None:
        """Writes what waits."""
        self._writer.close()

    def _scalar(self, tag: str, value: float | None, step: int) -> None:
        if value is not None and math.isfinite(value):
            self._writer.add_scalar(tag, value, step)
