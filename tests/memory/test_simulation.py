"""Simulations of every kind of training, and the relations between their peaks."""

import pytest

from segapp.config import validate_config
from segapp.memory.peaks import SimulationJob, fit_model, splits_to_simulate
from segapp.planning.simulate import build_simulator
from tests.support.own_process import in_own_process

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.slow,  # test_measured_on_h200.py holds the simulation to a measurement in every run
]

LRASPP = {"library": "torchvision", "name": "lraspp", "encoder": "mobilenet_v3_small"}
LINKNET = {"library": "smp", "name": "Linknet", "encoder": "resnet18"}
SINGLE, DDP, DP = SimulationJob("single", (4,)), SimulationJob("ddp", (4,)), SimulationJob("dp", (3, 2, 4))
TRAININGS = {
    "linknet": (SINGLE, {"model": LINKNET}),
    "ddp": (DDP, {"model": LINKNET}),
    "ddp without views": (DDP, {"model": LINKNET, "parallel": {"gradient_as_bucket_view": False}}),
    "model": (SimulationJob("model", (4, 0)), {"model": LINKNET}),
    "plain": (SINGLE, {}),
    "fp16 and average": (SINGLE, {"train": {"precision": "fp16", "ema": 0.99}}),
    "accumulate": (SimulationJob("single", (4,), accumulate=2), {}),
    "dp": (DP, {}),
    "dp plain batchnorm": (DP, {"parallel": {"sync_bn": False}}),
    "dp without gpu 0": (SimulationJob("dp", (0, 4)), {}),
}
"""Name -> job and config sections."""


def simulator(crop=(256, 320), **sections):
    raw = {
        "name": "paper",
        "data": {"format": "folder", "root": "nowhere", "classes": [f"c{i}" for i in range(19)], "crop_px": crop},
        "model": LRASPP,
        **sections,
        "train": {"precision": "fp32", **sections.get("train", {})},
    }
    return build_simulator(validate_config(raw))


def simulate_all():
    """Return the phases of each device of every training."""
    return {name: simulator(**sections).run(job).devices for name, (job, sections) in TRAININGS.items()}


def predicted_and_simulated():
    """Return peaks of splits that the fit has not seen."""
    rows = []
    for model in (LRASPP, LINKNET):
        own = simulator(crop=(512, 512), model=model)
        for mode, num, unseen in (("dp", 3, [(3, 3, 3), (5, 1, 2), (0, 3, 6), (7, 1, 0)]), ("single", 1, [(1,), (9,)])):
            jobs = [SimulationJob(mode, split, eval_px=(512, 640)) for split in splits_to_simulate(mode, num)]
            fitted = fit_model(mode, [own.run(job) for job in jobs])
            truths = [own.run(SimulationJob(mode, split, eval_px=(512, 640))).peak_mib() for split in unseen]
            rows += [(fitted.peak_mib(split), truth) for split, truth in zip(unseen, truths, strict=True)]
    return rows


@pytest.fixture(scope="module")
def found():
    return in_own_process(simulate_all)


def peak(devices, device=0):
    return max(each.mib for each in devices[device].values())


def test_affine_model_is_within_1_percent_on_unseen_splits():
    for predicted, truth in in_own_process(predicted_and_simulated):
        assert predicted == pytest.approx(truth, rel=0.01, abs=0.5)


def test_masters_average_and_summed_gradients_are_weight_copies(found):
    plain, half = (found[training][0]["step"].by_kind for training in ("plain", "fp16 and average"))
    weights = plain["weights"]
    assert [plain["optimizer"], plain["gradients"]] == pytest.approx([weights] * 2, rel=0.02)
    assert [half["masters"], half["average"]] == pytest.approx([weights] * 2, rel=0.05)  # all but BatchNorm's
    assert half["weights"] < 0.6 * weights
    assert peak(found["accumulate"]) - peak(found["plain"]) == pytest.approx(weights, rel=0.1)


def test_device_memory_follows_its_role(found):
    first, *others = (phases["backward"].by_kind for phases in found["dp"])
    assert "optimizer" in first
    assert all("optimizer" not in kinds and "replicas" in kinds for kinds in others)
    assert peak(found["dp"], 2) > peak(found["dp"], 1)
    assert "activations" not in found["dp without gpu 0"][0]["backward"].by_kind
    # A replica's SyncBatchNorm keeps no more than BatchNorm does.
    assert peak(found["dp"], 2) == pytest.approx(peak(found["dp plain batchnorm"], 2), rel=0.02)


def test_ddp_without_bucket_views_holds_gradients_twice(found):
    plain, ddp, without = (found[name][0]["step"].by_kind for name in ("linknet", "ddp", "ddp without views"))
    assert [ddp["gradients"], without["buckets"]] == pytest.approx([plain["weights"]] * 2, rel=0.02)
    assert "buckets" not in ddp


def test_model_mode_divides_the_weights(found):
    whole = found["linknet"][0]["step"].by_kind["weights"]
    parts = [phases["step"].by_kind["weights"] for phases in found["model"]]
    assert sum(parts) == pytest.approx(whole, rel=0.01)
    assert min(parts) > 0
    assert max(peak(found["model"], device) for device in range(2)) < peak(found["linknet"])
