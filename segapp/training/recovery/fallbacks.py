"""Ways of working that need less memory, which a run adopts after it ran out of memory and keeps, resumes included.

Micro-batches are cut into pieces; evaluation goes image by image, in sliding windows, in smaller windows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from segapp.inference.sliding import Inference
from segapp.older import EVENT_KEYS, renamed
from segapp.run.events import EventReader
from segapp.run.folder import RunFolder

SMALLEST_WINDOW_PX = 64


@dataclass(frozen=True)
class MemoryFallbacks:
    """The fallbacks that a run has adopted.

    Attributes:
        num_pieces: a micro-batch is cut into so many.
        is_eval_single: evaluate image by image, whatever `eval.batch_size` says.
        window_px: evaluate in windows of this height and width; None: as the config says.
        num_bn_pieces: `train.precise_bn` cuts its batches into so many.
        failed_splits: splits over ranks that ran out of memory; the run is back at the one before.
    """

    num_pieces: int = 1
    is_eval_single: bool = False
    window_px: tuple[int, int] | None = None
    num_bn_pieces: int = 1
    failed_splits: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values, those that differ from the defaults."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value != getattr(MemoryFallbacks, name)
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MemoryFallbacks:
        """Return the fallbacks of `to_json`'s values; unknown names are ignored."""
        known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        window = known.get("window_px")
        known["window_px"] = None if window is None else (int(window[0]), int(window[1]))
        known["failed_splits"] = tuple(tuple(split) for split in known.get("failed_splits", ()))
        return cls(**known)

    def joined(self, other: MemoryFallbacks) -> MemoryFallbacks:
        """Return the fallbacks after both were adopted."""
        windows = [window for window in (self.window_px, other.window_px) if window is not None]
        return MemoryFallbacks(
            max(self.num_pieces, other.num_pieces),
            self.is_eval_single or other.is_eval_single,
            min(windows, key=lambda window: window[0] * window[1], default=None),
            max(self.num_bn_pieces, other.num_bn_pieces),
            tuple(sorted({*self.failed_splits, *other.failed_splits})),
        )

    def adapted(self, inference: Inference) -> Inference:
        """Return how whole images are evaluated under these fallbacks."""
        if self.window_px is None:
            return inference
        own = inference.window_px or self.window_px
        return replace(inference, window_px=(min(own[0], self.window_px[0]), min(own[1], self.window_px[1])))


def next_eval_fallback(
    fallbacks: MemoryFallbacks, inference: Inference, batch_size: int, crop_px: tuple[int, int], *, is_fixed: bool
) -> tuple[MemoryFallbacks, str] | None:
    """Return a way to evaluate that needs less memory than the present one, and a sentence; None where there is none.

    Args:
        fallbacks: so far.
        inference: as it is under them.
        batch_size: images of an evaluation batch.
        crop_px: height and width of a training crop, the first window.
        is_fixed: whether the network takes windows of one size only.
    """
    if batch_size > 1 and not fallbacks.is_eval_single:
        return replace(fallbacks, is_eval_single=True), "evaluation goes on image by image, with the same result"
    if is_fixed:
        return None
    if inference.window_px is None:
        window = crop_px
        text = f"evaluation goes on in sliding windows of {window[0]}x{window[1]} instead of whole images"
    else:
        height, width = (max(SMALLEST_WINDOW_PX, side // 2) for side in inference.window_px)
        window = (min(height, inference.window_px[0]), min(width, inference.window_px[1]))
        if window == inference.window_px:
            return None
        text = f"evaluation goes on in smaller windows, {window[0]}x{window[1]}"
    return replace(fallbacks, window_px=window), f"{text}: its scores differ slightly from those before"


def fallbacks_after(folder: RunFolder, step: int) -> list[tuple[int, MemoryFallbacks]]:
    """Return the fallbacks that any rank adopted after `step` updates, for a training that resumes there."""
    events = EventReader(folder.events).read_skimmed()
    adopted = [raw for raw in events if isinstance(raw, dict) and raw["type"] == "oom"]
    for path in sorted(folder.reports.glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError):
            adopted.append(renamed(json.loads(path.read_text()), EVENT_KEYS["oom"]))
    found = [
        (int(raw.get("step") or 0), MemoryFallbacks.from_json(raw["fallbacks"]))
        for raw in adopted
        if raw.get("fallbacks")
    ]
    return sorted((each for each in found if each[0] >= step), key=lambda item: item[0])
