"""Plans before a training: the values of `auto`, and whether a step fits into the memory of the CPU.

The plan is saved in the run folder; every resume from a checkpoint uses the saved plan, even on another machine.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from segapp.accelerator import accelerator_of
from segapp.assembly.devices import DevicePlan, with_precision
from segapp.assembly.pairs import build_pixels, build_scheme, count_images, px_bytes, split_names
from segapp.checkpoint.training_state import on_main
from segapp.config import RunConfig, validate_config
from segapp.datasets.resources import available_bytes, total_bytes
from segapp.errors import ConfigError, SegappError
from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker
from segapp.memory.oom import is_out_of_memory
from segapp.memory.peaks import SimulationJob
from segapp.memory.plan import GpuSpec, OverheadEstimate, SavedMemoryPlan, context_mib, read_saved_plan
from segapp.memory.split_check import tensor_frac
from segapp.parallel.distributed import Ranks
from segapp.planning.plan import SimulationPool, plan_memory, ring_mib
from segapp.planning.trial import trial_step
from segapp.run.checkpoints import CheckpointFolder
from segapp.run.files import machine_id
from segapp.run.folder import RunFolder
from segapp.run.words import say

MOST_BYTES_PER_PX = 16 * 1024
"""More than the networks of this package need per pixel of a crop (DeepLabv3 with ResNet-101: 9.5 KiB in fp32)."""
PLAN_ERROR = 0.175
"""Largest relative error of a plan for the CPU, as measured; the page memory-prediction has the table."""

logger = logging.getLogger("segapp")


def resolve_auto(
    config: RunConfig,
    state: Mapping[str, Any] | None,
    folder: RunFolder,
    devices: DevicePlan,
    device_infos: Sequence[DeviceInfo],
    ranks: Ranks,
) -> tuple[RunConfig, SavedMemoryPlan | None]:
    """Return the config with every `auto` in `train` that a resume must keep resolved, and the plan if one is needed.

    The values of a checkpoint's state hold again. `train.bn_momentum` stays auto until the length of the run is known.

    Raises:
        ConfigError: the memory of the devices is unknown, or nothing fits.
    """
    config = config if state is None else with_kept(config, state)
    if ranks.is_main and CheckpointFolder(folder.checkpoints).is_untouched():
        folder.saved_plan.unlink(missing_ok=True)  # of a start that saved nothing, perhaps with another config
    if config.train.precision == "auto":
        own = with_precision(config, devices.devices).train.precision
        # All ranks must compute in the same precision, so the oldest GPU decides.
        supported = min(ranks.gather(own), key=("fp32", "amp-fp16", "amp-bf16").index)
        config = with_train(config, precision=supported)
    saved_plan: SavedMemoryPlan | None = None
    if is_planned(config):
        if ranks.is_main and not folder.saved_plan.exists():
            say("planning the memory (some seconds)")
        # The free memory differs from one look to the next, so only one rank plans.
        saved_plan = on_main(ranks, lambda: _load_or_make_plan(config, folder, devices, device_infos))
    if not config.train.batch_size and saved_plan is not None:
        batch_size, accumulate = saved_plan.batch_size, saved_plan.accumulate
    else:
        batch_size = config.train.batch_size
        accumulate = config.train.accumulate
    return with_train(config, batch_size=batch_size, accumulate=accumulate), saved_plan


def with_kept(config: RunConfig, state: Mapping[str, Any]) -> RunConfig:
    """Return the config with the values that a checkpoint's training had for the automatic keys of `train`."""
    automatic = [key for key in ("precision", "bn_momentum") if getattr(config.train, key) == "auto"]
    of_plan = () if config.train.batch_size else ("batch_size", "accumulate")
    try:
        kept = {key: state["config"]["train"][key] for key in (*automatic, *of_plan)}
    except (KeyError, TypeError):  # `check_resumable` says what is wrong with the checkpoint
        return config
    return config.model_copy(update={"train": config.train.model_copy(update=kept)})


def is_planned(config: RunConfig) -> bool:
    """Return True if a memory plan determines the batch, the split, or the recomputed blocks."""
    return not config.train.batch_size or config.parallel.is_auto or config.train.recompute == "auto"


def with_train(config: RunConfig, **changes: Any) -> RunConfig:
    raw = config.model_dump(mode="json")
    return validate_config({**raw, "train": {**raw["train"], **changes}})


def _load_or_make_plan(
    config: RunConfig, folder: RunFolder, devices: DevicePlan, device_infos: Sequence[DeviceInfo]
) -> SavedMemoryPlan | None:
    kept, batch_size = read_saved_plan(folder.saved_plan), config.train.batch_size
    if kept is not None and batch_size not in (0, kept.batch_size):
        kept = None
    is_divided = devices.mode in ("dp", "ddp")
    num_choices = len(device_infos) if is_divided else 1
    has_blocks = kept is not None and kept.recompute is not None and len(kept.recompute) == num_choices
    is_for_these = kept is not None and (not is_divided or len(kept.best_split) == len(device_infos))
    if kept is not None and is_for_these and (has_blocks or config.train.recompute != "auto"):
        return kept
    gpus = known_gpus(device_infos)
    if gpus is None and (batch_size or kept is not None):
        if kept is not None and not is_for_these:  # a plan for other devices only gives the batch
            kept = kept.without_splits()
        return None if kept is None else replace(kept, recompute=None)  # an automatic split begins as an even one
    if kept is not None:
        config = with_train(config, batch_size=kept.batch_size, accumulate=kept.accumulate)
    if gpus is None:
        raise ConfigError(
            "train.batch_size = auto needs the memory of each device, and there is no GPU: "
            "set train.batch_size to a number",
            key="train.batch_size",
        )
    # The driver's memory is already subtracted, and budgets are for tensors only.
    budgets = config.parallel.memory_budget_mib
    libraries_mib = context_mib(devices.mode, len(gpus), driver_mib=0.0) if budgets is None else (0.0,) * len(gpus)
    overhead = OverheadEstimate(libraries_mib, tensor_frac(os.environ))
    if config.train.batch_size:
        planned = plan_memory(config, gpus, mode=devices.mode, overhead=overhead)
        saved_plan = SavedMemoryPlan.of_plan(planned, config.train.accumulate)
    else:
        saved_plan = _largest(config, gpus, devices, overhead)
    saved_plan.write(folder.saved_plan)
    return saved_plan


