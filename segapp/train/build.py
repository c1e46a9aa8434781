"""The one place where the sections of a config become objects; every class gets plain arguments."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from segapp.build.class_weights import cached_frequencies, class_weights
from segapp.build.devices import DevicePlan
from segapp.build.optimizer import build_optimizer, build_parameter_groups
from segapp.checkpoint.training_state import CheckpointStore
from segapp.config import LiveSettings, RunConfig
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.frequencies import ClassFrequencies, compute_class_frequencies
from segapp.datasets.layouts.formats import ClassScheme
from segapp.datasets.loader import EvalLoader, LoadOptions, TrainLoader
from segapp.errors import ConfigError
from segapp.inference.normalize import NormalizedInput, Normalizer
from segapp.memory.saved_plan import SavedMemoryPlan
from segapp.models import SegmentationModel
from segapp.optim import WeightAverage
from segapp.parallel import (
    DataParallelModel,
    balance_stages,
    check_batchnorm,
    convert_sync_batchnorm,
    place_stages,
    smallest_chunk,
    wrap_ddp,
)
from segapp.parallel.ranks import Ranks
from segapp.precision import Precision
from segapp.run.folder import RunFolder
from segapp.train.control.batch_split import BatchSplitController
from segapp.train.control.commands import CommandController
from segapp.train.control.inbox import Inbox
from segapp.train.control.signals import StopSignals
from segapp.train.recovery.memory_limit import build_budget
from segapp.train.recovery.out_of_memory import OomHandler
from segapp.train.request import ImageLimit
from segapp.train.step.build_distill import (
    build_critic,
    build_distillation,
    build_distilled_input,
    build_teacher,
    check_teacher,
    distilled_criterion,
    needs_sync_batchnorm,
)
from segapp.train.step.engine import StepEngine
from segapp.train.telemetry.device_memory import DeviceMemoryTracker
from segapp.train.telemetry.event_log import EventLog
from segapp.train.telemetry.sample_images import SamplePictures
from segapp.train.trainer import Trainer

if TYPE_CHECKING:
    from segapp.build.trained import TrainedState
from segapp.build.criterion import build_criterion
from segapp.build.data import build_dataset, build_scheme, split_names
from segapp.build.network import (
    build_inference,
    build_network,
    check_sizes,
    set_batchnorm_momentum,
)


def seed_everything(seed: int) -> None:
    """Seeds Python's, numpy's and torch's global generators (weights, dropout)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_trainer(
    config: RunConfig,
    *,
    store: CheckpointStore,
    event_log: EventLog,
    signals: StopSignals,
    devices: DevicePlan,
    ranks: Ranks | None = None,
    with_weights: bool = True,
    inbox: Inbox | None = None,
    watch: DeviceMemoryTracker | None = None,
    folder: RunFolder | None = None,
    saved_plan: SavedMemoryPlan | None = None,
    advise: Callable[[], Sequence[str]] = tuple,
    limit: ImageLimit | None = None,
    teacher: TrainedState | None = None,
) -> Trainer:
    """Everything a training needs, from its config.

    Args:
        config: the complete config.
        store: of the run folder.
        event_log: of the run folder.
        signals: asks for a stop.
        devices: which devices, in which mode; in ddp this rank's own.
        ranks: the processes that train together.
        with_weights: load pretrained weights; not needed where a checkpoint follows.
        inbox: where commands come from; None: from nowhere.
        watch: is told what the training does.
        folder: for sample pictures and reports; None: there are none.
        saved_plan: the memory plan that the run began with.
        advise: says what would need less memory, the best first.
        limit: use only so many images; None: all.
        teacher: of `distill`; needed where the config has that section.

    Raises:
        ConfigError: a section does not fit the data, the model or this machine.
        DataError: the data cannot be used.
        CheckpointError: a weights file cannot be used.
    """
    ranks, device, watch = ranks or Ranks(), devices.devices[0], watch or DeviceMemoryTracker()
    seed_everything(config.seed)
    torch.backends.cudnn.benchmark = config.train.cudnn_benchmark
    data, train = config.data, config.train
    scheme = build_scheme(data)
    train_split, val_split = split_names(data)
    num_train = None if limit is None else limit.num_batches * train.batch_size
    num_val = None if limit is None else limit.num_val
    train_set = build_dataset(data, scheme, train_split, is_training=True, seed=config.seed, most=num_train)
    if len(train_set) < ranks.world_size:
        raise ConfigError(
            f"parallel: {ranks.world_size} ranks cannot share {len(train_set)} training images: use one each"
        )
    val_set = build_dataset(data, scheme, val_split, is_training=False, seed=config.seed, most=num_val)
    signals.check()

    model = build_network(config.model, scheme.num_classes, with_weights=with_weights)
    check_sizes(config, model)
    set_batchnorm_momentum(model, train.bn_momentum)
    if needs_sync_batchnorm(config, devices):
        convert_sync_batchnorm(model)
    precision = Precision(train.precision, device)
    precision.prepare(model.to(device))
    if train.channels_last:
        model.to(memory_format=torch.channels_last)
    normalizer = Normalizer(data.mean, data.std, precision.input_dtype).to(device)
    gpu0_bsz = first_gpu0_bsz(config, saved_plan)
    wrapped = NormalizedInput(model, normalizer, channels_last=train.channels_last)
    taught = None
    if teacher is not None:
        check_teacher(config, teacher, scheme)
        precision.prepare(teacher.model)
        critic = build_critic(config, scheme.num_classes, device, is_synced=needs_sync_batchnorm(config, devices))
        taught = build_distilled_input(
            config,
            model,
            normalizer,
            build_teacher(teacher, devices.devices, precision.input_dtype),
            critic,
            device,
        )
    network = build_parallel(config, devices, ranks, model, taught or wrapped, gpu0_bsz)
    task = build_criterion(
        config.loss,
        scheme.num_classes,
        scheme.ignore_index,
        lambda rule: class_weights(rule, _frequencies(train_set, scheme)),
    )
    criterion = distilled_criterion(config, task).to(device)
    engine = StepEngine(
        model,
        network,
        criterion,
        build_optimizer(config.optim, build_parameter_groups(config.optim, model, precision)),
        precision,
        average=None if train.ema is None else WeightAverage(model, train.ema),
        device=device,
        clip_grad_norm=config.optim.clip_grad_norm,
        ranks=ranks,
        watch=watch,
        distillation=None if taught is None else build_distillation(config, network, taught, device, ranks),
    )
    if isinstance(network, DataParallelModel) and not config.parallel.sync_bn:
        engine.smallest_chunk = smallest_chunk(wrapped, torch.zeros(1, 3, *data.crop_px, dtype=torch.uint8))
    controller = build_steering(config, devices, engine, inbox or Inbox(None, event_log), event_log, watch, saved_plan)
    inference = build_inference(data, config.eval, model, precision, config.loss.align_corners)
    torch.manual_seed(config.seed + ranks.rank)  # every rank drops out other pixels
    return Trainer(
        config,
        engine,
        TrainLoader(
            train_set,
            train.batch_size,
            seed=config.seed,
            options=LoadOptions(data.workers, data.timeout_s, pin_memory=device.type == "cuda"),
            rank=ranks.rank,
            world_size=ranks.world_size,
        ),
        EvalLoader(
            val_set,
            options=LoadOptions(data.workers, data.timeout_s),
            batch_size=config.eval.batch_size,
            rank=ranks.rank,
            world_size=ranks.world_size,
        ),
        inference,
        num_classes=scheme.num_classes,
        ignore_index=scheme.ignore_index,
        description={
            "classes": list(scheme.names),
            "num_params": sum(p.numel() for p in model.parameters()),
            "devices": [
                {"device": each.device, "name": each.name, "uuid": each.uuid, "total_mib": each.total_mib}
                for each in watch.devices
            ]
            or [str(device) for theirs in ranks.gather(devices.devices) for device in theirs],
            "num_train": len(train_set),
            "num_val": len(val_set),
        },
        store=store,
        event_log=event_log,
        signals=signals,
        controller=controller,
        rescue=OomHandler(event_log, watch, None if folder is None else folder.reports, advise, rank=ranks.rank),
        samples=None
        if folder is None or not ranks.is_main
        else SamplePictures(folder.samples, val_set, inference, device),
        budget=build_budget(config.parallel, devices.devices, engine, watch),
    )


