"""The one place where the sections of a config become objects; every class gets plain arguments."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from segapp.build.class_weights import cached_frequencies, class_weights
from segapp.build.devices import DevicePlan
from segapp.checkpoint.training_state import CheckpointStore
from segapp.config import DataConfig, EvalConfig, LiveSettings, LossConfig, LossTerm, ModelConfig, RunConfig
from segapp.datasets.augment import EvalTransform, TrainTransform
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.doctor import check_masks
from segapp.datasets.files import ImagePair, check_pairs
from segapp.datasets.frequencies import ClassFrequencies, compute_class_frequencies
from segapp.datasets.layouts.formats import ClassScheme, class_scheme, find_pairs
from segapp.datasets.layouts.published_classes import CITYSCAPES_CATEGORIES, CITYSCAPES_NAMES
from segapp.datasets.loader import EvalLoader, TrainLoader
from segapp.errors import ConfigError
from segapp.inference.normalize import NormalizedInput, Normalizer
from segapp.inference.sliding import Inference
from segapp.losses import (
    AdditiveCriterion,
    CriterionCE,
    CriterionDice,
    CriterionFocal,
    CriterionLovasz,
    CriterionOHEM,
    CriterionSum,
)
from segapp.memory.saved_plan import Outlook
from segapp.models import SegmentationModel, build_model
from segapp.optim import WeightAverage, build_optimizer, norm_and_bias, parameter_groups
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
from segapp.train.control.batch_split import SplitKnob
from segapp.train.control.commands import Steering
from segapp.train.control.inbox import Inbox
from segapp.train.control.signals import StopSignals
from segapp.train.recovery.memory_limit import build_budget
from segapp.train.recovery.out_of_memory import Rescue
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
from segapp.train.telemetry.device_memory import MemoryWatch
from segapp.train.telemetry.event_log import Journal
from segapp.train.telemetry.sample_images import SamplePictures
from segapp.train.trainer import Trainer

if TYPE_CHECKING:
    from segapp.build.trained import TrainedState


def seed_everything(seed: int) -> None:
    """Seeds Python's, numpy's and torch's global generators (weights, dropout)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_scheme(data: DataConfig) -> ClassScheme:
    """Classes, colours and label map of a data section."""
    return class_scheme(
        data.format,
        classes=data.classes,
        palette=data.palette,
        label_map=data.label_map,
        ignore_index=data.ignore_index,
        rgb=data.rgb_masks,
    )


def build_pairs(data: DataConfig, split: str) -> tuple[ImagePair, ...]:
    """The image and mask files of one split."""
    return find_pairs(
        data.format,
        data.root,
        split,
        image_dir=data.image_dir,
        mask_dir=data.mask_dir,
        image_suffix=data.image_suffix,
        mask_suffix=data.mask_suffix,
        allow_outside_root=data.allow_outside_root,
    )


def build_groups(data: DataConfig, scheme: ClassScheme) -> dict[str, tuple[int, ...]]:
    """Name -> class ids of the groups that are scored too: those of the config, or the format's; empty without.

    Raises:
        ConfigError: a group names a class that there is not.
    """
    groups: Mapping[str, Sequence[str]] = data.groups or {}
    if data.groups is None and data.format == "cityscapes" and scheme.names == CITYSCAPES_NAMES:
        groups = CITYSCAPES_CATEGORIES
    ids = {name: number for number, name in enumerate(scheme.names)}
    for group, names in groups.items():
        unknown = [name for name in names if name not in ids]
        if unknown:
            raise ConfigError(f"data.groups: {group} names {unknown[0]!r}, which is no class: use {', '.join(ids)}")
    return {group: tuple(ids[name] for name in names) for group, names in groups.items()}


