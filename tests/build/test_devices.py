"""The mode that `parallel.mode: auto` takes, and the same rule in `segapp plan`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from segapp.build import devices as module
from segapp.build import speed
from segapp.build.devices import choose_devices, plan_devices
from segapp.config import RunConfig, modes, validate_config
from segapp.config.modes import FEATURES, Feature, SpeedEstimate, check_mode
from segapp.errors import ConfigError
from segapp.memory.peaks import SimulationJob
from segapp.training.planning import plan
from segapp.training.planning.plan import _advice_jobs, choose_mode


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every name of a CUDA device resolve, and `auto` find three of them and NCCL."""

    def choose(requested: Any) -> tuple[list[torch.device], str]:
        names = ["cuda:0", "cuda:1", "cuda:2"] if requested == "auto" else requested
        return [torch.device(name) for name in names], "as the test says"

    monkeypatch.setattr(module, "choose_devices", choose)
    monkeypatch.setattr(module.dist, "is_nccl_available", lambda: True)
    estimate_steps(monkeypatch, dp_s=0.1, ddp_s=0.1)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def estimate_steps(monkeypatch: pytest.MonkeyPatch, *, dp_s: float, ddp_s: float) -> None:
    found = SpeedEstimate(dp_s, ddp_s, is_measured=True)
    monkeypatch.setattr(module, "estimate_speed", lambda *_: found)
    monkeypatch.setattr(plan, "_assumed_speed", lambda *_: found)


def config_of(parallel: dict[str, Any] | None = None, batch_size: int = 8, **sections: Any) -> RunConfig:
    raw = {"name": "x", "data": {"format": "camvid", "root": "."}, "train": {"batch_size": batch_size}}
    return validate_config({**raw, "parallel": parallel or {}, **sections})


@pytest.mark.parametrize(
    ("section", "mode", "why"),
    [
        ({}, "ddp", "one process for each GPU"),
        ({"gpu0_bsz": 2}, "dp", "nearly as fast: dp 100 ms per step, ddp 100 ms (estimated)"),
        ({"gpu0_bsz": "auto"}, "dp", "gpu0_bsz or shares"),
        ({"shares": [2, 3, 3]}, "dp", "gpu0_bsz or shares"),
        ({"devices": ["cpu", "cpu"]}, "dp", "logical devices"),
        ({"devices": ["cuda:0", "cuda:0"]}, "dp", "logical devices"),
        ({"devices": ["cuda:1"]}, "single", ""),
        ({"mode": "dp"}, "dp", ""),
        ({"mode": "ddp", "gpu0_bsz": 2}, "ddp", ""),
        ({"mode": "model"}, "model", ""),
    ],
)
def test_mode_of_a_section_and_the_reason_for_it(section: dict[str, Any], mode: str, why: str) -> None:
    found = plan_devices(config_of(section))
    assert found.mode == mode
    assert why in found.mode_reason
    assert bool(why) == bool(found.mode_reason)
    assert f"mode {mode}" in found.description


@pytest.mark.parametrize(("dp_s", "mode"), [(0.099, "dp"), (0.105, "dp"), (0.106, "ddp"), (0.5, "ddp")])
def test_auto_takes_dp_if_it_has_95_percent_of_the_speed(
    monkeypatch: pytest.MonkeyPatch, dp_s: float, mode: str
) -> None:
    estimate_steps(monkeypatch, dp_s=dp_s, ddp_s=0.1)
    for section in ({"gpu0_bsz": 2}, {"shares": [2, 3, 3]}):
        config = config_of(section)
        assert plan_devices(config).mode == choose_mode(config, 3) == mode
        assert plan_devices(config, is_one_process=True).mode == "dp"
    assert plan_devices(config_of({"gpu0_bsz": 2}, 2)).mode == "dp", "ddp needs an image for every rank"


