"""Sliding-window evaluation beside the straightforward one: a canvas of full-resolution logits that windows add to."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.datasets.pool import Batch
from segapp.inference.evaluate import EvaluationSettings, evaluate
from segapp.inference.sliding import Inference, window_corners
from segapp.metrics import ConfusionMatrix
from segapp.models import SegmentationModel, build_model
from segapp.models.normalizer import Normalizer

pytestmark = pytest.mark.benchmark

SIZE, WINDOW, CLASSES, ROUNDS = (1024, 2048), (512, 512), 19, 5


@torch.no_grad()
def straightforward(model: SegmentationModel, pixels: Tensor, target: Tensor) -> Tensor:
    """As mmsegmentation's `slide_inference` does it, then argmax and a confusion matrix."""
    canvas = pixels.new_zeros(1, CLASSES, *SIZE)
    count = pixels.new_zeros(1, 1, *SIZE)
    for top, left in window_corners(SIZE, WINDOW, 1 / 3):
        place = ..., slice(top, top + WINDOW[0]), slice(left, left + WINDOW[1])
        logits = F.interpolate(model(pixels[place])[0], WINDOW, mode="bilinear", align_corners=True)
        canvas[place] += logits
        count[place] += 1
    prediction = (canvas / count).argmax(1)
    matrix = ConfusionMatrix(CLASSES)
    matrix.update(prediction, target)
    return matrix.matrix


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def peak_above_start(work: Callable[[], object]) -> float:
    """MiB of resident memory that a piece of work adds at most."""
    start, most, is_done = resident_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.002):
            most[0] = max(most[0], resident_mib() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    work()
    is_done.set()
    thread.join()
    return most[0]


@pytest.mark.parametrize(("name", "encoder"), [("lraspp", "mobilenet_v3_small"), ("lraspp", "mobilenet_v3_large")])
def test_sliding_window_time_against_full_resolution_sums(name: str, encoder: str) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = build_model("torchvision", name, CLASSES, encoder=encoder).eval()
    images = torch.randint(0, 256, (1, 3, *SIZE), dtype=torch.uint8)
    target = torch.randint(0, CLASSES, (1, *SIZE), dtype=torch.uint8)
    normalizer = Normalizer((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    inference = Inference(normalizer, window_px=WINDOW)

    def ours() -> object:
        found = evaluate(
            model,
            [Batch(images, target, (0,))],
            EvaluationSettings(inference, CLASSES, 255, torch.device("cpu")),
        )
        return found.scores.miou

    def theirs() -> Tensor:
        return straightforward(model, normalizer(images), target)

    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(ROUNDS):
        for way, run in (("ours", ours), ("theirs", theirs)):
            start = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - start)
    memory = {"ours": peak_above_start(ours), "theirs": peak_above_start(theirs)}
    print(f"\n{name} {encoder}, one image of {SIZE[0]} x {SIZE[1]} px, windows of {WINDOW[0]}, {CLASSES} classes")
    for way, found in seconds.items():
        print(
            f"  {way:7} median {1e3 * statistics.median(found):6.0f} ms, best {1e3 * min(found):6.0f} ms, "
            f"{memory[way]:5.0f} MiB above the start"
        )
    pairs = zip(seconds["theirs"], seconds["ours"], strict=True)
    print(
        f"  ratio {statistics.median(b / a for b, a in pairs):.2f} (median of pairs), "
        f"{min(seconds['theirs']) / min(seconds['ours']):.2f} (best)"
    )
