"""A student that learns from a teacher: the same course on every split, and a state that goes on exactly."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from segapp.checkpoint.training_state import load_checkpoint
from segapp.config import RunConfig, dump_config
from segapp.errors import CheckpointError, ConfigError
from segapp.losses import node_features, pair_wise_difference, pixel_wise_divergence
from segapp.memory.peaks import SimulationJob, SimulationResult
from segapp.models import Critic, critic_size
from segapp.planning.pool import SimulationPool
from segapp.precision import Precision
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from tests.support.runs import differing, events, merged, segapp, train

PENALTIES = ("wgan-gp", "wgan-lp", "dragan")


def student(tiny: dict[str, Any], teacher: Path, penalty: str = "wgan-gp", **sections: Any) -> RunConfig:
    """Six small steps, every step an event; shallow and slow, so that float32 does not drown what is compared."""
    base = {
        "model": {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}},
        "optim": {"name": "sgd", "lr": 1e-4},
        "train": {"epochs": 3, "batch_size": 4, "ema": None},
        "data": {"crop_px": [48, 64]},
        "log": {"every_steps": 1, "tensorboard": False},
        "eval": {"every_epochs": 3},
        "distill": {"teacher": str(teacher), "critic_penalty": penalty, "critic_width": 8},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return merged(tiny, **base)


def terms(run: Path) -> list[dict[str, float]]:
    return [{"loss": event["loss"], **event["terms"]} for event in events(run, "step")]


def assert_same_course(ours: Path, theirs: Path, rel: float = 3e-6, rel_of_terms: float = 1e-4) -> None:
    """Every loss and term of six steps; Adam divides the critic's gradients, rounding and all, by their own size."""
    mine, other = terms(ours), terms(theirs)
    assert len(mine) == len(other) == 6
    for one, two in zip(mine, other, strict=True):
        assert one.keys() == two.keys()
        assert one["loss"] == pytest.approx(two["loss"], rel=rel)
        for name in one:
            assert one[name] == pytest.approx(two[name], rel=rel_of_terms, abs=5 * rel), name


@pytest.fixture(scope="module")
def plain(tiny_root: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "seed": 3,
        "data": {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "workers": 0},
    }


@pytest.fixture(scope="module")
def teacher(plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of another architecture, with another normalisation."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    config = merged(
        plain,
        data={"crop_px": [48, 64], "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]},
        model={"library": "torchvision", "name": "lraspp", "encoder": "mobilenet_v3_small"},
        train={"epochs": 2, "batch_size": 4},
        log={"tensorboard": False},
    )
    assert train(config, folder) == 0
    return folder


@pytest.fixture(scope="module")
def singles(plain: dict[str, Any], teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("singles")
    for penalty in PENALTIES:
        assert train(student(plain, teacher, penalty, parallel={"mode": "single"}), folder / penalty) == 0
    return {penalty: folder / penalty for penalty in PENALTIES}


@pytest.mark.slow
def test_every_distillation_term_is_logged(singles: dict[str, Path]) -> None:
    for run in singles.values():
        assert {"pixel_wise", "pair_wise", "holistic", "critic", "penalty"} <= terms(run)[0].keys()
    assert terms(singles["wgan-gp"])[0]["penalty"] >= terms(singles["wgan-lp"])[0]["penalty"]


DP = {"mode": "dp", "devices": ["cpu"] * 3}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("penalty", "gpu0_bsz"), [("wgan-gp", 0), ("wgan-lp", 1), ("dragan", 3)])
def test_dp_on_three_logical_devices_equals_one_device(
    plain: dict[str, Any], teacher: Path, singles: dict[str, Path], tmp_path: Path, penalty: str, gpu0_bsz: int
) -> None:
    config = student(plain, teacher, penalty, parallel={**DP, "gpu0_bsz": gpu0_bsz})
    assert train(config, tmp_path / "run") == 0
    assert_same_course(tmp_path / "run", singles[penalty])


@pytest.mark.slow
@pytest.mark.parametrize(
    "penalty", [PENALTIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in PENALTIES[1:])]
)
def test_dp_in_float64_equals_one_device_up_to_rounding(
    plain: dict[str, Any], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penalty: str
) -> None:
    set_up = Precision.__init__

    def double(self: Precision, name: str, device: torch.device) -> None:
        set_up(self, name, device)
        self.input_dtype = torch.float64

    monkeypatch.setattr(Precision, "__init__", double)
    monkeypatch.setattr(Precision, "prepare", lambda _self, model: model.double())
    for name, parallel in (("single", {"mode": "single"}), ("dp", {**DP, "gpu0_bsz": 1})):
        distill = {"critic_penalty": penalty, "critic_width": 8}
        config = student(plain, teacher, penalty, parallel=parallel, optim={"lr": 0.02}, distill=distill)
        assert train(config, tmp_path / name) == 0
        assert terms(tmp_path / name)[-1]["pixel_wise"] < terms(tmp_path / name)[0]["pixel_wise"]
    assert_same_course(tmp_path / "dp", tmp_path / "single", rel=1e-10, rel_of_terms=1e-9)