def test_work_of_a_step_is_counted_for_each_crop() -> None:
    """By hand: a convolution of 3x3 has 2 * 9 * C_in * C_out operations for each output pixel; three passes."""

    class OneLayer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.layer(images).relu()

    config = config_of(data={"format": "camvid", "root": ".", "crop_px": [64, 96]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "build_network", lambda *_, **__: OneLayer())
        assert speed.count_work(config) == speed.StepWork(3 * 2, 3 * 2 * 9 * 3 * 8 * 64 * 96)


@pytest.mark.parametrize(("flops_per_s", "is_dp"), [(1e12, True), (1e18, False)])
def test_slow_gpus_hide_the_dispatches_of_dp(monkeypatch: pytest.MonkeyPatch, flops_per_s: float, is_dp: bool) -> None:
    monkeypatch.setattr(speed, "count_work", lambda _: speed.StepWork(1000, 1e12))
    monkeypatch.setattr(speed, "measure_dispatch_s", lambda: 1e-5)
    monkeypatch.setattr(speed, "measure_flops_per_s", lambda *_: flops_per_s)
    devices = [torch.device("cuda", index) for index in range(3)]
    found = speed.estimate_speed(config_of({"gpu0_bsz": 2}), 3, devices)
    assert found is not None
    if is_dp:
        assert found.dp_s == found.ddp_s == pytest.approx(3 * 1e12 / 0.5e12), "three images on the fullest GPU"
    else:
        assert (found.dp_s, found.ddp_s) == pytest.approx((3 * speed.DP_OVERHEAD * 0.01, 0.01))


def test_auto_takes_dp_where_ranks_are_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_devices(config_of(batch_size=2)).mode == "dp"
    assert plan_devices(config_of(batch_size=3)).mode == "ddp"
    assert plan_devices(config_of(), is_one_process=True).mode == "dp"
    monkeypatch.setattr(module.dist, "is_nccl_available", lambda: False)
    assert plan_devices(config_of()).mode == "dp"


def test_auto_is_ddp_in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert plan_devices(config_of()).mode == "ddp"


@pytest.mark.parametrize(
    ("section", "batch_size"),
    [
        *itertools.product([{}, {"gpu0_bsz": 2}], [2, 8]),
        ({"shares": [2, 3, 3]}, 8),
        ({"mode": "ddp", "shares": [0, 4, 4]}, 8),
    ],
)
def test_planned_mode_is_the_mode_of_the_training(section: dict[str, Any], batch_size: int) -> None:
    config = config_of(section, batch_size)
    assert choose_mode(config, 3) == plan_devices(config).mode


COMPILED = {"train": {"compile": True}}
DISTILLED = {"distill": {"teacher": "t"}}
EOMT = {
    "model": {"library": "segapp", "name": "eomt", "encoder": "tu-vit"},
    "loss": {"name": "mask_classification"},
}


@pytest.mark.parametrize(
    ("parallel", "sections", "mode", "why"),
    [
        ({"gpu0_bsz": 2}, COMPILED, "ddp", "train.compile works with single or ddp only"),
        ({"devices": ["cpu", "cpu"]}, COMPILED, "single", "train.compile works with single or ddp only"),
        ({}, COMPILED, "ddp", "the fastest"),
        ({}, DISTILLED, "ddp", "the fastest"),
        ({"devices": ["cpu", "cpu"]}, EOMT, "dp", "logical devices"),
        ({"stages": {"backbone": 0, "classifier": 1}}, {}, "model", "parallel.stages works with model only"),
    ],
)
def test_auto_takes_a_mode_that_does_what_the_config_asks(
    parallel: dict[str, Any], sections: dict[str, Any], mode: str, why: str
) -> None:
    config = config_of(parallel, **sections)
    found = plan_devices(config)
    assert (found.mode, choose_mode(config, 3)) == (mode, "ddp" if "devices" in parallel else mode)
    assert why in found.mode_reason


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.key)
def test_config_planner_and_training_refuse_the_same_modes(feature: Feature) -> None:
    asked: dict[str, dict[str, Any]] = {
        "train.compile": COMPILED,
        "train.cuda_graph": {"train": {"cuda_graph": True}},
        "distill": DISTILLED,
        "model.library": EOMT,
        "parallel.shard_optimizer": {},
        "parallel.stages": {},
    }
    own = {"stages": {"backbone": 0}, "shard_optimizer": True}
    section, _, key = feature.key.partition(".")
    parallel = {key: own[key]} if section == "parallel" else {}
    for mode in ("single", "dp", "ddp", "model"):
        config = config_of(parallel, **asked[feature.key])  # `auto`, so that no check has been made yet
        forced = config.model_copy(update={"parallel": config.parallel.model_copy(update={"mode": mode})})
        num_gpus = 1 if mode == "single" else 3
        if mode in feature.modes:
            config_of({**parallel, "mode": mode}, **asked[feature.key])
            assert plan_devices(forced).mode == choose_mode(forced, num_gpus) == mode
            continue
        for act in (
            lambda mode=mode: config_of({**parallel, "mode": mode}, **asked[feature.key]),
            lambda forced=forced: plan_devices(forced),
            lambda forced=forced, num_gpus=num_gpus: choose_mode(forced, num_gpus),
        ):
            with pytest.raises(ConfigError, match=f"{feature.key}:? {feature.problem(mode)}"):
                act()


@pytest.mark.parametrize("device", ["mtia", "hpu:0", "meta", "foo"])
def test_device_of_an_unknown_kind_is_refused_by_its_key(device: str) -> None:
    for value in (device, [device]):
        with pytest.raises(
            ConfigError, match=f"^parallel.devices: device '{device}' .*: use 'cpu', 'cuda:0' or"
        ) as caught:
            choose_devices(value)
        assert caught.value.exit_code == 2


def test_plan_simulates_no_mode_in_which_a_feature_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = config_of({"mode": "model", "stages": {"backbone": 0, "classifier": 1}})
    job = SimulationJob("model", (3, 5), 2, 4, eval_px=(64, 96), blas_mib=32.0)
    assert [job.mode for job in _advice_jobs(staged, job, 2, [], []).values()] == ["single", "single", "ddp"]
    with pytest.raises(ConfigError, match=r"parallel\.stages does not support parallel\.mode: dp: use model"):
        check_mode(staged, "dp")
    alone = Feature("train.tf32", ("single",), lambda config: config.train.tf32)
    monkeypatch.setattr(modes, "FEATURES", (*FEATURES, alone))
    assert [job.mode for job in _advice_jobs(config_of(), job, 2, [], []).values()] == ["single", "single"]
    assert plan_devices(config_of()).mode == "single"
