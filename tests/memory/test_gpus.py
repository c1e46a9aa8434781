"""Choosing GPUs by what a fake nvidia-smi says, and living with one that fails."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.memory import gpus
from segapp.memory.gpus import (
    GpuPoller,
    GpuStatus,
    VisibleGpus,
    ask_gputil,
    bare_uuid,
    order_by_free_memory,
    visible_gpus,
)
from tests.support.fake_smi import FOUR, SLICED, THREE_GPUS, Card, fake_smi, smi_of
from tests.support.fault_table import case
from tests.support.live_runs import wait_for


@case("G01", how="nvidia-smi says [N/A]", passes="nothing known of that number")
def test_three_gpus_are_parsed_one_without_numbers(tmp_path, monkeypatch):
    fake_smi(tmp_path, f"printf '%s' '{THREE_GPUS}'", monkeypatch)
    found = ask_gputil()
    assert [gpu.uuid for gpu in found] == ["aaaa", "bbbb", "cccc"]
    assert (found[0].used_mib, found[0].total_mib, found[0].utilization, found[0].temperature) == (4220, 24220, 0.1, 50)
    assert (found[1].utilization, found[1].temperature) == (None, None)
    indices, reason = order_by_free_memory(["cccc", "aaaa", "bbbb"], found)
    assert indices == [2, 1]  # torch's numbers, not nvidia-smi's; the busy one is left out
    assert "cuda:0" in reason.partition("in use by other processes")[2]


# --- which GPUs CUDA shows

A6000, FIRST_3060, SECOND_3060, LAST_3090 = (card.uuid for card in FOUR)


def seen_of(folder: Path, monkeypatch: pytest.MonkeyPatch, cards: tuple[Card, ...], **environ: str) -> VisibleGpus:
    smi_of(folder, cards, monkeypatch)
    return visible_gpus(environ)


LISTS = [
    (None, [A6000, FIRST_3060, SECOND_3060, LAST_3090], ""),
    ("3,0", [LAST_3090, A6000], ""),
    ("0, 2 ,3", [A6000, SECOND_3060, LAST_3090], ""),
    ("1gpu2,02", [FIRST_3060, SECOND_3060], ""),
    ("GPU-9d31", [LAST_3090], ""),
    ("GPU-2,GPU-1b", [SECOND_3060, FIRST_3060], ""),
    ("2,7,0", [SECOND_3060], "'7'"),
    ("3,-1,0", [LAST_3090], "'-1'"),
    ("1,,2", [FIRST_3060], "''"),
    ("GPU-9,3", [LAST_3090], "'3'"),
    ("GPU-9,GPU-1", [LAST_3090], "'GPU-1'"),
    ("", [], "hides every GPU"),
    ("-1", [], "hides every GPU"),
    ("NoDevFiles", [], "hides every GPU"),
    ("GPU-1", [], "names several GPUs by one uuid"),
    ("GPU-gone,GPU-2", [], "hides every GPU"),
    ("1,1", [], "names a GPU twice"),
    ("GPU-9d,GPU-2,GPU-9", [], "names a GPU twice"),
]
"""Values of CUDA_VISIBLE_DEVICES on FOUR, the uuids that it shows in their order, and a part of the problem."""


@pytest.mark.parametrize(("text", "uuids", "problem"), LISTS)
def test_cuda_visible_devices_is_read_as_torch_reads_it(tmp_path, monkeypatch, text, uuids, problem):
    """The other side is torch's own parser, given the uuids of the same four GPUs."""
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | ({} if text is None else {"CUDA_VISIBLE_DEVICES": text})
    seen = seen_of(tmp_path, monkeypatch, FOUR, **environ)
    assert [gpu.full_uuid for gpu in seen.gpus] == uuids
    sizes = {card.uuid: float(card.total_mib) for card in FOUR}
    assert [gpu.total_mib for gpu in seen.gpus] == [sizes[uuid] for uuid in uuids]
    assert problem in seen.problem
    assert (seen.problem == "") == (problem == "") == (seen.cure == "")
    assert [gpu.full_uuid for gpu in seen.listed] == [card.uuid for card in FOUR]
    assert uuids == shown_by_torch(text, monkeypatch)
    words = [*uuids] if text is None else text.split(",")[: len(uuids)]
    assert seen.words == words