def build_dataset(
    data: DataConfig, scheme: ClassScheme, split: str, *, is_training: bool, seed: int, most: int | None = None
) -> SegmentationDataset:
    """The images and masks of one split, cheaply checked, with the training or the evaluation transform.

    Args:
        data: where they are, and how they are read.
        scheme: of the classes.
        split: its name.
        is_training: with the training transform.
        seed: of the augmentation.
        most: only so many, spread over the split; None: all.
    """
    pairs = build_pairs(data, split)
    if most is not None:
        pairs = pairs[:: max(1, len(pairs) // max(most, 1))][:most]
    check_masks(pairs, check_pairs(pairs), scheme)
    transform: TrainTransform | EvalTransform | None = None
    if is_training:
        transform = TrainTransform(
            data.crop_px,
            scale=data.scale,
            hflip=data.hflip,
            cat_max_ratio=data.cat_max_ratio,
            photometric=data.photometric,
            ignore_index=scheme.ignore_index,
            resize_px=data.resize_px,
        )
    elif data.resize_px is not None:
        transform = EvalTransform(data.resize_px)
    return SegmentationDataset(pairs, scheme, transform, seed=seed, cache=data.cache)


def split_names(data: DataConfig) -> tuple[str, str]:
    """Names of the training and the validation split."""
    return data.train_split or "train", data.val_split or "val"


def build_network(section: ModelConfig, num_classes: int, *, with_weights: bool = True) -> SegmentationModel:
    """The model of a config; without its pretrained weights where a checkpoint follows."""
    return build_model(
        section.library,
        section.name,
        num_classes,
        weights=section.weights if with_weights else None,
        weights_backbone=section.weights_backbone if with_weights else None,
        aux=section.aux,
        encoder=section.encoder,
        options=section.options,
    )


def build_criterion(
    section: LossConfig, num_classes: int, ignore_index: int, weights_of: Callable[[str], list[float]]
) -> AdditiveCriterion:
    """The criterion of a loss section.

    Args:
        section: the first term and those added to it.
        num_classes: C.
        ignore_index: target value that counts nowhere.
        weights_of: gives class weights by a rule's name.
    """
    terms = [section, *section.plus]
    criteria = [(term.weight, _build_term(term, num_classes, ignore_index, weights_of)) for term in terms]
    return criteria[0][1] if len(criteria) == 1 and criteria[0][0] == 1.0 else CriterionSum(criteria)


def _build_term(
    term: LossTerm, num_classes: int, ignore_index: int, weights_of: Callable[[str], list[float]]
) -> AdditiveCriterion:
    weights = term.class_weights
    if isinstance(weights, str):
        weights = weights_of(weights)
    if weights is not None and len(weights) != num_classes:
        raise ConfigError(f"loss.class_weights has {len(weights)} values for {num_classes} classes: give one a class")
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float32)
    common: dict[str, Any] = {
        "ignore_index": ignore_index,
        "align_corners": term.align_corners,
        "aux_weight": term.aux_weight,
    }
    if term.name == "ohem":
        return CriterionOHEM(term.ohem_threshold, term.ohem_min_kept, weight=weight, **common)
    if term.name == "dice":
        return CriterionDice(term.dice_smooth, **common)
    if term.name == "focal":
        return CriterionFocal(term.focal_gamma, alpha=weight, **common)
    if term.name == "lovasz":
        return CriterionLovasz(**common)
    return CriterionCE(
        weight=weight, label_smoothing=term.label_smoothing, implementation=term.implementation, **common
    )


def build_inference(
    data: DataConfig, section: EvalConfig, model: SegmentationModel, precision: Precision, align_corners: bool
) -> Inference:
    """How whole images are evaluated and predicted."""
    window = (section.slide_px or data.crop_px) if section.slide else None
    if model.fixed_size_px is not None:
        window = model.fixed_size_px
    return Inference(
        Normalizer(data.mean, data.std, precision.input_dtype).to(precision.device),
        align_corners=align_corners,
        window_px=window,
        overlap=section.slide_overlap,
        weighting=section.slide_weighting,
        scales=tuple(section.scales) if section.tta else (1.0,),
        flip=section.tta,
        autocast=precision.autocast,
    )


def check_sizes(config: RunConfig, model: SegmentationModel) -> None:
    """Refuses crops and batches that the model cannot take.

    Raises:
        ConfigError: names the size that would do.
    """
    height, width = config.data.crop_px
    wanted = model.suitable_size(height, width)
    if wanted != (height, width):
        raise ConfigError(
            f"data.crop_px = [{height}, {width}] does not suit {config.model.name}: use [{wanted[0]}, {wanted[1]}]"
        )
    if config.train.batch_size < model.min_train_batch:
        raise ConfigError(
            f"train.batch_size = {config.train.batch_size} is too small for {config.model.name}: its BatchNorm after "
            f"global pooling needs at least {model.min_train_batch} images"
        )


def build_trainer(
    config: RunConfig,
    *,
    store: CheckpointStore,
    journal: Journal,
    signals: StopSignals,
    devices: DevicePlan,
    ranks: Ranks | None = None,
    with_weights: bool = True,
    inbox: Inbox | None = None,
    watch: MemoryWatch | None = None,
    folder: RunFolder | None = None,
    outlook: Outlook | None = None,
    advise: Callable[[], Sequence[str]] = tuple,
    limit: ImageLimit | None = None,
    teacher: TrainedState | None = None,
) -> Trainer:
    """Everything a training needs, from its config.

    Args:
        config: the complete config.
        store: of the run folder.
        journal: of the run folder.
        signals: asks for a stop.
        devices: which devices, in which mode; in ddp this rank's own.
        ranks: the processes that train together.
        with_weights: load pretrained weights; not needed where a checkpoint follows.
        inbox: where commands come from; None: from nowhere.
        watch: is told what the training does.
        folder: for sample pictures and reports; None: there are none.
        outlook: the memory plan that the run began with.
        advise: says what would need less memory, the best first.
        limit: use only so many images; None: all.
        teacher: of `distill`; needed where the config has that section.

    Raises:
        ConfigError: a section does not fit the data, the model or this machine.
        DataError: the data cannot be used.
        CheckpointError: a weights file cannot be used.
    """
    ranks, device, watch = ranks or Ranks(), devices.devices[0], watch or MemoryWatch()
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
    gpu0_bsz = first_gpu0_bsz(config, outlook)
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
        build_optimizer(config.optim, build_parameter_groups(config, model, precision)),
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
    steering = build_steering(config, devices, engine, inbox or Inbox(None, journal), journal, watch, gpu0_bsz)
    steering.knob.outlook = outlook
    inference = build_inference(data, config.eval, model, precision, config.loss.align_corners)
    torch.manual_seed(config.seed + ranks.rank)  # every rank drops out other pixels
    return Trainer(
        config,
        engine,
        TrainLoader(
            train_set,
            train.batch_size,
            seed=config.seed,
            workers=data.workers,
            timeout_s=data.timeout_s,
            pin_memory=device.type == "cuda",
            rank=ranks.rank,
            world_size=ranks.world_size,
        ),
        EvalLoader(
            val_set,
            workers=data.workers,
            timeout_s=data.timeout_s,
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
                for each in watch.places
            ]
            or [str(device) for theirs in ranks.gather(devices.devices) for device in theirs],
            "num_train": len(train_set),
            "num_val": len(val_set),
        },
        store=store,
        journal=journal,
        signals=signals,
        steering=steering,
        rescue=Rescue(journal, watch, None if folder is None else folder.reports, advise, rank=ranks.rank),
        samples=None
        if folder is None or not ranks.is_main
        else SamplePictures(folder.samples, val_set, inference, device),
        budget=build_budget(config.parallel, devices.devices, engine, watch),
    )


