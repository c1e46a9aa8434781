"""Published peaks of trainings beside their plans.

    python -m tests.support.published_memory [NAME...]

prints one JSON object a figure: the plan of the same training, and the same simulation with one more difference each of
the torch and the cuDNN of that time.
"""

import contextlib
import json
import math
import sys
import warnings
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import torch
from torch import Tensor

from segapp.config import RunConfig, validate_config
from segapp.memory.peaks import PhasePeak, SimulationJob
from segapp.memory.plan import OverheadEstimate, context_mib
from segapp.models.eomt import QueryMasking
from segapp.planning import simulate
from segapp.planning.simulate import build_simulator

CITYSCAPES, WIDE, SQUARE = 19, (512, 1024), (769, 769)


@dataclass(frozen=True)
class Figure:
    """A figure of mmsegmentation's `configs/*/metafile.yaml`, "Memory (GB)" of one of four V100."""

    name: str
    head: str
    depth: int
    crop_px: tuple[int, int]
    published_gb: float
    """The most that torch.cuda.max_memory_allocated said on any GPU, with cudnn.benchmark off."""
    has_deep_stem: bool = True
    batch: int = 2
    num_classes: int = CITYSCAPES
    precision: str = "fp32"

    def config(self) -> RunConfig:
        """The published training, as segapp plans it."""
        model = {
            "library": "python",
            "name": "tests.support.published_networks:Published",
            "options": {"head": self.head, "depth": self.depth, "has_deep_stem": self.has_deep_stem},
        }
        loss = {"options": {"implementation": "reference"}, "aux_weight": 0.4}
        optim = {"name": "sgd", "lr": 0.01, "momentum": 0.9}
        return published_config(self, model, loss, optim)


@dataclass(frozen=True)
class EomtFigure:
    """ "~26 GB" of each of four H100, of EoMT's page on its models: panoptic COCO, ViT-L/16, 640 px, batch 16.

    What was read is not said: nvidia-smi would count context, NCCL and the allocator's free blocks too.
    """

    name: str = "EoMT ViT-L 640x640"
    crop_px: tuple[int, int] = (640, 640)
    published_gb: float = 26.0
    batch: int = 4
    num_classes: int = 133
    num_heads: ClassVar[int] = 16
    precision: str = "amp-fp16"

    def config(self) -> RunConfig:
        """The published training, with this program's loss over all pixels of a mask."""
        model = {
            "library": "segapp",
            "name": "eomt",
            "encoder": "tu-vit_large_patch16_dinov3",
            "options": {"num_queries": 200, "num_blocks": 4, "mask_steps": 1000},
        }
        return published_config(self, model, {"name": "mask_classification"}, {"name": "adamw", "lr": 1e-4})


def published_config(figure: "Figure | EomtFigure", model: dict, loss: dict, optim: dict) -> RunConfig:
    """A training on four GPUs as DistributedDataParallel does it by default."""
    classes = [f"c{i}" for i in range(figure.num_classes)]
    return validate_config(
        {
            "name": "published",
            "data": {"format": "folder", "root": "nowhere", "classes": classes, "crop_px": figure.crop_px},
            "model": model,
            "loss": loss,
            "optim": optim,
            # V100 GPUs have no TF32, and mmsegmentation does not use NHWC.
            "train": {
                "batch_size": 4 * figure.batch,
                "precision": figure.precision,
                "tf32": False,
                "channels_last": False,
            },
            "parallel": {"mode": "ddp", "gradient_as_bucket_view": False},
        }
    )


def figures() -> list[Figure | EomtFigure]:
    found: list[Figure | EomtFigure] = []
    deep = {
        "psp": {(18, WIDE): 1.7, (50, WIDE): 6.1, (101, WIDE): 9.6, (18, SQUARE): 1.9, (50, SQUARE): 6.9,
                (101, SQUARE): 10.9},
        "fcn": {(18, WIDE): 1.7, (50, WIDE): 5.7, (101, WIDE): 9.2, (18, SQUARE): 1.9, (50, SQUARE): 6.5,
                (101, SQUARE): 10.4},
        "deeplabv3": {(18, WIDE): 1.7, (50, WIDE): 6.1, (101, WIDE): 9.6, (18, SQUARE): 1.9, (50, SQUARE): 6.9,
                      (101, SQUARE): 10.9},
        "deeplabv3plus": {(18, WIDE): 2.2, (50, WIDE): 7.5, (101, WIDE): 11.0, (18, SQUARE): 2.5, (50, SQUARE): 8.5,
                          (101, SQUARE): 12.5},
        "uper": {(50, WIDE): 6.4, (101, WIDE): 7.4, (50, SQUARE): 7.2, (101, SQUARE): 8.4},
    }  # fmt: skip
    for head, rows in deep.items():
        for (depth, crop), gb in rows.items():
            found.append(Figure(f"{head} R{depth} {crop[0]}x{crop[1]}", head, depth, crop, gb))
    plain = [("psp", 18, 1.5), ("psp", 50, 6.0), ("psp", 101, 9.5), ("fcn", 18, 1.6), ("fcn", 50, 5.6),
             ("fcn", 101, 9.1)]  # fmt: skip
    found += [Figure(f"{h} R{d}b 512x1024", h, d, WIDE, gb, has_deep_stem=False) for h, d, gb in plain]
    half = [("psp", 5.34), ("fcn", 5.37), ("deeplabv3", 5.75), ("deeplabv3plus", 6.35)]
    found += [Figure(f"{h} R101 512x1024 fp16", h, 101, WIDE, gb, precision="fp16") for h, gb in half]
    ade = {"batch": 4, "num_classes": 150}
    found += [Figure(f"uper R{d} 512x512 C150", "uper", d, (512, 512), gb, **ade) for d, gb in ((50, 8.1), (101, 9.1))]
    return [*found, EomtFigure()]