@pytest.mark.slow
def test_ddp_equals_one_device_and_resumes_on_one_device(
    plain: dict[str, Any], teacher: Path, singles: dict[str, Path], tmp_path: Path
) -> None:
    config = student(plain, teacher, parallel={"mode": "ddp", "devices": ["cpu", "cpu"]})
    (tmp_path / "ddp.yaml").write_text(dump_config(config))
    result = segapp("train", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert_same_course(tmp_path / "run", singles["wgan-gp"])
    ours, theirs = (
        torch.load(run / "checkpoints/last.pt", weights_only=True) for run in (tmp_path / "run", singles["wgan-gp"])
    )
    assert ours["distillation"].keys() == theirs["distillation"].keys()
    for name, value in theirs["distillation"]["critic"]["critic"].items():
        torch.testing.assert_close(ours["distillation"]["critic"]["critic"][name], value, rtol=1e-3, atol=1e-5)


TORCHS_WAY = """
import torch
from torch.nn import SyncBatchNorm

library = torch.library.Library("aten", "IMPL")
library.impl("batch_norm_backward_elemt", lambda grad, x, mean, invstd, *rest: grad * invstd.view(1, -1, 1, 1), "CPU")
maps = torch.randn(2, 3, 4, 4, requires_grad=True)
own = [torch.ones(3) for _ in range(5)]
gradient = torch.batch_norm_backward_elemt(maps.detach().requires_grad_(), maps, *own, torch.ones(1, dtype=torch.int32))
gradient.square().sum().backward()  # what a penalty does with the gradient that SyncBatchNorm's backward gives
"""


@pytest.mark.slow
def test_torch_sync_batchnorm_has_no_second_derivative(tmp_path: Path) -> None:
    """The last operator of its backward pass, which torch has for GPUs alone, with a stand-in for its numbers."""
    done = subprocess.run([sys.executable, "-c", TORCHS_WAY], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "derivative for aten::batch_norm_backward_elemt is not implemented" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("amp-bf16", "amp-fp16"))]
)
def test_resumed_distillation_is_bitwise_equal(
    plain: dict[str, Any], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    sections = {
        "train": {"precision": precision, "epochs": 3},
        "checkpoint": {"every_steps": 1},
        "eval": {"every_epochs": 3},
    }
    config = student(plain, teacher, parallel={**DP, "gpu0_bsz": 1}, **sections)
    assert train(config, tmp_path / "whole") == 0
    (tmp_path / "config.yaml").write_text(dump_config(config))
    found = segapp(
        "train",
        "--config",
        "config.yaml",
        "--run",
        "parts",
        cwd=tmp_path,
        SEGAPP_FAILPOINTS="train.step=4:kill",
    )
    assert found.returncode == -9
    found = segapp("train", "--resume", "parts", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    whole, parts = (load_checkpoint(tmp_path / name, "last").state for name in ("whole", "parts"))
    assert [path for path in differing(whole, parts) if not path.startswith(("/config/", "/checkpoint/"))] == []
    assert terms(tmp_path / "parts") == terms(tmp_path / "whole")
    assert parts["distillation"]["critic"]["num_steps"] == 6


@pytest.mark.slow
def test_step_redone_after_oom_leaves_the_critic_unchanged(
    plain: dict[str, Any], teacher: Path, tmp_path: Path
) -> None:
    """Out of memory in the optimizer's phase, after the critic's backward pass: the step is undone and made again."""
    config = student(plain, teacher, train={"epochs": 2, "accumulate": 2, "batch_size": 2})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    for name, failpoints in (("whole", ""), ("again", "train.optimizer=2:oom")):
        found = segapp("train", "--config", "config.yaml", "--run", name, cwd=tmp_path, SEGAPP_FAILPOINTS=failpoints)
        assert found.returncode == 0, found.stderr
    whole, again = terms(tmp_path / "whole"), terms(tmp_path / "again")
    assert events(tmp_path / "again", "oom")
    assert again[0] == whole[0]
    assert again[1] == whole[1]  # its blocks are recomputed, which changes no value


@pytest.mark.slow
def test_micro_batches_without_batchnorm_equal_whole_batch(
    plain: dict[str, Any], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In evaluation mode BatchNorm is an affine map of each image by itself.
    monkeypatch.setattr(torch.nn.BatchNorm2d, "train", lambda self, _mode=True: torch.nn.Module.train(self, False))
    for name, sizes in (("whole", {"batch_size": 4}), ("parts", {"batch_size": 2, "accumulate": 2})):
        distill = {"teacher": str(teacher), "critic_width": 8}
        config = student(plain, teacher, train={"epochs": 1, **sizes}, distill=distill)
        assert train(config, tmp_path / name) == 0
    whole, parts = terms(tmp_path / "whole"), terms(tmp_path / "parts")
    assert len(whole) == 2  # the third step of the parts has the two images that no batch of four takes
    for one, two in zip(whole, parts[:2], strict=True):
        for name in one:
            assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-5), name


def test_unusable_teacher_is_refused(plain: dict[str, Any], teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"single, dp or ddp"):
        train(student(plain, teacher, parallel={"mode": "model", "devices": ["cpu", "cpu"]}), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"distill: has no term"):
        student(plain, teacher, distill={"teacher": "x", "pixel_wise": 0, "pair_wise": 0, "holistic": 0})
    with pytest.raises(ConfigError, match=r"other classes .*'disc' for 'ball'"):
        train(student(plain, teacher, data={"classes": ["ground", "box", "ball"], "crop_px": [48, 64]}), tmp_path / "b")
    with pytest.raises(ConfigError, match=r"distill\.techer: did you mean|unknown key"):
        student(plain, teacher, distill={"techer": "x"})
    found = segapp("train", "--config", "demo.yaml", "distill.teacher=nowhere", "--run", "c", cwd=tmp_path)
    assert found.returncode == 2
    assert not (tmp_path / "c").exists()
    assert "distill.teacher" in found.stderr
    assert "nowhere" in found.stderr


def test_custom_models_distill_without_the_pair_wise_term(plain: dict[str, Any], tmp_path: Path) -> None:
    model = {"library": "python", "name": "tests.support.own_parts:Net", "options": {}}
    custom: Any = {"model": {**model, "encoder": None}}
    shapes: Any = {"data": {"crop_px": [48, 64]}, "log": {"tensorboard": False}}
    taught = merged(plain, model={**model, "options": {"width": 6}}, train={"epochs": 2, "batch_size": 4}, **shapes)
    assert train(taught, tmp_path / "teacher") == 0
    with pytest.raises(ConfigError, match=r"^model is a custom model, whose features .* set distill\.pair_wise=0$"):
        train(student(plain, tmp_path / "teacher", **custom), tmp_path / "pairs")
    for name, parallel in (("single", {"mode": "single"}), ("dp", {**DP, "gpu0_bsz": 0})):
        options = {"distill": {"pair_wise": 0, "holistic": 0}, "parallel": parallel}
        assert train(student(plain, tmp_path / "teacher", **custom, **options), tmp_path / name) == 0
    assert_same_course(tmp_path / "dp", tmp_path / "single")
    assert terms(tmp_path / "dp")[0].keys() == {"loss", "pixel_wise"}


@pytest.mark.slow
def test_resume_refuses_other_teacher_but_accepts_a_moved_one(
    plain: dict[str, Any], teacher: Path, tmp_path: Path
) -> None:
    config = student(plain, teacher, train={"epochs": 2}, schedule={"name": "constant"}, distill={"holistic": 0})
    assert train(merged(config.model_dump(mode="json"), train={"epochs": 1}), tmp_path / "run") == 0
    shutil.copytree(teacher, tmp_path / "moved")
    other = merged(config.model_dump(mode="json"), distill={"teacher": str(tmp_path / "run")})
    with pytest.raises(CheckpointError, match=r"distill\.teacher differs from the teacher"):
        run_session(TrainRequest(other, RunFolder(tmp_path / "run")))
    moved = merged(config.model_dump(mode="json"), distill={"teacher": str(tmp_path / "moved")})
    assert run_session(TrainRequest(moved, RunFolder(tmp_path / "run"))) == 0


def simulated(config: RunConfig, job: SimulationJob) -> SimulationResult:
    """In a process of its own, which a simulation needs."""
    with SimulationPool(config, num_processes=1) as pool:
        (result,) = pool.simulate([job])
    return result


@pytest.mark.slow
def test_plan_counts_teacher_and_critic(plain: dict[str, Any], teacher: Path) -> None:
    config = student(plain, teacher, train={"batch_size": 2}, distill={"critic_width": 64})
    alone = merged({**config.model_dump(mode="json"), "distill": None})
    job = SimulationJob("dp", (1, 1))
    taught, plainly = (simulated(each, job) for each in (config, alone))
    state = torch.load(teacher / "checkpoints" / "last.pt", weights_only=True)["model"]
    teacher_mib = sum(t.nbytes for t in state.values()) / 2**20
    critic = Critic(3 + 3, critic_size(config.data.crop_px))
    critic_mib = sum(p.nbytes for p in critic.parameters()) / 2**20
    for with_teacher, without in zip(taught.devices, plainly.devices, strict=True):
        grown = with_teacher["backward"].mib - without["backward"].mib
        assert grown > teacher_mib
    more = taught.devices[0]["backward"].by_kind["optimizer"] - plainly.devices[0]["backward"].by_kind["optimizer"]
    assert more == pytest.approx(2 * critic_mib, rel=0.05)


def largest(maps: torch.Tensor, cell: int) -> torch.Tensor:
    """The largest features in one of the four quarters of a square map."""
    half = maps.size(-1) // 2
    y, x = cell // 2 * half, cell % 2 * half
    return maps[0, :, y : y + half, x : x + half].amax((1, 2))


def test_terms_equal_a_loop_over_pixels_and_pairs() -> None:
    """Equations 2 and 3 of Liu et al., written out in float64."""
    generator = torch.Generator().manual_seed(5)
    student_logits = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    teacher_logits = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    found = pixel_wise_divergence(student_logits, teacher_logits, 2.0)
    for image in range(2):
        total = 0.0
        for y in range(4):
            for x in range(5):
                p = (teacher_logits[image, :, y, x] / 2).exp()
                q = (student_logits[image, :, y, x] / 2).exp()
                p, q = p / p.sum(), q / q.sum()
                total += float((p * (p / q).log()).sum())
        assert float(found[image]) == pytest.approx(4 * total / 20, rel=1e-12)
    a, b = torch.randn(1, 6, 4, 4, dtype=torch.float64), torch.randn(1, 9, 8, 8, dtype=torch.float64)
    nodes_a, nodes_b = node_features(a, (2, 2)), node_features(b, (2, 2))
    total = 0.0
    for i, j in itertools.product(range(4), repeat=2):
        one, two = (F.cosine_similarity(largest(maps, i), largest(maps, j), dim=0) for maps in (a, b))
        total += float((one - two) ** 2) / 16
    assert float(pair_wise_difference(nodes_a, nodes_b)) == pytest.approx(total, rel=1e-9)


def test_node_of_zero_features_has_a_finite_gradient() -> None:
    features = torch.zeros(1, 3, 4, 4, requires_grad=True)
    pair_wise_difference(
        node_features(features, (2, 2)), node_features(torch.ones(1, 2, 4, 4), (2, 2))
    ).sum().backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["cpu"], ["cpu"] * 3])
def test_a_recomputed_student_takes_the_same_course(
    tiny: dict[str, Any], teacher: Path, tmp_path: Path, devices: list[str]
) -> None:
    """Bit for bit, with the critic's gradient penalty."""
    mode = {"mode": "single"} if len(devices) == 1 else {"mode": "dp", "gpu0_bsz": 1}
    for name in ("off", "all"):
        config = student(tiny, teacher, train={"recompute": name}, parallel={**mode, "devices": devices})
        assert train(config, tmp_path / name) == 0
    assert terms(tmp_path / "off") == terms(tmp_path / "all")
