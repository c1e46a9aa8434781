"""The device pane and the editor of gpu0_bsz, word by word, for two devices of 10 GiB and a batch of 8."""

from __future__ import annotations

import pytest
from textual.geometry import Size

from segapp.run.events import Device, DeviceMemory, Gpu0Bsz, Recompute, RunStart, Step, Topology
from segapp.tui.devices import Draft, begin_draft, edit_draft, gpu0_content, gpu_content, headroom_level, memory_graph
from segapp.tui.widgets import ASCII
from segapp.view.source import Status
from segapp.view.view import View, fold_events

LIVE = Status("live", now_s=150.0)


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
    view.memory.extend([((0.0, 0.0), (1.0, 1.0)), ((2560.0, 1.0),), ((5120.0, 1.0), (1.0, 1.0)), ((10_240.0, 1.0),)])
    return view


def test_each_device_has_a_line_with_a_bar(view: View) -> None:
    lines = gpu_content(view, (), Size(60, 3), ASCII).plain.splitlines()
    assert lines == [
        "GPU0 ========-........   5.0/10   6.0  96%  71C 3 img  ok   ",
        "GPU1 ================.   9.6/10   9.2  n/a    - 5 img  full ",
    ]
    narrow = gpu_content(view, (), Size(59, 3), ASCII).plain.splitlines()
    assert narrow[0].startswith("0 =========-.........   5.0/10")
    assert gpu_content(view, (), Size(30, 3), ASCII).plain.splitlines()[0] == "0 ======......   5.0/10 3 img "
    assert len(gpu_content(view, (), Size(200, 3), ASCII).plain.splitlines()[0].split()[1]) == 40
    view.split = (2, 6)
    assert "5.0/10     -  96%" in gpu_content(view, (), Size(60, 3), ASCII).plain  # no peak of this split yet
    view.devices = [DeviceMemory(device="cpu", used_mib=812.0)]
    words = gpu_content(view, (), Size(60, 3), ASCII).plain.split()
    assert words == ["CPU0", "." * 21, "812M/n/a", "-", "n/a", "2", "img"]


def test_devices_of_several_machines_have_their_names(view: View) -> None:
    assert view.start is not None
    names = ("node1", "node1 (2)")
    devices = [Device(device="cuda:0", total_mib=10_240, machine=name) for name in names]
    view.start = view.start.model_copy(update={"devices": devices})
    lines = gpu_content(view, (), Size(70, 3), ASCII).plain.splitlines()
    assert [line.partition(" =")[0] for line in lines] == ["node1     GPU0", "node1 (2) GPU1"]
    assert gpu_content(view, (), Size(59, 3), ASCII).plain.startswith("node1     0 =")


def test_taller_pane_has_the_allocator_and_a_graph(view: View) -> None:
    lines = gpu_content(view, (7168.0, None), Size(80, 4), ASCII).plain.splitlines()
    assert lines[1::2] == [
        "  allocated 2.0  reserved 3.0  peak 6.0  predicted 7.0  in backward", "  peak 9.2"
    ]  # fmt: skip
    narrow = gpu_content(view, (7168.0,), Size(50, 4), ASCII).plain.splitlines()
    assert narrow[1] == "  allocated 2.0  reserved 3.0  peak 6.0"
    assert len(gpu_content(view, (), Size(80, 7), ASCII).plain.splitlines()) == 4
    assert len(gpu_content(view, (), Size(80, 8), ASCII).plain.splitlines()) == 2 + 2 + 2 + 2  # two rows of a graph
    assert len(gpu_content(view, (), Size(80, 40), ASCII).plain.splitlines()) == 2 + 2 + 6 + 6


def test_logical_devices_share_one_line_and_predict_nothing(view: View) -> None:
    assert view.start is not None
    view.start = view.start.model_copy(update={"devices": [Device(device="cpu")] * 3, "mode": "dp"})
    view.devices = [DeviceMemory(device="cpu", used_mib=5120, total_mib=10_240, peak_mib=6144)] * 3
    view.split, view.peaks_mib = (2, 3, 3), {(2, 3, 3): [6144.0] * 3}
    lines = gpu_content(view, (), Size(70, 4), ASCII).plain.splitlines()
    assert lines[0] == "3 logical devices share one process and its memory  shown once"
    assert lines[1].startswith("CPU0-2 ====")
    assert "2.3.3 img" in lines[1].replace("·", ".")
    assert lines[2:] == ["  peak 6.0"]
    assert gpu_content(view, (), Size(50, 4), ASCII).plain.splitlines()[1].startswith("0-2 ===")
    editor = gpu0_content(view, LIVE, Draft("1"), (80, 9), ASCII, can_edit=True).plain
    assert "no prediction: the devices share one process" in editor
    assert "GiB" not in editor
    assert "CPU0" not in editor
    ranks = view.start.model_copy(update={"mode": "ddp"})  # each rank is a process of its own
    view.start = ranks
    assert [line[:4] for line in gpu_content(view, (), Size(70, 3), ASCII).plain.splitlines()] == [
        "CPU0",
        "CPU1",
        "CPU2",
    ]


