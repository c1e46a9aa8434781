"""The memory of a training on the CPU: a step that cannot fit is refused before it is made.

A GPU reports what does not fit, and the training continues in smaller pieces. On the CPU the system ends a process,
this one or another, without a message. The step is therefore simulated as for a GPU, in a process of its own, but only
if its crops are so large that it could matter.
"""

from __future__ import annotations

import logging
import math

from segapp.config import RunConfig
from segapp.datasets.resources import available_bytes
from segapp.errors import OutOfMemoryError, SegappError
from segapp.memory.simulated.jobs import SimulationJob
from segapp.training.planning.pool import SimulationPool

MOST_BYTES_PER_PX = 16 * 1024
"""More than the networks of this package need for a pixel of a crop (DeepLabv3 with ResNet-101: 9.5 KiB in fp32)."""

logger = logging.getLogger("segapp")


def simulated_bytes(config: RunConfig, num_images: int) -> int:
    """Return the peak of the tensors of a training step of so many crops on one device, without workspaces of kernels.

    Raises:
        SegappError: the network cannot be simulated.
    """
    with SimulationPool(config, num_processes=1) as pool:
        (result,) = pool.simulate([SimulationJob("single", (num_images,), accumulate=config.train.accumulate)])
    return int(result.peak_mib()[0] * 2**20)


def check_host_memory(config: RunConfig, num_images: int) -> None:
    """Refuse a training on the CPU whose step cannot fit into the free memory.

    The prediction counts the tensors of one device, less than is needed: a step that barely fits is tried.

    Args:
        config: the complete config, with its batch.
        num_images: of a micro-batch on this machine, over all devices and ranks.

    Raises:
        OutOfMemoryError: it does not fit.
    """
    height, width = config.data.crop_px
    free = available_bytes()
    if free is None or num_images * height * width * MOST_BYTES_PER_PX <= free:
        return
    try:
        needed = simulated_bytes(config, num_images)
    except SegappError as error:  # a custom component may do what no simulation can follow
        logger.info("the memory of a step could not be predicted: %s", error)
        return
    if needed <= free:
        return
    raise OutOfMemoryError(
        f"a step of {num_images} crops of {height} x {width} px needs {needed / 2**30:.1f} GiB of memory at least, and "
        f"{free / 2**30:.1f} GiB are free: lower data.crop_px = {[height, width]}"
        + _fewer_images(config, num_images, free / needed)
    )


def _fewer_images(config: RunConfig, num_images: int, share: float) -> str:
    """Return the advice to take fewer images at a time, if one image would fit."""
    fewer = math.floor(num_images * share)
    if not 0 < fewer < num_images:
        return ""
    at_most = "1" if fewer == 1 else f"{fewer} or less"
    return (
        f", or train.batch_size to {at_most}, with train.accumulate = "
        f"{config.train.accumulate * math.ceil(num_images / fewer)} for as many images a step"
    )
