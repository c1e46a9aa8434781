"""Trainer, screen, `ctl` and memory plan give one answer on a split, with one reason, through the events of a run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from segapp.chunks import EVEN, SplitRequest
from segapp.commands.runs import split_problem
from segapp.config import LiveSettings
from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker
from segapp.memory.peaks import Line, PlannedPeaks
from segapp.memory.plan import GpuSpec, OverheadEstimate, Planner
from segapp.memory.split_check import CheckedSplit
from segapp.parallel import DataParallelModel
from segapp.parallel.distributed import Ranks
from segapp.run.commands import SetCommand, parse_command, send_command
from segapp.run.events import Device, EpochStart, EventReader, EventWriter, RunStart, Step
from segapp.run.events.writer import EventLog
from segapp.run.folder import RunFolder
from segapp.training.inbox import Inbox
from segapp.training.live.apply import BatchSplit, RecomputableBlocks
from segapp.training.live.changes import ChangeRecord
from segapp.training.live.controller import CommandController
from segapp.training.live.start import Start
from segapp.training.progress import TrainingPosition
from segapp.training.step.divided import RankNetwork, ReplicatedNetwork, TrainedNetwork
from segapp.tui.devices import why_no_split
from segapp.tui.dialogs import SettingScreen
from segapp.view.view import EventFold, View
from tests.support.device_lines import device_lines

FIXED_MIB, SLOPE_MIB = (300.0, 200.0, 200.0), 100.0


CPU = torch.device("cpu")


class Counters:
    """A GPU whose allocator holds what the split needs: `FIXED_MIB` and `SLOPE_MIB` for each sample."""

    peak_mib: float | None = None

    def used_mib(self) -> float | None:
        return None

    allocated_mib = reserved_mib = utilization = used_mib

    def pop_peak_mib(self) -> float | None:
        return self.peak_mib


class SameRanks(Ranks):
    """Ranks of which this process is every one."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size


class TrainedRun:
    """The part of a trainer that decides about splits, without a network; its events are read by the others."""

    def __init__(
        self,
        path: Path,
        mode: str = "dp",
        *,
        batch_size: int = 8,
        num_devices: int = 2,
        total_mib: float | None = None,
        smallest_chunk: int = 1,
        needs_samples: str | None = None,
    ) -> None:
        self.folder = RunFolder.create(path=path)
        self.writer, self.mode = EventWriter(self.folder.events), mode
        log = EventLog(self.writer)
        self.devices = [DeviceInfo(f"cuda:{i}", uuid=f"GPU-{i}", total_mib=total_mib) for i in range(num_devices)]
        self.counters = [Counters() for _ in self.devices]
        model: Any = nn.Linear(1, 1)
        network = TrainedNetwork(model, model, CPU)
        if mode == "dp":
            network = ReplicatedNetwork(
                model, DataParallelModel(model, ["cpu"] * num_devices, full_batch=batch_size), CPU
            )
        elif mode == "ddp":
            network = RankNetwork(model, lambda: model, CPU, SameRanks(num_devices), EVEN, batch_size)
        network.smallest_chunk, network.needs_samples = smallest_chunk, needs_samples
        self.split = BatchSplit(network, batch_size, mode)
        self.memory = DeviceMemoryTracker(self.devices, counters=self.counters)
        self.controller = CommandController(
            Inbox(self.folder, log),
            log,
            self.split,
            self.memory,
            Start(ChangeRecord(LiveSettings()), LiveSettings()),
            blocks=RecomputableBlocks(nn.Linear(1, 1)),
        )
        self.epoch, self.batch_size = 1, batch_size
        self.writer.write(
            RunStart(
                classes=["road"], num_params=1, batch_size=batch_size, epochs=99, steps_per_epoch=2, mode=mode,
                devices=[Device(device=info.device, total_mib=total_mib) for info in self.devices],
                checker=self.controller.split_checker().to_json(),
            )
        )  # fmt: skip

    @property
    def position(self) -> TrainingPosition:
        return TrainingPosition(epoch=self.epoch, step=2 * self.epoch, next_epoch=self.epoch + 1, epochs=99)

    def begin_epoch(self) -> None:
        self.controller.add_automatic_changes(self.epoch)
        self.controller.apply(self.controller.record.requested, self.position)
        self.controller.restart_peaks()

    def train_epoch(self, *, is_full: bool = True) -> None:
        """An epoch as the trainer makes it, with one step."""
        self.begin_epoch()
        self.writer.write(EpochStart(epoch=self.epoch, lr=0.1, checker=self.controller.split_checker().to_json()))
        split = self.split.current or (self.batch_size,)
        for counters, fixed, count in zip(self.counters, FIXED_MIB, split, strict=False):
            counters.peak_mib = fixed + SLOPE_MIB * count
        self.controller.after_step(split, self.batch_size if is_full else 1, self.epoch)
        self.controller.after_epoch()
        peaks = self.controller.measured_mib()
        self.writer.write(Step(epoch=self.epoch, step=self.epoch, loss=1.0, lr=0.1, peaks_mib=peaks))
        self.epoch += 1

    def ask(self, text: str) -> None:
        send_command(self.folder.path, parse_command(text))
        self.controller.handle_commands(self.controller.inbox.take(is_due=True), self.position)

    def trainer(self, request: Any) -> CheckedSplit:
        return self.controller.split_checker().check(request)

    @property
    def view(self) -> View:
        view = View()
        EventFold(view).add(EventReader(self.folder.events).read_raw())
        return view

    def ctl(self, command: SetCommand) -> str | None:
        return split_problem(command, self.folder)

    def plan(self) -> Planner:
        """The plan of the same network on the same devices, with the true lines."""
        lines = [device_lines(backward=Line(fixed, SLOPE_MIB)) for fixed in FIXED_MIB]
        model = PlannedPeaks(self.mode, lines[0], (lines[1],), lines[0])
        gpus = [GpuSpec(info.total_mib or 1e9, info.device) for info in self.devices]
        checker = self.split.checker
        context = OverheadEstimate((0.0,) * len(gpus))
        return Planner(model, tuple(gpus), context, checker.smallest_chunk, checker.needs_samples)