def test_changed_ranks_have_a_line_above_the_devices(view: View) -> None:
    change = Topology(step=4, ranks=2, machines=1, old_ranks=3, old_machines=2, reason="without node2 cuda:0")
    fold_events(view, [{**change.model_dump(), "t": 60.0}])
    lines = gpu_content(view, (), Size(80, 3), ASCII).plain.splitlines()
    assert lines[0] == "2 ranks on 1 machine (before: 3 on 2)  without node2 cuda:0"
    assert len(lines) == 3
    assert len(gpu_content(view, (), Size(80, 2), ASCII).plain.splitlines()) == 2  # the devices come first


def test_recomputed_blocks_have_a_line_above_the_devices(view: View) -> None:
    change = Recompute(step=9, choice="all", blocks=[["a", "b"], ["a", "b"]], num_blocks=2, reason="out of memory")
    fold_events(view, [{**change.model_dump(), "t": 60.0}])
    assert gpu_content(view, (), Size(60, 3), ASCII).plain.splitlines()[0] == "2 of 2 blocks recomputed"
    assert len(gpu_content(view, (), Size(80, 3), ASCII).plain.splitlines()) == 3
    fold_events(view, [{**change.model_copy(update={"blocks": [["a"], []]}).model_dump(), "t": 61.0}])
    assert gpu_content(view, (), Size(60, 3), ASCII).plain.startswith("1·0 of 2 blocks recomputed\n")
    by_plan = change.model_copy(update={"saved_mib": [3174.4, 512.0], "slower": 1.25})
    fold_events(view, [{**by_plan.model_dump(), "t": 61.5}])
    shown = gpu_content(view, (), Size(80, 3), ASCII).plain.splitlines()[0]
    assert shown == "2 of 2 blocks recomputed  saves 3.1 / 512M  step time x 1.25 by the plan"
    assert gpu_content(view, (), Size(60, 2), ASCII).plain.startswith("GPU0")  # no room beside the devices
    fold_events(view, [{**change.model_copy(update={"blocks": [[], []]}).model_dump(), "t": 62.0}])
    assert gpu_content(view, (), Size(60, 3), ASCII).plain.startswith("GPU0")


def test_graph_of_memory_ends_at_the_right(view: View) -> None:
    def graph(index: int, total_mib: float | None, width: int) -> list[str]:
        return [line.plain for line in memory_graph(view, index, total_mib, Size(width, 2), ASCII)]

    assert graph(0, 10_240.0, 12) == ["           :", "        .:::"]  # 0, a quarter, a half, all of it
    assert graph(0, 20_480.0, 12) == [" " * 12, "        ..::"]
    assert graph(0, None, 12) == graph(0, 10_240.0, 12)
    assert graph(1, 1.0, 12) == ["        : : ", "        : : "]  # no sample of this device in between
    assert graph(0, 10_240.0, 10) == ["         :", "      .:::"]
    assert graph(0, 10_240.0, 9) == []
    view.memory.clear()
    view.memory.extend([((0.0, 0.0),), ((0.0, 0.0),)])
    assert graph(0, None, 12) == [" " * 12, "          .."]
    view.memory.clear()
    view.memory.append(((1.0, 1.0),))
    assert graph(0, 10_240.0, 12) == []


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
        return gpu0_content(view, status, None, (60, 5), ASCII, can_edit=can_edit).plain.splitlines()

    assert shown() == ["3  split 3·5  batch 8", "press b to change it from the next epoch on"]
    assert shown(can_edit=False) == ["3  split 3·5  batch 8"]
    view.gpu0.changes.append(
        Gpu0Bsz(status="applied", old=2, new=3, epoch=4, predicted_mib=[5120.0, 1.0], is_auto=True, t=60.0)
    )
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
    assert shown() == ["3 -> even  PENDING: epoch 4, in 20s", "split 3·5 -> 4·4", "press u to cancel"]
    view.gpu0.pending = Gpu0Bsz(status="pending", old=3, new=2, split=[2, 6])
    assert shown(Status("crashed"))[:2] == ["3 -> 2  PENDING: the next epoch", "split 3·5 -> 2·6"]
    view.start = view.start.model_copy(update={"devices": view.start.devices[:1]}) if view.start else None
    assert shown() == ["one device: nothing to split"]
    view.start = None
    assert shown() == ["known once the training has started"]


def test_editor_opens_with_the_pending_or_present_value(view: View) -> None:
    assert begin_draft(view) == Draft("3", is_fresh=True)
    view.gpu0.pending = Gpu0Bsz(status="pending", old=3, new=None)
    assert begin_draft(view) == Draft("", is_fresh=True)
    view.gpu0.pending = Gpu0Bsz(status="pending", old=3, new=2)
    assert begin_draft(view).value == 2


