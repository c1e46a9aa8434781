"""Cost of a training sample of CamVid as PNG, by processor time, over that of OpenCV's decoding of its two files.

    CAMVID=/path/to/camvid python -m tests.benchmarks.decoding

Image and mask files are in memory of the page cache. The functions run in turns; each number is a median.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_scheme
from segapp.config import load_config
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.images import png
from segapp.datasets.loader import TrainLoader
from segapp.parallel.distributed import Ranks

NUM_IMAGES, ROUNDS = 48, 7


def write_pngs(source: Path, root: Path) -> None:
    """Write some images and masks of both splits as the libpng of Pillow does by default."""
    for split in ("train", "val"):
        for folder in (split, f"{split}annot"):
            (root / folder).mkdir(parents=True)
            for path in sorted((source / folder).iterdir())[:NUM_IMAGES]:
                Image.open(path).save(root / folder / f"{path.stem}.png")


def dataset_of(root: Path, cache: str) -> SegmentationDataset:
    keys = [f"data.root={root}", "data.crop_px=[352,480]", f"data.cache={cache}"]
    data = load_config(Path("configs/camvid.yaml"), keys).data
    return build_dataset(data, build_scheme(data), "train", is_training=True, seed=0, ranks=Ranks())


def medians(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median processor time of each function in milliseconds for an image, after two rounds to warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS + 2):
        for name, function in functions.items():
            began_s = time.process_time()
            function()
            times[name].append(1e3 * (time.process_time() - began_s) / NUM_IMAGES)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def main() -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_pngs(Path(os.environ["CAMVID"]), root)
        plain, cached = dataset_of(root, "none"), dataset_of(root, "auto")
        print(cached.cache_note)
        files = [np.fromfile(path, np.uint8) for pair in plain.pairs for path in pair.files]
        decoder, epochs = png.decode_image_png_u8, iter(range(10**6))

        def samples(dataset: SegmentationDataset, with_extra: bool = True) -> Callable[[], None]:
            def load() -> None:
                png.decode_image_png_u8 = decoder if with_extra else None
                epoch = next(epochs)
                for index in range(len(dataset)):
                    dataset[epoch, index]

            return load

        found = medians(
            {
                "cv2.imdecode of both files": lambda: [cv2.imdecode(data, cv2.IMREAD_UNCHANGED) for data in files],
                "sample without kornia-rs": samples(plain, with_extra=False),
                "sample with kornia-rs": samples(plain),
                "cached sample": samples(cached),
            }
        )
        for name, value in found.items():
            print(f"{name:28} {value:6.2f} ms, x {value / found['cv2.imdecode of both files']:.2f}")
        png.decode_image_png_u8 = decoder
        loader, times = TrainLoader(dataset_of(root, "auto"), 16), []
        for epoch in (1, 2, 3):
            began_s = time.process_time()
            list(loader.epoch(epoch))
            times.append(time.process_time() - began_s)
        print(f"data.cache: auto: epoch 3 takes x {times[2] / times[0]:.2f} of epoch 1")


if __name__ == "__main__":
    main()
