"""The small loss beside interpolate + cross-entropy: what is timed and weighed. Run as a script for one memory figure.

    python tests/support/small_loss_cases.py CASE WAY

prints the peak of resident memory above the start, in MiB, of one forward and backward pass in a fresh process.
"""

import ctypes
import gc
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from segapp.losses import upsample_argmax, upsample_confusion, upsample_cross_entropy

CASES = {  # N, C, h, w, H, W
    "cityscapes": (2, 19, 128, 256, 1024, 2048),
    "crop-769": (2, 19, 97, 97, 769, 769),
    "ade20k": (2, 150, 64, 64, 512, 512),
    "camvid": (8, 11, 45, 60, 360, 480),
    "tiny-64": (2, 19, 8, 8, 64, 64),
    "crop-256": (2, 19, 32, 32, 256, 256),
    "stride-4": (2, 19, 128, 128, 512, 512),
    "stride-2": (2, 19, 180, 240, 360, 480),
    "stride-1": (2, 19, 360, 480, 360, 480),
    "binary": (8, 2, 45, 60, 360, 480),
    "evaluation": (1, 19, 128, 256, 1024, 2048),
}


def make(name):
    N, C, h, w, H, W = CASES[name]
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(N, C, h, w, generator=generator)
    target = torch.randint(0, C, (N, H, W), generator=generator)
    target[torch.rand(N, H, W, generator=generator) < 0.1] = 255
    return logits, target


def naive(logits, target):
    values = F.interpolate(logits, target.shape[-2:], mode="bilinear", align_corners=True)
    return F.cross_entropy(values, target, ignore_index=255)


def small(implementation):
    def loss(logits, target):
        loss_sum, weight_sum = upsample_cross_entropy(logits, target, implementation=implementation)
        return loss_sum / weight_sum

    return loss


LOSSES = {
    "naive": naive,
    "auto": small("auto"),
    "sums": small("sums"),
}


def naive_scores(logits, target):
    C = logits.shape[1]
    values = F.interpolate(logits, target.shape[-2:], mode="bilinear", align_corners=True)
    prediction, valid = values.argmax(1), target != 255
    confusion = torch.bincount(target[valid] * C + prediction[valid], minlength=C * C).view(C, C)
    return confusion, F.cross_entropy(values, target, ignore_index=255)


def small_scores(logits, target):
    confusion, loss_sum, weight_sum = upsample_confusion(logits, target)
    return confusion, loss_sum / weight_sum


def naive_prediction(logits, target):
    return F.interpolate(logits, target.shape[-2:], mode="bilinear", align_corners=True).argmax(1)


def small_prediction(logits, target):
    return upsample_argmax(logits, (target.shape[-2], target.shape[-1]))


EVALUATIONS = {
    "naive-scores": naive_scores,
    "small-scores": small_scores,
    "naive-prediction": naive_prediction,
    "small-prediction": small_prediction,
}


def run_once(way, logits, target):
    if way in EVALUATIONS:
        with torch.no_grad():
            EVALUATIONS[way](logits, target)
        return
    leaf = logits.clone().requires_grad_()
    LOSSES[way](leaf, target).backward()


def seconds(way, logits, target):
    start = time.perf_counter()
    run_once(way, logits, target)
    return time.perf_counter() - start


def resident_mib(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def peak_extra_mib(case, way):
    """Peak resident memory of one pass above what was resident before it; warmed up, heap trimmed."""
    logits, target = make(case)
    run_once(way, logits, target)
    run_once(way, logits, target)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run_once(way, logits, target)
    return resident_mib("VmHWM") - before


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(peak_extra_mib(sys.argv[1], sys.argv[2]))
