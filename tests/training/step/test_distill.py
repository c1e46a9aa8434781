"""A student that learns from a teacher: the same course on every split, and a state that goes on exactly."""

from __future__ import annotations

import functools
import itertools
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from segapp import failpoints
from segapp.assembly.network import build_network
from segapp.assembly.pairs import build_pixels
from segapp.assembly.trained import read_trained
from segapp.config import RunConfig, dump_config
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import CheckpointError, ConfigError, RunError, SegappError
from segapp.losses import node_features, pair_wise_difference, pixel_wise_divergence
from segapp.models import SegmentationModel
from segapp.training.step.assembler import RealDevices, StepAssembler, StepLayout, StepParts
from segapp.training.step.distill import check_frame
from tests.support.golden_runs import float64
from tests.support.runs import differing, events, final_state, merged, resume, segapp, train

DP = {"mode": "dp", "devices": ["cpu"] * 3}
CPU = torch.device("cpu")


def student(tiny: dict[str, Any], teacher: Path, penalty: str = "wgan-gp", **sections: Any) -> RunConfig:
    """Three small steps, every step an event."""
    own = {
        "optim": {"name": "sgd", "lr": 0.02},
        "train": {"epochs": 1, "batch_size": 3, "ema": None},
        "data": {"crop_px": [32, 48]},
        "distill": {"teacher": str(teacher), "critic_penalty": penalty, "critic_width": 8},
    }
    for name, section in sections.items():
        own[name] = {**own.get(name, {}), **section}
    return merged(tiny, **own)


def terms(run: Path) -> list[dict[str, float]]:
    return [{"loss": event["loss"], **event["terms"]} for event in events(run, "step")]


def assert_same_course(ours: Path, theirs: Path, rel: float) -> None:
    """Every loss and term of three steps; Adam divides the critic's gradients, rounding and all, by their own size."""
    mine, other = terms(ours), terms(theirs)
    assert len(mine) == len(other) == 3
    for one, two in zip(mine, other, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            assert one[name] == pytest.approx(two[name], rel=rel, abs=rel), name


@pytest.fixture(scope="module")
def teacher(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of another architecture, with another normalisation."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    config = merged(
        base,
        data={"crop_px": [48, 64], "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]},
        model={"library": "torchvision", "name": "lraspp", "encoder": "mobilenet_v3_small", "options": {}},
        train={"epochs": 1},
    )
    assert train(config, folder) == 0
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("penalty", "gpu0_bsz"), [("wgan-gp", 0), ("wgan-lp", 1), ("dragan", 3)])
def test_dp_in_float64_equals_one_device_up_to_rounding(
    base: dict[str, Any], teacher: Path, tmp_path: Path, penalty: str, gpu0_bsz: int
) -> None:
    for name, parallel in (("single", {"mode": "single"}), ("dp", {**DP, "gpu0_bsz": gpu0_bsz})):
        with float64():
            assert train(student(base, teacher, penalty, parallel=parallel), tmp_path / name) == 0
    found = terms(tmp_path / "single")
    assert found[0].keys() == {"loss", "pixel_wise", "pair_wise", "holistic", "critic", "penalty"}
    assert found[-1]["pixel_wise"] < found[0]["pixel_wise"]
    assert_same_course(tmp_path / "dp", tmp_path / "single", rel=1e-9)


@pytest.mark.slow
def test_ddp_equals_one_device(base: dict[str, Any], teacher: Path, tmp_path: Path) -> None:
    config = student(base, teacher, optim={"lr": 1e-4})
    for name, parallel in (("single", {"mode": "single"}), ("ddp", {"mode": "ddp", "devices": ["cpu", "cpu"]})):
        (tmp_path / "own.yaml").write_text(dump_config(merged(config.model_dump(mode="json"), parallel=parallel)))
        done = segapp("train", "--config", "own.yaml", "--run", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert_same_course(tmp_path / "ddp", tmp_path / "single", rel=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["amp-fp16", "amp-bf16", "fp32"])
def test_resumed_distillation_is_bitwise_equal(
    base: dict[str, Any], teacher: Path, tmp_path: Path, precision: str
) -> None:
    """Also after running out of memory behind the critic's backward pass, which recomputes the student's blocks."""
    sizes = {"precision": precision, "epochs": 1, "batch_size": 2, "accumulate": 2}
    config = student(base, teacher, parallel={**DP, "gpu0_bsz": 1}, train=sizes, checkpoint={"every_steps": 1})
    folder = tmp_path / "parts"
    failpoints.arm("ckpt.background=each")
    assert train(config, tmp_path / "whole") == 0
    failpoints.arm("ckpt.background=each;train.optimizer=2:oom;train.step=3:raise:RuntimeError")
    with pytest.raises(RunError):
        train(config, folder)
    assert [event["step"] for event in events(folder, "oom")] == [1]
    failpoints.arm("")
    assert resume(config, folder) == 0
    assert terms(folder) == terms(tmp_path / "whole")
    whole, parts = (final_state(each) for each in (tmp_path / "whole", folder))
    assert not differing(whole["model"], parts["model"])
    assert not differing(whole["distillation"], parts["distillation"])
    assert parts["distillation"]["critic"]["num_steps"] == 3


def test_student_and_teacher_see_one_frame_with_own_mean_and_std(base: dict[str, Any], teacher: Path) -> None:
    own: Any = {"distill": {"pair_wise": 0, "holistic": 0, "temperature": 3.0}, "train": {"precision": "fp32"}}
    config = student(base, teacher, **own, data={"mean": [0.2, 0.3, 0.4], "std": [0.6, 0.5, 0.4], "crop_px": [43, 61]})
    trained, model = read_trained(str(teacher)), build_network(config.model, 3).eval()
    assembler = StepAssembler(config, trained.scheme, trained)
    parts, layout = StepParts(model, Mock()), StepLayout("single", (CPU,))
    inner: Any = assembler._inner(parts, layout, RealDevices(), Preprocessing(build_pixels(config.data)))
    taught = inner.teacher
    images = torch.randint(256, (2, 3, 43, 61), dtype=torch.uint8)
    shapes: list[torch.Size] = []
    for one in (model, taught._on[CPU][0]):
        next(each for each in one.modules() if isinstance(each, torch.nn.Conv2d)).register_forward_pre_hook(
            lambda _, inputs: shapes.append(inputs[0].shape)
        )
    with torch.no_grad():
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in ([0.2, 0.3, 0.4], [0.6, 0.5, 0.4]))
        seen = [F.pad(each, (0, 3, 0, 5)) for each in ((images / 255 - mean) / std, (images / 255 - 0.5) / 0.25)]
        found = inner(images)[1][:, 0]
        assert shapes == [(2, 3, 48, 64)] * 2
        logits = model(seen[0])[0], trained.model(seen[1])[0]
        close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-7)
        close(found, pixel_wise_divergence(*logits, temperature=3.0, align_corners=False))
        taught.align_corners = True  # each network's logits lie where its own loss put them
        full = [
            F.interpolate(each, (48, 64), mode="bilinear", align_corners=is_aligned)
            for each, is_aligned in zip(logits, (False, True), strict=True)
        ]
        close(inner(images)[1][:, 0], pixel_wise_divergence(*full, temperature=3.0))


