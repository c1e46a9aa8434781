"""The device pane and the dialog of gpu0_bsz, word by word, for two devices of 10 GiB and a batch of 8."""

from __future__ import annotations

import pytest
from textual.geometry import Size

from segapp.memory.peaks import PeakModel
from segapp.memory.split_check import SplitChecker
from segapp.run.events import Device, DeviceMemory, Gpu0Bsz, RunStart, Settings, Step, Topology
from segapp.tui.devices import gpu0_content, gpu_content, gpu_legend, headroom_level
from segapp.tui.dialogs import SettingScreen
from segapp.tui.widgets import ascii_text
from segapp.view.source import Status
from segapp.view.view import EventFold, View

LIVE = Status("live", "live", now_s=150.0)


@pytest.fixture
def view() -> View:
    view = View()
    view.start = RunStart(
        classes=["road"], num_params=9, batch_size=8, epochs=8, steps_per_epoch=20, t=50.0,
        devices=[Device(device=f"cuda:{i}", total_mib=10_240) for i in range(2)],
    )  # fmt: skip
    view.split, view.gpu0.value = (3, 5), 3
    view.peaks_mib = {(3, 5): [6144.0, 9420.0]}
    view.devices = [
        DeviceMemory(device="cuda:0", used_mib=5120, total_mib=10_240, utilization=0.96, temperature=71,
                     allocated_mib=2048, reserved_mib=3072, peak_mib=6144, phase="backward"),
        DeviceMemory(device="cuda:1", used_mib=9830.5, total_mib=10_240),
    ]  # fmt: skip
    return view


def rows(view: View, predicted_mib: tuple[float | None, ...] = (), width: int = 60) -> list[str]:
    return ascii_text(gpu_content(view, predicted_mib, Size(width, 3)).plain).splitlines()


def test_each_device_has_one_row_of_memory_against_its_limit(view: View) -> None:
    assert rows(view, (7168.0, 9500.0)) == [
        "GPU0 =========-.|.V.....  5.0/10.0 GiB  3 img  96% 71C      ",
        "GPU1 =================|V  9.6/10.0 GiB  5 img          full ",
    ]
    wide = [row.partition("img")[2].split() for row in rows(view, width=80)]
    assert wide == [["96%", "71C", "peak", "6.0"], ["peak", "9.2", "full"]]
    assert gpu_legend((None, 9.0)).plain == "━ used  │ peak  ◆ predicted"
    assert gpu_legend((None,)).plain == "━ used  │ peak"


def test_marks_of_a_bar_are_inside_it_and_apart(view: View) -> None:
    def bar(peak_mib: float, predicted_mib: float | None) -> str:
        view.peaks_mib = {(3, 5): [peak_mib, 0.0]}
        return rows(view, (predicted_mib,))[0].split()[1]

    width = len(bar(6144.0, None))
    assert [bar(6144.0, 6150.0)[at] for at in (-1, 0)] == [".", "="]
    assert bar(6144.0, 6150.0).index("V") == bar(6144.0, 6150.0).index("|") + 1  # the same cell otherwise
    assert bar(99_999.0, 99_999.0).endswith("V|")  # both above the limit
    assert bar(1024.0, 2048.0).index("|") < bar(1024.0, 2048.0).index("V") < width // 2  # inside the used part


def test_row_has_only_what_is_known(view: View) -> None:
    assert rows(view, width=39)[0].startswith("0 =")
    assert rows(view, width=30)[0].endswith(" 5.0/10.0 GiB")
    assert len(rows(view, width=200)[0].split()[1]) == 40
    view.split = (2, 6)
    assert "peak" not in rows(view)[0]  # no peak of this split yet
    assert "|" not in rows(view)[0]
    view.devices = [DeviceMemory(device="cpu", used_mib=812.0)]
    assert rows(view)[0].split() == ["CPU0", "812", "MiB", "2", "img"]
    view.devices = [DeviceMemory(device="cuda:0", used_mib=212.0, total_mib=512.0)]
    assert "212/512 MiB" in rows(view)[0]