def check_host_memory(config: RunConfig, num_images: int, eval_px: int, ranks: Ranks) -> str | None:
    """Return an alert if a step on the CPU may exceed the free memory of a machine; refuse one that exceeds all of it.

    A step of `num_images` over all ranks is simulated, which takes seconds, only if a bound of its memory does not fit.
    It is simulated on one device, because several on one machine need no less. Data workers load images of `eval_px`
    pixels ahead. An evaluation and a cache have limits of their own.

    Raises:
        ConfigError: it does not fit, even if the plan is too high by its largest error.
    """
    machines = ranks.gather((machine_id(), total_bytes(), available_bytes()))
    num_ranks = Counter(machine for machine, *_ in machines)
    machine, total, free = min(machines, key=lambda each: (each[2] or math.inf) / num_ranks[each[0]])
    images, (height, width) = -(-num_images // ranks.world_size), config.data.crop_px
    workers = 0 if config.data.workers == "auto" else config.data.workers  # auto leaves room
    eval_bytes = config.eval.batch_size * eval_px * px_bytes(build_pixels(config.data), build_scheme(config.data))
    loaded = num_ranks[machine] * (ring_mib(config) * 2**20 / ranks.world_size + (1 + 2 * workers) * eval_bytes)
    most = loaded + num_ranks[machine] * images * height * width * MOST_BYTES_PER_PX
    if free is None or most <= free:
        return None

    def simulated_bytes() -> float:
        with SimulationPool(config, num_processes=1) as pool:
            (result,) = pool.simulate([SimulationJob("single", (images,), config.train.accumulate)])
        return 2**20 * result.peak_mib()[0]

    try:
        step = num_ranks[machine] * on_main(ranks, simulated_bytes)
    except SegappError as error:  # a custom component may do something that cannot be simulated
        logger.info("the memory of a step could not be predicted: %s", error)
        return None
    if step + loaded <= free:
        return None
    is_refused = (1 - PLAN_ERROR) * step + loaded > total
    fewer = int(num_images * (1 - PLAN_ERROR) * ((total if is_refused else free) - loaded) / step)
    cure = "eval.batch_size or data.workers" if loaded > step else "data.crop_px"
    step_mib, loaded_mib, total_mib, free_mib = (f"{each / 2**20:,.0f} MiB" for each in (step, loaded, total, free))
    said = (
        f"a step of {num_images} crops of {height} x {width} px needs about {step_mib}, and batches that are loaded "
        f"ahead {loaded_mib}; of {total_mib} of memory, {free_mib} are free: lower {cure}"
        + (f", or set train.batch_size to {fewer} or less" if 1 < fewer < num_images else "")
    )
    if is_refused:
        raise ConfigError(said, key="data.crop_px").see("out-of-memory")
    return f"{said}, or end other programs; if memory is full, the system ends the training without a message"


def known_gpus(device_infos: Sequence[DeviceInfo]) -> tuple[GpuSpec, ...] | None:
    """Return the devices with their memory for this run; None if one shares its memory with other processes."""
    usable = DeviceMemoryTracker(device_infos).usable_mib()
    if None in usable or any(info.uuid is None for info in device_infos):
        return None
    return tuple(GpuSpec(mib or 0.0, info.device) for mib, info in zip(usable, device_infos, strict=True))


def _largest(
    config: RunConfig, gpus: Sequence[GpuSpec], devices: DevicePlan, overhead: OverheadEstimate
) -> SavedMemoryPlan:
    """Return the plan of the largest batch for training and evaluation; a trial step confirms it in single and dp."""
    most = count_images(config.data, split_names(config.data)[0])
    notes: list[str] = []
    while True:
        planned = plan_memory(config, gpus, mode=devices.mode, overhead=overhead, most=most)
        saved_plan = SavedMemoryPlan.of_plan(planned, config.train.accumulate, notes)
        # A trial step of several ranks would need all of them.
        if devices.mode not in ("single", "dp"):
            return saved_plan
        resolved = with_train(config, batch_size=saved_plan.batch_size, accumulate=saved_plan.accumulate)
        try:
            trial_step(resolved, devices, saved_plan)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = str(error).partition("\n")[0]
            logger.info("batch of %d images: %s", saved_plan.batch_size, text)
            notes.append(f"a batch of {saved_plan.batch_size} was planned and ran out of memory in a trial step")
            # One image less would seldom fit, and each trial takes seconds.
            most = min(saved_plan.batch_size - 1, saved_plan.batch_size * 7 // 8)
            if most < 1:
                raise ConfigError(
                    f"train.batch_size = auto: not even one image fits ({text}): lower data.crop_px",
                    key="train.batch_size",
                ) from None
            continue
        finally:
            accelerator_of(devices.devices[0]).empty_cache()
        return replace(saved_plan, notes=(*notes, f"a batch of {saved_plan.batch_size} was confirmed by a trial step"))
