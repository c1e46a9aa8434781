"""A run's events -> overhead: synthetic measurements with a known law and a known error of the prediction."""

from contextlib import closing

import pytest

from segapp.errors import ConfigError
from segapp.memory.calibration import calibrated, collect, read_measurement
from segapp.memory.peaks import Line, PeakModel, PlannedPeaks
from segapp.memory.plan import GpuSpec, OverheadEstimate
from segapp.run.events import Device, DeviceMemory, EventWriter, Memory, RunStart
from segapp.run.folder import RunFolder

MODEL = PlannedPeaks(
    "dp", ({"backward": Line(300.0, 1000.0)},), (({"backward": Line(200.0, 1000.0)},),), ({"step": Line(90.0)},)
)


def memory_event(split, factor, context=(650.0, 420.0, 420.0)):
    rows = [
        {
            "device": f"cuda:{i}",
            "total_mib": 24220.0,
            "peak_mib": factor * mib,
            "reserved_mib": 1.05 * mib,
            "used_mib": 1.05 * mib + context[i],
        }
        for i, mib in enumerate(MODEL.peak_mib(split))
    ]
    return {"type": "memory", "devices": rows}


def run_of(*splits, factor=1.06):
    events = [{"type": "run_start", "devices": [{"device": f"cuda:{i}"} for i in range(3)], "split": list(splits[0])}]
    for split in splits:
        events.append({"type": "gpu0_bsz", "status": "applied", "split": list(split)})
        events.append(memory_event(split, 0.7 * factor))  # the first sample of a split is early
        events.append(memory_event(split, factor))
    return events


def test_measured_peaks_replace_assumed_ones():
    measurement = collect(run_of((2, 3, 3), (1, 4, 3)))
    assert list(measurement.peaks_mib) == [(2, 3, 3), (1, 4, 3)]
    overhead, errors = calibrated(measurement, MODEL, OverheadEstimate((500.0,) * 3))
    assert overhead.context_mib == pytest.approx((650.0, 420.0, 420.0))
    assert overhead.scale == pytest.approx((1.06,) * 3)
    assert [error.error for error in errors] == pytest.approx([1 / 1.06 - 1] * 6)
    assert all(abs(error.calibrated_error) < 1e-9 for error in errors)
    assert overhead.source == "measured"


def test_peaks_of_frozen_epochs_do_not_count_once_these_are_over():
    start, *rest = run_of((2, 3, 3), factor=0.5)
    frozen = [{**start, "freeze_epochs": 1}, *rest]
    assert collect(frozen).is_frozen
    thaw = {"type": "epoch_start", "epoch": 2, "split": [2, 3, 3], "num_thawed": 1000}
    found = collect([*frozen, thaw, memory_event((2, 3, 3), 1.0), {**start, "freeze_epochs": 1}])  # and resumed
    assert not found.is_frozen
    ((split, peaks),) = found.peaks_mib.items()
    assert peaks == pytest.approx(MODEL.peak_mib(split))


def test_gpus_of_a_run_are_those_of_its_events():
    events = run_of((2, 3, 3))
    assert collect(events).gpus() == tuple(GpuSpec(24220.0, f"cuda:{i}") for i in range(3))
    with pytest.raises(ConfigError, match="give it with --gpus"):
        collect(events[:1]).gpus()
    del events[-1]["devices"][1]["total_mib"]
    with pytest.raises(ConfigError, match="give it with --gpus"):
        collect(events).gpus()


@pytest.mark.parametrize("split", [[-1, 5, 4], [], "233", [2.0, 3, 3], None])
def test_split_that_is_none_changes_nothing(split):
    start, applied, *memory = run_of((2, 3, 3))
    damaged = [start, applied, {**applied, "split": split}, *memory]
    assert collect(damaged) == collect(run_of((2, 3, 3)))


def test_highest_peak_counts_wherever_it_occurred():
    factors = [0.7, 1.06, 0.9]
    events = run_of((2, 3, 3))[:2] + [memory_event((2, 3, 3), factor) for factor in factors]
    highest = [1.06 * mib for mib in MODEL.peak_mib((2, 3, 3))]
    assert list(collect(events).peaks_mib[2, 3, 3]) == pytest.approx(highest)
    without = {"type": "memory", "devices": [{"device": "cuda:0", "peak_mib": None}] * 3}
    assert list(collect([*events, without]).peaks_mib[2, 3, 3]) == pytest.approx(highest)


def test_device_without_measurement_takes_the_median_of_all():
    predicted = MODEL.peak_mib((2, 3, 3))
    events = run_of((2, 3, 3))[:2]
    for split, first, third in (((2, 3, 3), 1.1, 1.3), ((1, 4, 3), 1.1, 1.2)):
        events.append({"type": "gpu0_bsz", "status": "applied", "split": list(split)})
        event = memory_event(split, 1.0)
        for row, factor, mib in zip(event["devices"], (first, None, third), MODEL.peak_mib(split), strict=True):
            row["peak_mib"] = None if factor is None else factor * mib
        events.append(event)
    overhead, errors = calibrated(collect(events), MODEL, OverheadEstimate((500.0,) * 3))
    assert overhead.scale == pytest.approx((1.1, 1.15, 1.25))  # medians of 1.1 1.1; 1.1 1.1 1.2 1.3; 1.2 1.3
    assert [error.device for error in errors] == [0, 2, 0, 2]
    assert errors[0].predicted_mib == predicted[0]


def test_without_measurements_the_prediction_is_not_scaled():
    nothing = collect(run_of((2, 3, 3))[:2])
    overhead, errors = calibrated(nothing, MODEL, OverheadEstimate((500.0,) * 3))
    assert overhead.scale == (1.0, 1.0, 1.0)
    assert overhead.context_mib == (500.0, 500.0, 500.0)
    assert errors == []


def test_fit_of_two_splits_is_proven_and_predicts_a_third():
    fit = PeakModel(collect(run_of((2, 3, 3), (1, 4, 3), factor=1.0)).peaks_mib)
    assert fit.is_proven
    assert fit.peak_mib((4, 2, 2)) == pytest.approx(MODEL.peak_mib((4, 2, 2)))


@pytest.mark.parametrize(
    "damage",
    [
        {"devices": None},
        {"devices": [None, None, None]},
        {"devices": [{"peak_mib": None}] * 3},
        {"devices": [{"peak_mib": "much"}] * 3},
        {"devices": [{"peak_mib": True}]},
    ],
)
def test_events_without_numbers_are_skipped(damage):
    events = [*run_of((2, 3, 3)), {"type": "memory", **damage}]
    assert collect(events).peaks_mib == collect(run_of((2, 3, 3))).peaks_mib


def test_run_without_gpu_measurements_is_one_clear_error(tmp_path):
    def folder_with(name, device, with_memory):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        with closing(EventWriter(folder.events)) as writer:
            writer.write(
                RunStart(
                    classes=["a"],
                    num_params=1,
                    batch_size=8,
                    epochs=1,
                    steps_per_epoch=1,
                    devices=[Device(device=device)],
                    split=[8],
                )
            )
            if with_memory:
                writer.write(Memory(devices=[DeviceMemory(device=device, peak_mib=100.0)]))
        return folder

    with pytest.raises(ConfigError, match="no measured peak"):
        read_measurement(folder_with("a", "cuda:0", False))
    with pytest.raises(ConfigError, match="CPU"):
        read_measurement(folder_with("b", "cpu", True))