def test_devices_of_several_machines_have_their_names(view: View) -> None:
    assert view.start is not None
    names = ("node1", "node1 (2)")
    devices = [Device(device="cuda:0", total_mib=10_240, machine=name) for name in names]
    view.start = view.start.model_copy(update={"devices": devices})
    assert [line.partition(" =")[0] for line in rows(view, width=70)] == ["node1     GPU0", "node1 (2) GPU1"]
    assert rows(view, width=39)[0].startswith("node1     0 =")


def test_logical_devices_share_one_line_and_predict_nothing(view: View) -> None:
    assert view.start is not None
    view.start = view.start.model_copy(update={"devices": [Device(device="cpu")] * 3, "mode": "dp"})
    view.devices = [DeviceMemory(device="cpu", used_mib=5120, total_mib=10_240, peak_mib=6144)] * 3
    view.split, view.peaks_mib = (2, 3, 3), {(2, 3, 3): [6144.0] * 3}
    lines = ascii_text(gpu_content(view, (), Size(70, 4)).plain).splitlines()
    assert lines[0] == "3 logical devices share one process and its memory  shown once"
    assert lines[1].startswith("CPU0-2 ====")
    assert "2.3.3 img" in lines[1]
    assert "peak  6.0" in lines[1]
    assert len(lines) == 2
    assert rows(view, width=39)[1].startswith("0-2 ===")
    assert "GiB" not in SettingScreen(view, ["gpu0_bsz"]).check("1")[1]
    view.start = view.start.model_copy(update={"mode": "ddp"})  # each rank is a process of its own
    assert [row[:4] for row in rows(view, width=70)] == ["CPU0", "CPU1", "CPU2"]


def test_changed_ranks_have_a_line_above_the_devices(view: View) -> None:
    fewer = Topology(ranks=3, machines=2, old_ranks=4, old_machines=2)
    first = Settings(step=2, topology=fewer, reason="without node2 cuda:1")
    fewest = Topology(ranks=2, machines=1, old_ranks=3, old_machines=2)
    change = Settings(step=4, topology=fewest, reason="without node2 cuda:0")
    EventFold(view).add([{**each.model_dump(), "t": 60.0 + each.step} for each in (first, change)])
    lines = ascii_text(gpu_content(view, (), Size(80, 3)).plain).splitlines()
    assert lines[0] == "2 ranks on 1 machine (before: 3 on 2)  without node2 cuda:0"
    assert len(lines) == 3
    assert len(ascii_text(gpu_content(view, (), Size(80, 2)).plain).splitlines()) == 2  # the devices come first


def test_recomputed_blocks_have_a_line_above_the_devices(view: View) -> None:
    change = Settings(step=9, recompute="all", blocks=[["a", "b"], ["a", "b"]], num_blocks=2, reason="out of memory")
    EventFold(view).add([{**change.model_dump(), "t": 60.0}])
    assert ascii_text(gpu_content(view, (), Size(60, 3)).plain).splitlines()[0] == "2 of 2 blocks recomputed"
    assert len(ascii_text(gpu_content(view, (), Size(80, 3)).plain).splitlines()) == 3
    EventFold(view).add([{**change.model_copy(update={"blocks": [[], ["a"]]}).model_dump(), "t": 61.0}])
    assert ascii_text(gpu_content(view, (), Size(60, 3)).plain).startswith("0.1 of 2 blocks recomputed\n")
    EventFold(view).add([{**change.model_dump(), "t": 61.5}])
    assert ascii_text(gpu_content(view, (), Size(60, 2)).plain).startswith("GPU0")  # no room beside the devices
    ranks = Settings(step=9, topology=Topology(ranks=2, machines=1, old_ranks=3, old_machines=1), reason="without cpu")
    EventFold(view).add([{**ranks.model_dump(), "t": 61.7}])
    lines = ascii_text(gpu_content(view, (), Size(60, 4)).plain).splitlines()
    assert sorted(lines[:2]) == ["2 of 2 blocks recomputed", "2 ranks on 1 machine (before: 3 on 1)  without cpu"]
    EventFold(view).add([{**change.model_copy(update={"blocks": [[], []]}).model_dump(), "t": 62.0}])
    assert ascii_text(gpu_content(view, (), Size(60, 4)).plain).splitlines()[1].startswith("GPU0")


