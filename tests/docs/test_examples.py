"""The examples under `segapp/docs/examples`: short, typed, and exact: their parameters are those of plain PyTorch."""

from __future__ import annotations

import copy
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.docs.pages import FOLDER
from tests.support import ROOT
from tests.support.page_blocks import blocks
from tests.support.rank_runs import run_ranks

SCRIPTS = sorted((FOLDER / "examples").glob("*.py"))
NUM_STEPS = 4
DEVICES = ["cpu", "cpu", "cpu"]

RANK = """
import runpy, torch
from segapp.parallel.distributed import init_from_env, shutdown
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
info = init_from_env(device="cpu")
example = runpy.run_path({path!r})
network = example["build_network"]()
losses = example["train"](network, info.device, {num_steps})
torch.save((losses, network.state_dict()), f"{{info.rank}}.pt")
shutdown()
"""

PROCESS = """
import json, os, runpy, sys, torch
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
example = runpy.run_path(sys.argv[1])
network = example["build_network"]()
confusion = example["train"](network, *json.loads(sys.argv[2]))
torch.save((network.state_dict(), confusion.matrix), os.environ.get("LOCAL_RANK", "0") + ".pt")
"""


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Networks and batches are in float64, so that differences are the loop's and not those of rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "examples" / f"{name}.py"))


def loss_of(network: nn.Module, images: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """The loss at full resolution, as it is written without segapp."""
    logits = F.interpolate(network(images), target.shape[-2:], mode="bilinear", align_corners=True)
    return F.cross_entropy(logits, target, ignore_index=255, reduction=reduction)


def largest_difference(states: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]], name: str) -> float:
    """The largest difference of a parameter or buffer, relative to the largest value; printed for the report."""
    found = 0.0
    for ours, plain in states:
        assert ours.keys() == plain.keys()
        found = max(found, *(float((ours[k] - plain[k]).abs().max() / plain[k].abs().max()) for k in plain))
    print(f"{name}: parameters and statistics differ from one device by {found:.1e}")
    return found


def test_segmentation_on_devices_trains_the_network_of_one() -> None:
    module = example("segmentation_dp")
    network, plain = module["build_network"](), module["build_network"]()
    losses = module["train"](network, DEVICES, NUM_STEPS)
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9), []
    for step in range(NUM_STEPS):
        loss = loss_of(plain, *module["batch"](step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-12)
    assert losses[-1] < 0.9 * losses[0]
    assert largest_difference([(network.state_dict(), plain.state_dict())], "dp") < 1e-12


def test_segmentation_on_ranks_trains_the_network_of_one(tmp_path: Path) -> None:
    path = str(FOLDER / "examples" / "segmentation_ddp.py")
    run_ranks(cwd=tmp_path, code=RANK.format(path=path, num_steps=NUM_STEPS))
    module = example("segmentation_ddp")
    plain = module["build_network"]()
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9), []
    for step in range(NUM_STEPS):
        images, target = module["batch"](step)
        optimizer.zero_grad()
        losses = []
        for rows in ([0, 1, 4, 5], [2, 3, 6]):  # the micro-batches of ranks with images 0 to 3 and 4 to 6
            losses.append(loss_of(plain, images[rows], target[rows], reduction="sum") / (target != 255).sum())
            losses[-1].backward()
        optimizer.step()
        expected.append(sum(loss.item() for loss in losses))
    assert (module["batch"](0)[1] == 255).flatten(1).sum(1).unique().numel() == 7  # no two images have as many
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert [losses for losses, _ in found] == [pytest.approx(expected, rel=1e-12)] * 2
    assert largest_difference([(state, plain.state_dict()) for _, state in found], "ddp") < 1e-12


def test_wgan_gp_on_devices_trains_the_networks_of_one() -> None:
    module = example("wgan_gp")
    networks, (generator, critic) = module["build_networks"](), module["build_networks"]()
    distances, expected = module["train"](*networks, DEVICES, NUM_STEPS), []
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3, betas=(0.0, 0.9)) for each in (generator, critic)]
    for step in range(NUM_STEPS):
        real, noise, alpha = module["batch"](step)
        fake = generator(noise).detach()
        distance = critic(real).mean() - critic(fake).mean()
        alpha = alpha.view(-1, 1, 1, 1)
        points = (alpha * real + (1 - alpha) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        optimizers[1].zero_grad()
        (10 * penalty - distance).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(generator(noise)).mean()).backward()
        optimizers[0].step()
        expected.append(distance.item())
    assert distances == pytest.approx(expected, rel=1e-9)
    pairs = [(a.state_dict(), b.state_dict()) for a, b in zip(networks, (generator, critic), strict=True)]
    assert largest_difference(pairs, "WGAN-GP") < 1e-9


