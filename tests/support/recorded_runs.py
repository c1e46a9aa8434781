"""Recorded runs for tests of the screen: real run folders, written by `EventWriter` with a simulated clock."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from segapp.chunks import plan_chunks
from segapp.memory.split_check import SplitChecker
from segapp.run.events import (
    Alert,
    Checkpoint,
    CommandAnswer,
    Device,
    DeviceMemory,
    EpochStart,
    EventReader,
    EventWriter,
    Gpu0Bsz,
    Heartbeat,
    Memory,
    RunEnd,
    RunStart,
    Step,
    Val,
)
from segapp.run.folder import RunFolder
from segapp.view.view import EventFold, View

CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
PALETTE = [
    (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (0, 0, 192), (128, 128, 0), (192, 128, 128),
    (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192),
]  # fmt: skip
FINAL_IOU = (0.918, 0.781, 0.287, 0.934, 0.744, 0.738, 0.331, 0.402, 0.762, 0.471, 0.399)


class Clock:
    """Replaces `time.time` while events are written."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class RecordedRun:
    """Writes a plausible training, epoch by epoch, on devices of 22 GiB each.

    `device="cpu"` stands for logical devices without memory numbers; `starts_s` is the Unix time of the first event.
    """

    def __init__(
        self,
        path: Path,
        *,
        classes: Sequence[str] = CAMVID,
        num_devices: int = 4,
        device: str = "cuda",
        batch_size: int = 32,
        steps_per_epoch: int = 60,
        epochs: int = 20,
        gpu0_bsz: int | None = 4,
        starts_s: float = 1_760_000_000.0,
        step_s: float = 0.777,
        acquired_s: float | None = None,
    ) -> None:
        self.folder = RunFolder.create(path=path)
        self.clock = Clock(starts_s)
        self.classes, self.num_devices, self.device = list(classes), num_devices, device
        self.batch_size, self.steps_per_epoch, self.epochs, self.step_s = batch_size, steps_per_epoch, epochs, step_s
        self.rng = np.random.default_rng(3)
        self.step, self.acquired_s = 0, round(starts_s - 1, 3) if acquired_s is None else acquired_s
        self.gpu0_bsz = gpu0_bsz if num_devices > 1 else None
        self.best = -1.0
        with mock.patch("time.time", self.clock):
            self.folder.write_info()
            self.writer = EventWriter(self.folder.events)
            self.write_start()

    @property
    def split(self) -> tuple[int, ...]:
        return plan_chunks(self.batch_size, self.num_devices, self.gpu0_bsz, full_batch=self.batch_size)

    def write(self, event: object, after_s: float = 0.0) -> None:
        self.clock.now_s += after_s
        with mock.patch("time.time", self.clock):
            self.writer.write(event)  # type: ignore[arg-type]

    def write_start(self, resumed_from_step: int | None = None, live: dict[str, Any] | None = None) -> None:
        names = [f"cuda:{i}" if self.device == "cuda" else "cpu" for i in range(self.num_devices)]
        self.write(
            RunStart(
                classes=self.classes,
                num_params=11_200_000,
                batch_size=self.batch_size,
                epochs=self.epochs,
                steps_per_epoch=self.steps_per_epoch,
                devices=[Device(device=name, total_mib=22_528) for name in names],
                acquired_s=self.acquired_s,
                gpu0_bsz=self.gpu0_bsz,
                live=live,
                split=list(self.split),
                resumed_from_step=resumed_from_step,
                palette=PALETTE if self.classes == list(CAMVID) else None,
                checker=SplitChecker(
                    self.batch_size, self.num_devices, current=self.split, usable_mib=[22_528.0] * self.num_devices
                ).to_json(),
            )
        )

    @property
    def peaks_mib(self) -> list[float | None]:
        is_gpu = self.device == "cuda"
        bases = [9.5, *(2.5 + 0.2 * i for i in range(1, self.num_devices))]
        shares = enumerate(zip(bases, self.split, strict=True))
        return [1024 * base + 1450 * share + 4 * i if is_gpu else None for i, (base, share) in shares]

    def loss_at(self, step: int) -> float:
        noise = float(self.rng.normal(0, 0.10)) * math.exp(-step / (self.steps_per_epoch * 10))
        return abs(2.3 * math.exp(-step / (self.steps_per_epoch * 2.5)) + 0.32 + noise)

    def train(self, num_steps: int, *, loss: float | None = None, memory_every: int = 5) -> None:
        """Write some steps of the current epoch."""
        for _ in range(num_steps):
            self.step += 1
            epoch = (self.step - 1) // self.steps_per_epoch + 1
            left_in_epoch = epoch * self.steps_per_epoch - self.step
            left = self.epochs * self.steps_per_epoch - self.step
            rate = self.batch_size / self.step_s * (1 + 0.03 * float(self.rng.normal()))
            self.write(
                Step(
                    epoch=epoch,
                    step=self.step,
                    loss=self.loss_at(self.step) if loss is None else loss,
                    lr=0.01 * (1 - self.step / (self.epochs * self.steps_per_epoch + 1)) ** 0.9,
                    images_per_s=rate,
                    data_wait_frac=0.04,
                    grad_norm=1.8,
                    split=list(self.split),
                    peaks_mib=self.peaks_mib,
                    skipped=0,
                    step_s=self.step_s,
                    eta_epoch_s=left_in_epoch * self.step_s + 21,
                    eta_run_s=left * self.step_s + 21 * (self.epochs - epoch + 1),
                ),
                self.step_s,
            )
            if self.step % memory_every == 1:
                self.sample_memory()

    def sample_memory(self) -> None:
        devices = []
        for i, peak in enumerate(self.peaks_mib):
            if peak is None:
                devices.append(DeviceMemory(device="cpu", used_mib=812.0, total_mib=None))
                continue
            devices.append(
                DeviceMemory(
                    device=f"cuda:{i}",
                    uuid=f"GPU-{i}",
                    used_mib=peak * 0.93 + 420,
                    total_mib=22_528,
                    utilization=0.96 + 0.01 * (i % 3),
                    temperature=71 + i,
                    allocated_mib=peak * 0.6,
                    reserved_mib=peak * 0.93,
                    peak_mib=peak,
                    phase="backward",
                )
            )
        self.write(Memory(devices=devices, step=self.step))

    def epoch(self, *, val: bool = True, loss: float | None = None) -> None:
        """Write an epoch with its evaluation and checkpoint."""
        number = self.step // self.steps_per_epoch + 1
        self.write(EpochStart(epoch=number, lr=0.01, split=list(self.split), step=self.step))
        self.train(self.steps_per_epoch, loss=loss)
        if not val:
            return
        grown = 1 - math.exp(-number / 5)
        base = [FINAL_IOU[i % len(FINAL_IOU)] * grown for i in range(len(self.classes))]
        iou: list[float | None] = [min(1.0, max(0.0, value + float(self.rng.normal(0, 0.012)))) for value in base]
        if len(iou) > 12:
            iou[7] = None
        known = [value for value in iou if value is not None]
        miou = float(np.mean(known))
        self.write(
            Val(epoch=number, step=self.step, loss=self.loss_at(self.step) + 0.06, miou=miou, iou=iou,
                pixel_accuracy=0.889, num_images=101, val_s=21.0),
            21.0,
        )  # fmt: skip
        is_best, self.best = miou > self.best, max(miou, self.best)
        self.write(
            Checkpoint(path="checkpoints/last.pt", epoch=number, step=self.step, is_best=is_best,
                       size_bytes=117_000_000, save_s=0.6, metric=miou),
            0.6,
        )  # fmt: skip

    def draw_samples(self, num_images: int = 3) -> None:
        """Write the sample pictures of an evaluation: a street, its target, and a prediction that improves."""
        from PIL import Image

        number = max(1, self.step // self.steps_per_epoch)
        y, x = np.mgrid[:120, :160]
        for k in range(num_images):
            target = np.where(y < 45, 0, np.where(y < 75, 1, 3))
            target[(y > 20) & (y < 80) & (x > 120)] = 5
            target[(abs(x - 80 + 15 * k) < 15) & (abs(y - 85) < 11)] = 8
            prediction = np.roll(target, int(12 * math.exp(-number / 2)), 1)
            prediction[(x // 8 + y // 8) % max(3, 2 * number) == 0] = 4
            colors = np.array(PALETTE)
            parts = [colors[target] // 2 + 60 + (x + y)[..., None] % 9, colors[prediction], colors[target]]
            picture = Image.fromarray(np.concatenate(parts, axis=1).astype(np.uint8))
            picture.save(self.folder.samples / f"epoch_{number:04}_{k}.png")

    def change_gpu0(self, new: int, *, apply: bool = True, command_id: str = "0123456789ab") -> None:
        """Write a command that changes gpu0_bsz; applied at once, or left pending."""
        old, command = self.gpu0_bsz, f"set gpu0_bsz={new}"
        number = self.step // self.steps_per_epoch + 1
        split = plan_chunks(self.batch_size, self.num_devices, new, full_batch=self.batch_size)
        self.write(CommandAnswer(id=command_id, command=command, by="alice@box", status="accepted"))
        self.write(Gpu0Bsz(status="pending", old=old, new=new, split=list(split), epoch=number + 1, id=command_id))
        if apply:
            self.gpu0_bsz = new
            self.write(Gpu0Bsz(status="applied", old=old, new=new, split=list(split), epoch=number, id=command_id,
                               predicted_mib=[18_000.0] * self.num_devices))  # fmt: skip
            self.write(CommandAnswer(id=command_id, command=command, by="alice@box", status="applied", step=self.step,
                                     changes={"gpu0_bsz": new}))  # fmt: skip

    def beat(self, phase: str, after_s: float = 1.0) -> None:
        self.write(Heartbeat(pid=23168, phase=phase, step=self.step), after_s)

    def alert(self, kind: str, message: str) -> None:
        self.write(Alert(kind=kind, message=message, step=self.step))

    def end(self, status: str = "finished", reason: str = "20 epochs") -> None:
        self.write(RunEnd(status=status, reason=reason, exit_code=0, step=self.step), 0.1)  # type: ignore[arg-type]
        self.writer.close()

    def hold(self, acquired_s: float | None = None) -> None:
        """Lock the folder, as the process that has written the events did before the first of them, or at a time."""
        taken_s = self.acquired_s if acquired_s is None else acquired_s
        with mock.patch("segapp.run.folder.time.time", return_value=taken_s):
            self.folder.acquire()

    def shift_to_now(self, age_s: float = 0.4) -> None:
        """Shift all times in the file so that the last event has this age; more events can be written afterwards."""
        self.writer.close()
        lines = [json.loads(line) for line in self.folder.events.read_text().splitlines()]
        delta = time.time() - age_s - lines[-1]["t"]
        text = "".join(json.dumps({**raw, "t": raw["t"] + delta}, separators=(",", ":")) + "\n" for raw in lines)
        self.folder.events.write_text(text)
        self.clock.now_s = time.time()
        self.writer = EventWriter(self.folder.events)


def folded(run: RecordedRun) -> View:
    """Return what a viewer knows after all events."""
    view = View()
    EventFold(view).add(EventReader(run.folder.events).read_raw())
    return view