@pytest.mark.parametrize(
    ("used_mib", "total_mib", "level"),
    [(90.0, 100.0, "ok"), (90.1, 100.0, "tight"), (95.0, 100.0, "tight"), (95.1, 100.0, "full"), (None, 100.0, ""),
     (1.0, None, ""), (1.0, 0.0, "")],
)  # fmt: skip
def test_headroom_is_tight_above_90_and_full_above_95_percent(
    used_mib: float | None, total_mib: float | None, level: str
) -> None:
    assert headroom_level(used_mib, total_mib) == level


def test_pane_of_the_split_shows_the_last_change(view: View) -> None:
    def shown(status: Status = LIVE, *, can_edit: bool = True) -> list[str]:
        return gpu0_content(view, status, 60, can_edit=can_edit).plain.splitlines()

    assert shown() == ["3  split 3·5  batch 8", "press b to change it from the next epoch on"]
    assert shown(can_edit=False) == ["3  split 3·5  batch 8"]
    view.live["gpu0_bsz"] = "auto"
    view.gpu0.changes.append(Gpu0Bsz(status="applied", old=2, new=3, epoch=4, predicted_mib=[5120.0, 1.0]))
    assert shown() == ["3  auto  split 3·5  batch 8", "applied at epoch 4, GPU0 peak 6.0 (predicted 5.0)"]
    view.gpu0.changes.append(Gpu0Bsz(status="applied", old=2, new=3, observed_mib=[7168.0, 1.0]))
    assert shown()[1] == "applied, GPU0 peak 7.0"
    view.peaks_mib = {}
    view.gpu0.changes.append(Gpu0Bsz(status="applied", old=2, new=3, predicted_mib=[5120.0, 1.0]))
    assert shown()[1] == "applied"
    view.gpu0.changes.append(Gpu0Bsz(status="reverted", old=3, new=None))
    assert shown()[1] == "even was reverted"
    view.gpu0.pending = Gpu0Bsz(status="pending", old=3, new=None, epoch=4)
    view.epoch, view.step = 3, Step(epoch=3, step=50, loss=0.5, lr=0.1, eta_epoch_s=30.0, t=140.0)
    assert shown() == ["3 → even  PENDING: epoch 4, in 20s", "split 3·5 → 4·4"]
    view.gpu0.pending = Gpu0Bsz(status="pending", old=3, new=2, split=[2, 6])
    assert shown(Status("crashed", "crashed"))[:2] == ["3 → 2  PENDING: the next epoch", "split 3·5 → 2·6"]


def test_dialog_shows_the_memory_that_a_split_would_need(view: View) -> None:
    peaks = PeakModel({(3, 5): (6144.0, 8192.0), (2, 6): (5120.0, 9216.0)})  # 3 GiB and 1 GiB for each sample
    view.written_checker = SplitChecker(8, 2, current=(3, 5), usable_mib=[10_240.0, 10_240.0], peaks=peaks)
    check = SettingScreen(view, ["gpu0_bsz"]).check
    command, text = check("4")
    assert command is not None
    assert (command.gpu0_bsz, text.startswith("ok: split 4·4, peaks 7.0, 7.0 GiB; device 0 would need")) == (4, True)
    for typed, level in (("3", "no change: "), ("5", "won't fit: split 5·3, peaks 8.0, 6.0 GiB"), ("9", "refused: ")):
        command, text = check(typed)
        assert (command, text.startswith(level)) == (None, True)
    even, automatic = check("even")[0], check("auto")[0]
    assert even is not None
    assert automatic is not None
    assert (even.gpu0_bsz, automatic.gpu0_bsz) == (None, "auto")
    assert check("x")[0] is None