def first_gpu0_bsz(config: RunConfig, saved_plan: SavedMemoryPlan | None) -> int | None:
    """`gpu0_bsz` of the first epoch: as the config says, or where it says `auto`, of the plan."""
    wish = config.parallel.gpu0_bsz
    if wish == "auto":
        return None if saved_plan is None else saved_plan.gpu0_bsz
    return wish


def build_steering(
    config: RunConfig,
    devices: DevicePlan,
    engine: StepEngine,
    inbox: Inbox,
    event_log: EventLog,
    watch: DeviceMemoryTracker,
    saved_plan: SavedMemoryPlan | None,
) -> CommandController:
    """What takes commands, with the settings that the config begins with."""
    parallel = config.parallel
    batch_split = BatchSplitController(
        engine.network, config.train.batch_size, devices.mode, engine.smallest_chunk, saved_plan
    )
    gpu0_bsz = first_gpu0_bsz(config, saved_plan)
    settings = LiveSettings(gpu0_bsz=gpu0_bsz, gpu0_bsz_auto=parallel.gpu0_bsz == "auto", shares=parallel.shares)
    return CommandController(inbox, event_log, batch_split, watch, settings)


def build_parallel(
    config: RunConfig,
    devices: DevicePlan,
    ranks: Ranks,
    model: SegmentationModel,
    network: NormalizedInput,
    gpu0_bsz: int | None,
) -> nn.Module:
    """Puts the network on its devices, in the way the mode asks for.

    Raises:
        ConfigError: the split, the batch or a stage does not fit the model or the devices.
    """
    parallel, batch_size = config.parallel, config.train.batch_size
    plain = NormalizedInput(model, network.normalizer)
    example = torch.zeros(1, 3, *config.data.crop_px, dtype=torch.uint8)
    try:
        if devices.mode == "ddp":
            if batch_size < ranks.world_size:
                raise ValueError(f"{ranks.world_size} ranks cannot share train.batch_size = {batch_size}: use one each")
            check_batchnorm(plain, [batch_size // ranks.world_size], example)
            return wrap_ddp(network, devices.devices[0], gradient_as_bucket_view=parallel.gradient_as_bucket_view)
        if devices.mode == "model":
            stages = parallel.stages or balance_stages(model, devices.devices, example.float().expand(2, -1, -1, -1))
            named = {f"model.{name}": device for name, device in stages.items()}
            place_stages(network, named, devices.devices[0], devices.devices[0])
            return network
        # Logical devices share one random generator: one replica at a time keeps dropout reproducible.
        is_distinct = len(set(devices.devices)) == len(devices.devices)
        wrapped = DataParallelModel(
            network,
            devices.devices,
            gpu0_bsz,
            shares=parallel.shares,
            full_batch=batch_size if parallel.shares is None else None,
            mode="threads" if is_distinct else "lockstep",
        )
        check_batchnorm(plain, wrapped.plan(batch_size), example)
        return wrapped
    except (ValueError, TypeError) as error:
        raise ConfigError(f"parallel: {error}") from None


def _frequencies(dataset: SegmentationDataset, scheme: ClassScheme) -> ClassFrequencies:
    masks = [pair.mask for pair in dataset.pairs if pair.mask is not None]
    return cached_frequencies(masks, repr(dataclasses.astuple(scheme)), lambda: compute_class_frequencies(dataset))