@pytest.fixture
def measured(view: View) -> View:
    """3 GiB and 1 GiB for each sample on every device; of device 0 another process holds 2 GiB."""
    view.peaks_mib = {(3, 5): [6144.0, 8192.0], (2, 6): [5120.0, 9216.0]}
    return view


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("4", [
            "3 ->  4   ok",
            "split 3·5 -> 4·4",
            "GPU0 peak 6.0 -> 7.0±0.1 /8.0  ok",
            "GPU1 peak 8.0 -> 7.0±0.1 /10.0  ok",
            "device 0 would need about 7.0 of 8.0 GiB (88 %)",
            "+ - change  e even  enter  esc",
        ]),
        ("5", [
            "3 ->  5   won't fit",
            "split 3·5 -> 5·3",
            "GPU0 peak 6.0 -> 8.0±0.1 /8.0  won't fit",
            "GPU1 peak 8.0 -> 6.0±0.1 /10.0  ok",
            "device 0 would need about 8.0 of 8.0 GiB (100 %): give it fewer samples",
            "+ - change  ! to send anyway  esc",
        ]),
        ("9", [
            "3 ->  9   refused",
            "split 3·5 -> -",
            "gpu0_bsz=9 is more than the batch of 8: use 0 to 8",
            "+ - change  e even  esc",
        ]),
    ],
)  # fmt: skip
def test_editor_shows_the_memory_that_a_split_would_need(measured: View, text: str, lines: list[str]) -> None:
    def shown(width: int, height: int, draft: Draft) -> list[str]:
        return gpu0_content(measured, LIVE, draft, (width, height), ASCII, can_edit=True).plain.splitlines()

    assert shown(80, 6, Draft(text)) == lines
    if text == "4":
        assert shown(80, 6, Draft("")) == [lines[0].replace(" 4 ", " even "), *lines[1:]]
        assert shown(80, 5, Draft(text)) == [*lines[:3], *lines[4:]]  # the fullest device where there is no room
        assert shown(30, 7, Draft(text))[4:6] == ["device 0 would need about 7.0", "of 8.0 GiB (88 %)"]
        measured.peaks_mib.popitem()
        assert shown(80, 7, Draft(text)) == [
            "3 ->  4   may not fit",
            "split 3·5 -> 4·4",
            "GPU0 peak 6.0 -> 8.0 at most /8.0  may not fit",
            "GPU1 peak 8.0 -> 8.0 at most /10.0  ok",
            "device 0 would need about 8.0 of 8.0 GiB (100 %) at most: no other split was",
            "measured yet",
            "+ - change  enter twice to send  esc",
        ]
        assert shown(80, 7, Draft(text, is_confirmed=True))[-1] == "enter again to send  esc"
    if text == "5":
        assert shown(80, 6, Draft(text, is_confirmed=True))[-1] == "! again to send anyway  esc"


def test_splits_are_sent_once_or_after_a_second_key(measured: View) -> None:
    def entered(draft: Draft, key: str = "enter") -> tuple[Draft | None, bool]:
        return edit_draft(draft, key, key if len(key) == 1 else None, measured)

    assert entered(Draft("4")) == (None, True)
    assert entered(Draft("3")) == (None, False)  # already in use
    assert entered(Draft("5")) == (Draft("5"), False)
    assert entered(Draft("5"), "!") == (Draft("5", is_confirmed=True), False)
    assert entered(Draft("5", is_confirmed=True), "!") == (None, True)
    assert entered(Draft("9", is_confirmed=True), "!") == (Draft("9", is_confirmed=True), False)
    measured.gpu0.pending = Gpu0Bsz(status="pending", old=3, new=2)
    assert entered(Draft("3")) == (None, True)
    measured.peaks_mib.popitem()
    assert entered(Draft("4")) == (Draft("4", is_confirmed=True), False)
    assert entered(Draft("4", is_confirmed=True)) == (None, True)


@pytest.mark.parametrize(
    ("text", "is_fresh", "key", "after"),
    [
        ("3", True, "4", "4"), ("3", False, "4", "34"), ("0", False, "4", "4"), ("123456", False, "7", "123456"),
        ("12", False, "backspace", "1"), ("", False, "backspace", ""), ("3", False, "e", ""),
        ("3", True, "+", "4"), ("3", True, "=", "4"), ("3", True, "up", "4"), ("3", True, "-", "2"),
        ("3", True, "_", "2"), ("3", True, "down", "2"), ("0", True, "down", "0"), ("8", True, "up", "8"),
        ("", False, "up", "4"), ("", False, "down", "2"), ("3", True, "x", "3"),
    ],
)  # fmt: skip
def test_keys_of_the_editor_change_the_number(view: View, text: str, is_fresh: bool, key: str, after: str) -> None:
    character = key if len(key) == 1 else None
    draft, is_sent = edit_draft(Draft(text, is_fresh=is_fresh), key, character, view)
    assert draft is not None
    assert (draft.text, is_sent) == (after, False)
    assert draft.is_fresh == (key in ("+", "=", "-", "_", "up", "down", "x"))
    assert edit_draft(draft, "escape", None, view) == (None, False)