def test_screen_offers_no_editor_in_mode_model(tmp_path):
    run = TrainedRun(tmp_path / "run", "model")
    assert str(why_no_split(run.view)).startswith("parallel.mode = model: every device has the whole batch")
    assert SettingScreen(run.view, ["gpu0_bsz"]).check("4")[0] is None


commands = st.builds(SetCommand, gpu0_bsz=st.none() | st.integers(0, 10) | st.just("auto")) | st.builds(
    SetCommand, shares=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any)
)


@given(
    st.builds(
        dict,
        mode=st.sampled_from(("dp", "ddp", "model", "single")),
        batch_size=st.integers(3, 9),
        num_devices=st.integers(2, 3),
        total_mib=st.none() | st.integers(3, 14).map(lambda n: 100.0 * n + 3.0),
        smallest_chunk=st.integers(1, 2),
        needs_samples=st.none() | st.just("the network cannot run without samples"),
    ),
    st.lists(st.tuples(st.sampled_from(("train", "short", "set", "revert")), st.integers(0, 9)), max_size=8),
    st.lists(commands, min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_random_runs_have_one_answer_and_one_reason(facts, course, asked):
    with tempfile.TemporaryDirectory() as path:
        run = TrainedRun(Path(path) / "run", **facts)
        for what, number in course:
            if what in ("train", "short"):
                run.train_epoch(is_full=what == "train")
            elif what == "set":
                run.ask(f"set gpu0_bsz={number}")
            else:
                run.controller.revert_split("no memory", run.epoch)
        checker, planner = run.view.split_checker, run.plan()
        for command in asked:
            request = command.split
            checked = run.trainer(request)
            assert checker.check(request) == checked
            assert run.ctl(command) == checked.rejection(force=False)
            if not isinstance(request, SplitRequest):
                continue
            planned = planner.checker(run.batch_size).check(request)
            assert planned.is_possible == checked.is_possible
            if not checked.is_possible:
                assert planned.reason == checked.reason
            elif facts["total_mib"] and checker.ceiling is None and checked.level not in ("no change", "refused"):
                peaks = checker.peaks.peak(checked.split or ())
                if all(peak.basis in ("measured", "fitted") for peak in peaks) and 0 not in (checked.split or ()):
                    row = planner.row(run.batch_size, request)
                    assert (row.level, row.reason) == (checked.level, checked.reason)
        run.writer.close()