def first_gpu0_bsz(config: RunConfig, outlook: Outlook | None) -> int | None:
    """`gpu0_bsz` of the first epoch: as the config says, or where it says `auto`, of the plan."""
    wish = config.parallel.gpu0_bsz
    if wish == "auto":
        return None if outlook is None else outlook.gpu0_bsz
    return wish


def build_steering(
    config: RunConfig,
    devices: DevicePlan,
    engine: StepEngine,
    inbox: Inbox,
    journal: Journal,
    watch: MemoryWatch,
    gpu0_bsz: int | None,
) -> Steering:
    """What takes commands, with the settings that the config begins with."""
    parallel = config.parallel
    knob = SplitKnob(engine.network, config.train.batch_size, devices.mode, engine.smallest_chunk)
    settings = LiveSettings(gpu0_bsz=gpu0_bsz, gpu0_bsz_auto=parallel.gpu0_bsz == "auto", shares=parallel.shares)
    return Steering(inbox, journal, knob, watch, settings)


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


def set_batchnorm_momentum(model: nn.Module, momentum: float | None) -> None:
    """Sets the momentum of every BatchNorm layer; None leaves them as they are."""
    if momentum is not None:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = momentum


def build_parameter_groups(
    config: RunConfig, model: SegmentationModel, precision: Precision
) -> list[Mapping[str, Any]]:
    """The optimizer's groups: backbone and head, with and without weight decay, as `precision`'s master weights."""
    no_decay = set() if config.optim.decay_norm_and_bias else norm_and_bias(model)
    groups = parameter_groups(
        model.backbone_parameters(),
        model.head_parameters(),
        no_decay,
        weight_decay=config.optim.weight_decay,
        head_lr_factor=config.optim.head_lr_factor,
    )
    return [{**group, "params": precision.master_weights(group["params"])} for group in groups]


def _frequencies(dataset: SegmentationDataset, scheme: ClassScheme) -> ClassFrequencies:
    masks = [pair.mask for pair in dataset.pairs if pair.mask is not None]
    return cached_frequencies(masks, repr(dataclasses.astuple(scheme)), lambda: compute_class_frequencies(dataset))