@pytest.mark.parametrize(("precision", "of_critic"), [("fp32", "fp32"), ("fp16", "amp-fp16"), ("amp-bf16", "amp-bf16")])
def test_critic_never_has_half_weights(precision: str, of_critic: str) -> None:
    assembler = Mock(config=Mock(train=Mock(precision=precision)))
    assert StepAssembler._critic_precision(assembler, CPU).name == of_critic


def test_crops_that_the_teacher_sees_at_another_size_are_refused() -> None:
    def network(fixed_size_px: tuple[int, int] | None = None, divisor: int = 1) -> Any:
        model = Mock(spec=SegmentationModel, fixed_size_px=fixed_size_px, min_size_px=1, size_multiple=divisor)
        model.suitable_size = functools.partial(SegmentationModel.suitable_size, model)
        model.name = f"of{divisor}"
        return model

    check_frame((50, 70), network(divisor=16), network(divisor=8))
    with pytest.raises(ConfigError, match=r"\[50, 70\], which of16 sees as \[64, 80\], .* of32: use \[64, 96\]"):
        check_frame((50, 70), network(divisor=16), network(divisor=32))
    with pytest.raises(ConfigError, match=r"sees as \[256, 256\], .* use another teacher"):
        check_frame((224, 224), network(divisor=128), network((224, 224)))


def test_unusable_teacher_is_refused(base: dict[str, Any], teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"other classes .*'disc' for 'ball'"):
        train(student(base, teacher, data={"classes": ["ground", "box", "ball"], "crop_px": [48, 64]}), tmp_path / "b")
    with pytest.raises(SegappError, match=r"nowhere"):
        train(student(base, tmp_path / "nowhere"), tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_custom_models_distill_without_the_pair_wise_term(base: dict[str, Any], tmp_path: Path) -> None:
    model = {"library": "python", "name": "tests.support.own_parts:Net", "encoder": None, "options": {}}
    custom: Any = {"model": model}
    taught = merged(base, model={**model, "options": {"width": 6}}, train={"epochs": 1}, data={"crop_px": [48, 64]})
    assert train(taught, tmp_path / "teacher") == 0
    with pytest.raises(ConfigError, match=r"^model is a custom model, whose features .* set distill\.pair_wise=0$"):
        train(student(base, tmp_path / "teacher", **custom), tmp_path / "pairs")
    options = {"distill": {"pair_wise": 0, "holistic": 0}, "parallel": {**DP, "gpu0_bsz": 0}}
    assert train(student(base, tmp_path / "teacher", **custom, **options), tmp_path / "dp") == 0
    assert terms(tmp_path / "dp")[0].keys() == {"loss", "pixel_wise"}


@pytest.mark.slow
def test_resume_refuses_other_teacher_but_accepts_a_moved_one(
    base: dict[str, Any], teacher: Path, tmp_path: Path
) -> None:
    config = student(base, teacher, train={"epochs": 2}, schedule={"name": "constant"}, distill={"holistic": 0})
    assert train(merged(config.model_dump(mode="json"), train={"epochs": 1}), tmp_path / "run") == 0
    shutil.copytree(teacher, tmp_path / "moved")
    other = merged(config.model_dump(mode="json"), distill={"teacher": str(tmp_path / "run")})
    with pytest.raises(CheckpointError, match=r"distill\.teacher differs from the teacher"):
        resume(other, tmp_path / "run")
    moved = merged(config.model_dump(mode="json"), distill={"teacher": str(tmp_path / "moved")})
    assert resume(moved, tmp_path / "run") == 0


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
    found = pixel_wise_divergence(student_logits, teacher_logits, temperature=2.0)
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