def test_half_network_on_two_devices_follows_float64() -> None:
    """fp16 has 11 bits: the difference is compared with how far the parameters have moved."""
    module = example("half_two_devices")
    network, plain = module["build_network"]().float(), module["build_network"]()
    start = copy.deepcopy(plain.state_dict())
    torch.set_default_dtype(torch.float32)
    losses = module["train"](network, ["cpu", "cpu"], NUM_STEPS)
    expected, optimizer = [], torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        images, target = module["batch"](step)
        loss = loss_of(plain, images.double(), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=2e-3)
    assert {p.dtype for p in network.parameters()} == {torch.float16, torch.float32}
    wide = {name: value.detach() for name, value in plain.named_parameters()}
    halves = ((name, value.detach()) for name, value in network.named_parameters())
    found = max(float((half - wide[k]).abs().max() / (wide[k] - start[k]).abs().max()) for k, half in halves)
    print(f"fp16: parameters differ from float64 on one device by {found:.1e} of their movement")
    assert found < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_frameworks_train_the_network_of_a_plain_loop(framework: str, num_processes: int, tmp_path: Path) -> None:
    """Two epochs of 10 steps; with Accelerate in two runs, and a third one only restores the state."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    from torchmetrics.functional import classification

    name, launcher, calls = {
        "lightning": ("lightning_module", [], [[num_processes]]),
        "accelerate": (
            "accelerate_loop",
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"],
            [["state", 1], ["state", 1], ["state", 0]],
        ),
    }[framework]
    module = example(name)
    plain, (images, target) = module["build_network"](), module["draw"](79).tensors
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    for rows in [*torch.arange(79).split(8)] * 2:
        optimizer.zero_grad()
        loss_of(plain, images[rows], target[rows]).backward()
        optimizer.step()
    images, target = module["draw"](27).tensors
    logits = F.interpolate(plain.eval()(images), target.shape[-2:], mode="bilinear", align_corners=True)
    pixels, options = (logits.argmax(1), target), {"num_classes": 4, "ignore_index": 255}

    (tmp_path / "process.py").write_text(PROCESS)
    for call in calls:
        command = [*launcher, "process.py", str(FOLDER / "examples" / f"{name}.py"), json.dumps(call)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        shown = subprocess.check_output([sys.executable, *command], env=env, cwd=tmp_path, text=True, timeout=200)
    assert re.findall("^mIoU .+", shown, re.M) == [
        f"mIoU {classification.multiclass_jaccard_index(*pixels, **options):.4f}"
    ]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_processes)]
    assert largest_difference([(state, plain.state_dict()) for state, _ in found], framework) < 1e-12
    for _, matrix in found:
        assert torch.equal(matrix, classification.multiclass_confusion_matrix(*pixels, **options))


def test_examples_are_short_and_pass_a_strict_type_checker(tmp_path: Path) -> None:
    assert len(SCRIPTS) == 8
    assert [path.name for path in SCRIPTS if len(path.read_text().splitlines()) > 80] == []
    wrong = tmp_path / "wrong.py"  # an ignored error that is none is an error
    wrong.write_text(
        "from segapp.losses import CriterionCE, CriterionDice, CriterionLovasz\n"
        "CriterionDice(255)  # type: ignore[call-arg]\n"
        "CriterionCE(implementation='fast')  # type: ignore[arg-type]\n"
        "CriterionLovasz(classes='al')  # type: ignore[arg-type]\n"
    )
    for i, block in enumerate(blocks()):
        if block.language == "python" and "segapp.parallel" in block.text and block.mark != "not run":
            (tmp_path / f"block_{i}.py").write_text(block.text)
    files = [*SCRIPTS, *sorted(tmp_path.iterdir())]
    assert len(files) > 8
    # With the settings and the cache of the package, which the gate has checked: torch alone takes half a minute.
    settings = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"]
    # A process of its own: in this one, millions of objects would stay until the end of the file.
    done = subprocess.run([sys.executable, "-m", "mypy", *settings, *map(str, files)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_lite0_weights_get_the_names_of_timm() -> None:
    """Blocks are counted through there, and in each of the seven stages of 1, 2, 2, 3, 3, 4 and 1 blocks in timm."""
    script = example("lite0_weights")
    network = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    numbers = {
        place: number
        for number, place in enumerate((s, i) for s, n in enumerate((1, 2, 2, 3, 3, 4, 1)) for i in range(n))
    }
    source = {}
    for name, value in network.state_dict().items():
        match name.split("."):
            case ["blocks", stage, index, layer, leaf]:
                names = script["SEPARABLE"] if stage == "0" else script["INVERTED"]
                theirs = {ours: theirs for theirs, ours in names.items()}[layer]
                source[f"_blocks.{numbers[int(stage), int(index)]}.{theirs}.{leaf}"] = value
            case [layer, leaf]:
                theirs = {ours: theirs for theirs, ours in script["OUTSIDE"].items()}[layer]
                source[f"{theirs}.{leaf}"] = value
    found = script["converted"](source)
    assert found["blocks.5.3.conv_pwl.weight"] is source["_blocks.14._project_conv.weight"]
    assert found["blocks.0.0.conv_pw.weight"] is source["_blocks.0._project_conv.weight"]
    assert found["blocks.2.0.conv_pw.weight"] is source["_blocks.3._expand_conv.weight"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        script["converted"]({**source, "_fc.bias": torch.zeros(3)})