def shown_by_torch(text: str | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the GPUs of FOUR that torch counts before CUDA begins, as `torch.cuda.device_count` does."""
    known = [card.uuid for card in FOUR]
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: len(known))
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: known)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    named: list[Any] = torch.cuda._parse_visible_devices()
    if named and isinstance(named[0], str):
        named = torch.cuda._transform_uuid_to_ordinals(named, known)
    return [known[index] for index in named[: torch.cuda._device_count_nvml()]]


@pytest.mark.parametrize(
    ("order", "cards", "text", "is_said"),
    [
        (None, FOUR, "0", True),
        ("FASTEST_FIRST", FOUR, "3,0", True),
        ("PCI_BUS_ID", FOUR, "0", False),
        (None, FOUR, "GPU-2", False),
        (None, FOUR, None, False),
        (None, FOUR[1:3], "1", False),
        (None, (SLICED[1], replace(SLICED[0], mig="Disabled")), "1", False),  # a GPU with slices and one without
        (None, (SLICED[1], SLICED[3]), "1", True),
    ],
)
def test_unknown_order_of_unlike_gpus_is_said(tmp_path, monkeypatch, order, cards, text, is_said):
    environ = {"CUDA_DEVICE_ORDER": order, "CUDA_VISIBLE_DEVICES": text}
    seen = seen_of(tmp_path, monkeypatch, cards, **{name: value for name, value in environ.items() if value})
    assert ("fastest GPU first" in seen.problem) == ("CUDA_DEVICE_ORDER=PCI_BUS_ID" in seen.cure) == is_said


FIRST_SLICE, SECOND_SLICE, THIRD_SLICE, OTHER_SLICE = "MIG-77aa01", "MIG-77ab02", "MIG-80cd03", "MIG-91"


@pytest.mark.parametrize(
    ("text", "uuid", "total_mib", "words"),
    [
        (None, FIRST_SLICE, 40192, [FIRST_SLICE, SECOND_SLICE, THIRD_SLICE, OTHER_SLICE, "GPU-8a99"]),
        ("MIG-77ab", SECOND_SLICE, 9728, ["MIG-77ab"]),
        ("MIG-8,MIG-77ab", THIRD_SLICE, 10e9 / 2**20, ["MIG-8", "MIG-77ab"]),
        ("1", FIRST_SLICE, 40192, ["1"]),
        ("2", OTHER_SLICE, 12011, ["2"]),
        ("3", "GPU-8a99", 23034, ["3"]),
        ("3,2", OTHER_SLICE, 12011, ["3", "2"]),
        ("GPU-7", OTHER_SLICE, 12011, ["GPU-7"]),
        ("0", None, None, []),
        ("0,3", None, None, []),
        ("MIG-77", None, None, []),
        ("MIG-80,MIG-80c", None, None, []),
    ],
)
def test_process_sees_one_mig_slice_with_its_own_memory(tmp_path, monkeypatch, text, uuid, total_mib, words):
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | ({} if text is None else {"CUDA_VISIBLE_DEVICES": text})
    seen = seen_of(tmp_path, monkeypatch, SLICED, **environ)
    assert [(gpu.full_uuid, gpu.total_mib) for gpu in seen.gpus] == ([] if uuid is None else [(uuid, total_mib)])
    assert seen.words == words
    assert all(gpu.uuid == bare_uuid(gpu.full_uuid) and "-" not in gpu.uuid for gpu in seen.gpus)
    assert (text is None or not uuid) == bool(seen.problem)


def test_mig_mode_without_slices_shows_no_gpu(tmp_path, monkeypatch):
    seen = seen_of(tmp_path, monkeypatch, (SLICED[0], SLICED[3]))
    assert [gpu.name for gpu in seen.gpus] == ["NVIDIA L4"]
    assert seen.message.startswith(
        "GPU-5e00 is in MIG mode without slices: create slices with sudo nvidia-smi mig -cgi"
    )
    hidden = visible_gpus({"CUDA_VISIBLE_DEVICES": "0"})
    assert hidden.problem == "CUDA_VISIBLE_DEVICES='0' hides every GPU, and GPU-5e00 is in MIG mode without slices"


def test_driver_without_mig_mode_is_asked_again(tmp_path, monkeypatch):
    smi_of(tmp_path, FOUR, monkeypatch, driver="440.118.02")
    seen = visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-9"})
    assert [(gpu.name, gpu.total_mib, gpu.used_mib) for gpu in seen.gpus] == [("NVIDIA GeForce RTX 3090", 24576, 700)]
    assert seen.message == ""


NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure it is running."
LOST = "Unable to determine the device handle for GPU 0000:05:00.0: GPU is lost.  Reboot the system to recover this GPU"


@case("G01", how="nvidia-smi: no devices, NVML error, exit 1", passes="its message and the cure are said")
@pytest.mark.parametrize(
    ("script", "problem", "cure"),
    [
        ("echo 'No devices were found'; exit 6", "No devices were found", "lspci"),
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; echo 'NVML library version: 535.183'"
            "; exit 18",
            "Failed to initialize NVML: Driver/library version mismatch",
            "restart the machine, or reload the driver: sudo rmmod",
        ),
        (f'echo "{NO_DRIVER}"; exit 9', "communicate with the NVIDIA driver", "modprobe nvidia"),
        (f"echo '{LOST}'; exit 15", "GPU is lost", "grep Xid"),
        ("echo 'Failed to initialize NVML: Insufficient Permissions' >&2; exit 4", "Insufficient", "/dev/nvidia"),
        ("exit 1", "exit status 1", "nvidia-smi -q"),
        ("exit 0", "it lists no GPU", "nvidia-smi -q"),
    ],
)
def test_failing_nvidia_smi_is_quoted_with_the_cure(tmp_path, monkeypatch, script, problem, cure):
    fake_smi(tmp_path, script, monkeypatch)
    seen = visible_gpus({"CUDA_VISIBLE_DEVICES": "0"})
    assert (seen.gpus, seen.words, seen.listed) == ([], [], [])
    assert problem in seen.problem
    assert "CUDA_VISIBLE" not in seen.problem
    assert cure in seen.cure
    assert ask_gputil() == []


def test_lost_gpu_is_named_and_the_others_are_known(tmp_path, monkeypatch):
    seen = seen_of(tmp_path, monkeypatch, (FOUR[0], replace(FOUR[1], lost=LOST), *FOUR[2:]))
    assert [gpu.full_uuid for gpu in seen.gpus] == [A6000, SECOND_3060, LAST_3090]
    assert "GPU is lost" in seen.problem
    assert "restart the machine" in seen.cure


def test_container_without_gpus_names_its_variable(tmp_path, monkeypatch):
    problem = "not on PATH"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}).problem == f"nvidia-smi: {problem}"
    void = visible_gpus({"NVIDIA_VISIBLE_DEVICES": "void"})
    assert void.message == (
        f"nvidia-smi: {problem}, and NVIDIA_VISIBLE_DEVICES='void': start the container with --gpus all"
    )
    hidden = visible_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}).problem
    assert hidden == f"nvidia-smi: {problem}; CUDA_VISIBLE_DEVICES='NoDevFiles' hides every GPU"


@case("G01", how="nvidia-smi hangs", passes="not waited for, and said")
def test_hanging_nvidia_smi_is_ended_after_its_timeout(tmp_path, monkeypatch):
    fake_smi(tmp_path, f"echo $$ > {tmp_path / 'pid'}; sleep 20", monkeypatch)
    began = time.monotonic()
    seen = visible_gpus({}, timeout_s=0.2)
    assert time.monotonic() - began < 5
    assert (seen.gpus, seen.problem) == ([], "nvidia-smi: no answer within 0.2 s")
    assert "grep Xid" in seen.cure
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_freest_gpu_comes_first_when_all_are_busy():
    indices, reason = order_by_free_memory(["a", "b"], [])  # nothing is measured
    assert indices == [0, 1]
    assert "nvidia-smi" in reason
    busy = [GpuStatus(u, "", used, 100.0, 0.9, None) for u, used in (("a", 80.0), ("b", 60.0))]
    assert order_by_free_memory(["a", "b"], busy)[0] == [1, 0]
    free = GpuStatus("a", "", 10.0, 100.0, 0.0, None)
    for used_mib, total_mib in ((None, 100.0), (5.0, None)):
        found = order_by_free_memory(["b", "a"], [free, GpuStatus("b", "", used_mib, total_mib, 0.0, None)])
        assert found == ([0, 1], "nvidia-smi does not report their memory: all visible GPUs, in order")
    assert bare_uuid("GPU-12") == bare_uuid("12") == "12"


# --- asking again and again

EIGHT = "".join(
    f"{i}, GPU-{i:04}, {i}, 143771, {1000 + i}, 142771, 570.1, NVIDIA H200, {i}, Disabled, Disabled, 4{i}\n"
    for i in range(8)
)


@pytest.mark.parametrize(("pause_s", "times_s"), [(0.0, [0, 2, 4, 6, 8, 10]), (5.0, [0, 6]), (30.0, [0])])
def test_question_rests_after_its_answer(pause_s, times_s, monkeypatch):
    """On a clock of our own: a caller every 2 s, as the sampler is."""
    now = [0.0]
    monkeypatch.setattr(gpus.time, "monotonic", lambda: now[0])
    asked: list[float] = []
    latest = gpus._LatestAnswer("test", lambda: asked.append(now[0]))
    for now[0] in range(0, 12, 2):
        latest.ask_again(pause_s)
    assert asked == times_s


def test_own_memory_is_the_drivers(tmp_path, monkeypatch):
    (tmp_path / "out").write_text(EIGHT)
    fake_smi(tmp_path, f"cat {tmp_path / 'out'}", monkeypatch)
    poller = GpuPoller(own_used_mib=lambda: {"0001": 77.0, "another": 5.0})
    wait_for(lambda: len(poller.poll()) == 9, 20)
    found = {gpu.uuid: gpu for gpu in poller.poll()}
    assert [found[f"{i:04}"].used_mib for i in range(3)] == [1000, 77, 1002]
    assert (found["0001"].utilization, found["0001"].temperature) == (0.01, 41)
    assert found["another"] == GpuStatus("another", "", 5.0, None, None, None)


def test_own_memory_is_known_where_nvidia_smi_hangs(tmp_path, monkeypatch):
    fake_smi(tmp_path, "sleep 20", monkeypatch)
    used = iter(range(100))
    poller = GpuPoller(own_used_mib=lambda: {"a": float(next(used))})
    assert [poller.poll()[0].used_mib for _ in range(3)] == [0, 1, 2]


# --- whose processes

OWN = os.getpid()


@pytest.mark.parametrize(
    ("used_mib", "total_mib", "utilization", "expected"),
    [
        (100.0, 200.0, 0.5, True),
        (101.0, 200.0, 0.5, False),
        (100.0, 200.0, 0.51, False),
        (0.0, 200.0, 1.0, False),
        (100.0, 200.0, None, True),
        (None, 200.0, 0.0, True),
        (100.0, None, 0.0, True),
        (None, None, 0.51, False),
    ],
)
def test_gpu_is_available_up_to_half_of_its_load_and_memory(used_mib, total_mib, utilization, expected):
    assert GpuStatus("u", "n", used_mib, total_mib, utilization, None).is_available == expected