TILE, KERNEL = 4, 3
"""Outputs of a tile and width of the kernel in Winograd's minimal filtering F(4x4, 3x3)."""


def winograd_workspace(images, weight, padding, stride, dilation, groups):
    """What a convolution by Winograd takes beside its tensors: the transforms of inputs, weights and outputs.

    F(4x4, 3x3) transforms every tile to 6x6 (Lavin and Gray, arXiv:1509.09308); cuDNN's "non-fused" form keeps all of
    them in memory, and has it for 3x3 kernels of stride 1 without dilation and groups.
    """
    width, inputs, *kernel = weight.shape
    if kernel != [KERNEL, KERNEL] or {*stride, *dilation, groups} != {1}:
        return []
    number, _, height, length = images.shape
    tiles = number * math.prod(
        -(-(side + 2 * pad - KERNEL + 1) // TILE) for side, pad in zip((height, length), padding, strict=True)
    )
    cells = (TILE + KERNEL - 1) ** 2
    return [images.new_empty(cells * (inputs * tiles + width * inputs + width * tiles))]


def forward_workspace(images, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    return [] if transposed else winograd_workspace(images, weight, padding, stride, dilation, groups)


def backward_workspace(grad, images, weight, sizes, stride, padding, dilation, transposed, output_padding, groups, *_):
    return [] if transposed else winograd_workspace(images, weight, padding, stride, dilation, groups)


def winograd():
    """Workspaces of cuDNN's convolutions."""
    return {
        torch.ops.aten.convolution.default: forward_workspace,
        torch.ops.aten.convolution_backward.default: backward_workspace,
    }


def kept_logits():
    """Before torch 1.11 the graph kept the input of log_softmax, here full-resolution logits, beside its output."""
    kept: list[Tensor] = []

    def forward(logits, *_):
        kept.append(logits)
        return []

    return {
        torch.ops.aten._log_softmax.default: forward,
        torch.ops.aten._log_softmax_backward_data.default: lambda *_: [kept.pop()],
    }


@contextlib.contextmanager
def as_published(*, buckets: bool, logits: bool, workspaces: bool):
    """Simulate what torch 1.5 and cuDNN 7.6 do otherwise.

    Args:
        buckets: DDP's reducer has its buckets from the start.
        logits: `kept_logits`.
        workspaces: `winograd`.
    """
    made, ledger = simulate.Buckets, simulate.simulated_ledger

    def eager(parameters, **options):
        return made(parameters, **{**options, "is_lazy": False})

    def with_workspaces(*arguments):
        found = ledger(*arguments)
        found.workspaces = {
            **found.workspaces,
            **(kept_logits() if logits else {}),
            **(winograd() if workspaces else {}),
        }
        return found

    with contextlib.ExitStack() as stack:
        if buckets:
            stack.enter_context(mock.patch.object(simulate, "Buckets", eager))
        stack.enter_context(mock.patch.object(simulate, "simulated_ledger", with_workspaces))
        yield


def peak(figure: Figure | EomtFigure) -> PhasePeak:
    """The highest of the phases' peaks in one of four ranks."""
    (phases,) = build_simulator(figure.config()).run(SimulationJob("ddp", (figure.batch,))).devices
    return max(phases.values(), key=lambda each: each.mib)


STAGES = {
    "planned": {"buckets": False, "logits": False, "workspaces": False},
    "buckets": {"buckets": True, "logits": False, "workspaces": False},
    "logits": {"buckets": True, "logits": True, "workspaces": False},
    "workspaces": {"buckets": True, "logits": True, "workspaces": True},
}
"""The plan, and then with one more difference of torch 1.5 and cuDNN 7.6 each."""


def row(figure: Figure) -> dict:
    """Peaks of each of `STAGES`, MiB."""
    found = {}
    for stage, differences in STAGES.items():
        with as_published(**differences):
            found[stage] = peak(figure)
    kinds = found["workspaces"].by_kind
    mib = {stage: each.mib for stage, each in found.items()}
    return {"figure": figure.name, "published": figure.published_gb, **mib, "kinds": kinds}


def eomt_row(figure: EomtFigure) -> dict:
    """Peaks of the plan, with DDP's buckets, with EoMT's masks of every head, and with what a GPU adds to tensors."""
    planned = peak(figure).mib
    with as_published(buckets=True, logits=False, workspaces=False):
        buckets = peak(figure).mib
        with mock.patch.object(QueryMasking, "forward", of_every_head(QueryMasking.forward)):
            masks = peak(figure).mib
    needed = OverheadEstimate(context_mib("ddp", 4)).required_mib((masks,) * 4)[0]
    mib = {"planned": planned, "buckets": buckets, "masks": masks, "with overhead": needed}
    return {"figure": figure.name, "published": figure.published_gb, **mib}


def of_every_head(forward):
    """EoMT expands its mask of attention to all heads, of which torch then makes numbers for each."""
    return lambda *args: forward(*args).expand(-1, EomtFigure.num_heads, -1, -1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for each in figures():
        if not sys.argv[1:] or any(word in each.name for word in sys.argv[1:]):
            print(json.dumps(row(each) if isinstance(each, Figure) else eomt_row(each)), flush=True)
