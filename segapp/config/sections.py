"""The sections of a config file as frozen models. No torch here.

A field's docstring is its manual: the JSON schema and the README's reference are made from it. What may change while a
run is going on is not in the config but in `LiveSettings`.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer


class Section(BaseModel):
    """A frozen part of the config; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The section that a field holds, optional or not; None where it holds a value."""
    annotation = model.model_fields[name].annotation
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    for kind in members:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


PositiveInt = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1)]
Byte = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=255)]
HeightWidth = tuple[PositiveInt, PositiveInt]

AUTO_BATCH = 0
"""What `train.batch_size: auto` is until the training settles it."""

MAX_BATCH = 2**16
"""More than any device holds: a slip of the finger."""


def _auto_as_number(value: object) -> object:
    if value == "auto":
        return AUTO_BATCH
    if isinstance(value, int) and not isinstance(value, bool) and not 1 <= value <= MAX_BATCH:
        raise ValueError(f"a whole number from 1 to {MAX_BATCH} is expected, or auto")
    return _no_bool(value)


BatchSize = Annotated[
    int,
    BeforeValidator(
        _auto_as_number, json_schema_input_type=Annotated[int, Field(ge=1, le=MAX_BATCH)] | Literal["auto"]
    ),
    PlainSerializer(lambda value: "auto" if value == AUTO_BATCH else value, return_type=int | str),
]


class DataConfig(Section):
    """`data:` where images and masks lie and what happens to them before the model."""

    format: Literal["cityscapes", "camvid", "voc", "ade20k", "folder", "list"]
    """Layout on disk."""
    root: str
    """Folder of the data set, relative to where segapp is started."""
    train_split: str | None = None
    """Split to train on; null: train."""
    val_split: str | None = None
    """Split to evaluate on; null: val."""
    crop_px: HeightWidth = (512, 512)
    """Height and width of a training crop, pixels."""
    resize_px: HeightWidth | None = None
    """Resize every image and mask to this height and width first (training and evaluation); null: as on disk."""
    scale: tuple[PositiveFloat, PositiveFloat] = (0.5, 2.0)
    """Range of the random scale before the crop."""
    hflip: Fraction = 0.5
    """Probability of a horizontal flip."""
    cat_max_ratio: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=1)] = 0.75
    """Crops filled by one class beyond this share are drawn again, up to ten times."""
    photometric: bool | NonNegativeFloat = True
    """Brightness, contrast, saturation and hue jitter: true, false, or a strength (1.0 is true)."""
    mean: tuple[Number, Number, Number] = (0.485, 0.456, 0.406)
    """Mean of the normalisation, RGB in 0..1 (ImageNet's by default)."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.229, 0.224, 0.225)
    """Standard deviation of the normalisation, RGB in 0..1."""
    classes: list[str] | None = None
    """Class names in the order of their ids; needed by `folder` and `list`."""
    palette: list[tuple[Byte, Byte, Byte]] | None = None
    """One RGB colour a class, for pictures and for RGB masks."""
    rgb_masks: bool = False
    """Masks are RGB pictures whose colours stand in `palette`."""
    groups: dict[str, list[str]] | None = None
    """Name -> classes whose joint IoU evaluation gives too; null: the format's (the categories of Cityscapes)."""
    label_map: dict[int, int] | None = None
    """Value in the mask file -> class id; values not listed must be class ids or ignore_index."""
    ignore_index: int | None = None
    """Class id of pixels that count nowhere; null: the format's (255 as a rule)."""
    image_dir: str | None = None
    """Folder of the images below root (`folder`); null: images."""
    mask_dir: str | None = None
    """Folder of the masks below root (`folder`); null: masks."""
    image_suffix: str | None = None
    """Ending of image names, cut off to find the mask; null: any image extension."""
    mask_suffix: str | None = None
    """Ending of mask names, e.g. "_mask.png"; null: .png."""
    allow_outside_root: bool = False
    """Take files that lie outside root too: linked from it, or named by a `list` file. root itself may be a link."""
    workers: Annotated[Count, Field(le=512)] = 4
    """Processes that load data; 0 loads in the trainer itself."""
    cache: Literal["none", "ram"] = "none"
    """ram keeps decoded images and masks in memory."""
    timeout_s: NonNegativeFloat = 120.0
    """Seconds to wait for a data worker before the run stops; 0 waits for ever."""


class ModelConfig(Section):
    """`model:` which network."""

    library: Literal["torchvision", "smp"] = "torchvision"
    """torchvision.models.segmentation, or segmentation_models_pytorch."""
    name: str = "deeplabv3_resnet50"
    """Name of the model in its library."""
    encoder: str | None = None
    """Encoder of an smp model, e.g. resnet34."""
    weights: str | None = None
    """Weights of the whole model: torchvision's enum name or a local file."""
    weights_backbone: str | None = None
    """Weights of the backbone: torchvision's enum name (IMAGENET1K_V1) or a local file."""
    aux: bool = True
    """Build the auxiliary head where the family has one."""
    options: dict[str, Any] = {}
    """Further keyword arguments of the library's constructor."""


class LossTerm(Section):
    """A criterion and its weight in the sum."""

    name: Literal["ce", "ohem", "dice", "focal", "lovasz"] = "ce"
    """Which criterion."""
    weight: NonNegativeFloat = 1.0
    """Factor of this term in the sum."""
    align_corners: bool = True
    """Of the bilinear upsampling from logits to target; evaluation uses the first term's."""
    aux_weight: NonNegativeFloat = 0.4
    """Factor of the auxiliary head's loss."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target spread over all classes (ce)."""
    implementation: Literal["auto", "compiled", "reference"] = "auto"
    """auto: bands or Triton; compiled: bands through torch.compile, on the CPU; reference: at full resolution (ce)."""
    class_weights: list[NonNegativeFloat] | Literal["inverse", "enet", "median-frequency"] | None = None
    """One weight a class, or a rule that computes them from the training masks (ce, ohem, focal)."""
    ohem_threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Pixels whose target probability is below this are hard (ohem)."""
    ohem_min_kept: Count = 100_000
    """At least this many valid pixels of a step are kept (ohem)."""
    focal_gamma: NonNegativeFloat = 2.0
    """Focusing exponent (focal)."""
    dice_smooth: NonNegativeFloat = 1.0
    """Added to numerator and denominator (dice)."""


class LossConfig(LossTerm):
    """`loss:` a criterion, and others added to it."""

    plus: list[LossTerm] = []
    """Further criteria; the loss is the weighted sum."""


class OptimConfig(Section):
    """`optim:` the optimizer."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Which optimizer."""
    lr: PositiveFloat = 0.01
    """Learning rate of the backbone."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum (sgd)."""
    nesterov: bool = False
    """Nesterov momentum (sgd)."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Moment decay (adamw)."""
    weight_decay: NonNegativeFloat = 0.0005
    """Weight decay."""
    decay_norm_and_bias: bool = True
    """Apply weight decay to normalisation weights and biases too."""
    head_lr_factor: PositiveFloat = 1.0
    """The head learns at lr times this."""
    clip_grad_norm: PositiveFloat | None = None
    """Largest norm of the whole gradient; null: no clipping."""


class ScheduleConfig(Section):
    """`schedule:` the learning rate as a function of the step."""

    name: Literal["poly", "cosine", "step", "constant"] = "poly"
    """Shape."""
    power: PositiveFloat = 0.9
    """Exponent (poly)."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end (poly, cosine)."""
    warmup_steps: Count = 0
    """Steps of linear warm-up."""
    warmup_factor: Fraction = 0.001
    """Share of lr at the first warm-up step."""
    step_epochs: list[PositiveInt] = []
    """Epochs after which lr is multiplied by gamma (step)."""
    gamma: PositiveFloat = 0.1
    """Factor (step)."""


class TrainConfig(Section):
    """`train:` how long, how much at a time, in which precision."""

    epochs: PositiveInt = 100
    """Passes over the training set."""
    batch_size: BatchSize = 8
    """Images a micro-batch, over all devices; auto: the largest that is safe, for training and evaluation."""
    accumulate: PositiveInt = 1
    """Micro-batches a step; a step sees batch_size x accumulate images."""
    effective_batch_size: PositiveInt | None = None
    """Images a step: accumulate becomes this over batch_size, which must divide it; null: accumulate holds."""
    precision: Literal["fp32", "fp16", "amp-fp16", "amp-bf16"] = "fp32"
    """fp16 is half weights with fp32 BatchNorm, master weights and loss scaling; amp-* is autocast."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, used in evaluation; null: none."""
    bn_momentum: Annotated[float, Field(gt=0, le=1)] | None = None
    """Momentum of all BatchNorm layers; null: the model's (0.1 as a rule)."""
    precise_bn: Count = 0
    """Micro-batches to recompute BatchNorm statistics from before each evaluation; 0: use the running ones."""
    max_bad_steps: PositiveInt = 10
    """Stop after this many steps in a row without a finite loss and gradient."""
    hang_timeout_s: NonNegativeFloat = 600.0
    """Seconds without progress after which a training ends, with all stacks in RUN/stacks.log; 0: never."""
    early_stop: PositiveInt | None = None
    """Stop after this many evaluations without a better monitored value; null: never."""
    channels_last: bool = False
    """Memory format NHWC."""
    keep_freed_memory: bool = True
    """Training on the CPU keeps freed memory (glibc only): fewer page faults, a slightly higher peak."""
    cudnn_benchmark: bool = True
    """Let cuDNN try its algorithms for the crop size."""


class ParallelConfig(Section):
    """`parallel:` which devices, and how a batch is divided."""

    mode: Literal["auto", "single", "dp", "ddp", "model"] = "auto"
    """auto: ddp under torchrun, dp on several GPUs, single otherwise."""
    devices: str | list[int | str] = "auto"
    """auto, one device ("cuda:1"), or a list ([0, 1], [cpu, cpu])."""
    gpu0_bsz: Count | Literal["auto"] | None = None
    """Images of a batch on the first device (dp); null: evenly; 0: the weights only; auto: balanced by memory."""
    shares: list[Count] | None = None
    """Images of a full batch on each device (dp), for mixed cards; null: gpu0_bsz decides."""
    stages: dict[str, int | str] | None = None
    """Part of the model -> device (model), e.g. {backbone: cuda:0, classifier: cuda:1}; null: balanced by memory."""
    memory_budget_mib: list[PositiveFloat] | None = None
    """MiB of tensors that each device (ddp: each rank) may hold, on the CPU too; null: all that it has."""
    sync_bn: bool = True
    """Synchronise BatchNorm over devices (dp, ddp)."""
    gradient_as_bucket_view: bool = True
    """Gradients share the memory of DDP's buckets."""


class EvalConfig(Section):
    """`eval:` when and how the model is evaluated."""

    every_epochs: PositiveInt = 1
    """Evaluate after every so many epochs, and after the last."""
    batch_size: PositiveInt = 1
    """Images of equal size evaluated at once."""
    slide: bool = False
    """Sliding window instead of the whole image."""
    slide_px: HeightWidth | None = None
    """Height and width of the window; null: data.crop_px."""
    slide_overlap: Annotated[float, Field(ge=0, lt=1)] = 1 / 3
    """Share of a window that the next one covers again."""
    slide_weighting: Literal["uniform", "gaussian"] = "uniform"
    """How windows count where they overlap: all alike, or most in their middle."""
    tta: bool = False
    """Average over a horizontal flip and `scales`."""
    scales: list[PositiveFloat] = [0.75, 1.0, 1.25]
    """Scales of test-time augmentation."""


class CheckpointConfig(Section):
    """`checkpoint:` when the state is saved and what is kept."""

    every_epochs: PositiveInt | None = 1
    """Save after every so many epochs; null: not by epochs."""
    every_steps: PositiveInt | None = None
    """Save after every so many steps; null: not by steps."""
    every_minutes: PositiveFloat | None = None
    """Save when so many minutes have passed; null: not by time."""
    keep: Count = 3
    """How many epoch_*.pt are kept beside last.pt and best.pt."""
    grace_s: PositiveFloat = 30.0
    """Seconds between SIGTERM and SIGKILL here; a save that takes longer is an alert (SLURM and Kubernetes give 30)."""
    monitor: Literal["miou", "loss", "pixel_accuracy"] = "miou"
    """Which evaluation result decides best.pt."""


class LogConfig(Section):
    """`log:` what is written while training."""

    every_steps: PositiveInt = 10
    """Steps between two `step` events."""
    tensorboard: bool = True
    """Write scalars, memory, sample pictures and settings for TensorBoard into the run folder."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Project of Weights & Biases; needs the package wandb (WANDB_MODE=offline keeps it on this machine)."""
    mlflow: Annotated[str, Field(min_length=1)] | None = None
    """Tracking address of MLflow, e.g. sqlite:///mlflow.db; needs the package mlflow-skinny (or mlflow)."""


class CriticConfig(Section):
    """`distill.critic:` what judges the student's maps in the holistic term, and how it learns."""

    penalty: Literal["wgan-gp", "wgan-lp", "dragan"] = "wgan-gp"
    """Which gradient penalty keeps it smooth."""
    penalty_weight: NonNegativeFloat = 10.0
    """Factor of the penalty."""
    width: PositiveInt = 64
    """Channels of its first stage."""
    batchnorm: bool = True
    """Normalise its input over the whole batch."""
    lr: PositiveFloat = 0.0004
    """Learning rate (Adam) at the start; it follows the schedule."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """Moment decay."""


class DistillConfig(Section):
    """`distill:` learn from a trained model too; modes single, dp and ddp."""

    teacher: Annotated[str, Field(min_length=1)]
    """A run (its name or folder: the best checkpoint) or a checkpoint file, of the same classes."""
    pixel_wise: NonNegativeFloat = 10.0
    """Factor of the divergence of the class probabilities, pixel by pixel; 0: off."""
    temperature: PositiveFloat = 1.0
    """What the logits are divided by for it."""
    pair_wise: NonNegativeFloat = 10.0
    """Factor of the difference in how alike pairs of image regions are; 0: off."""
    pair_grid: HeightWidth = (8, 8)
    """Regions along height and width."""
    holistic: NonNegativeFloat = 0.1
    """Factor of a critic's verdict on whole maps; 0: off."""
    critic: CriticConfig = CriticConfig()
    """What judges whole maps (holistic)."""


class RunConfig(Section):
    """Everything that is fixed for a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the run folder: letters, digits, dot, underscore, hyphen."""
    seed: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, lt=2**31)] = 0
    """Seed of weights, sample order and augmentation."""
    data: DataConfig
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    distill: DistillConfig | None = None
    """Null: nobody is learned from."""


class LiveSettings(BaseModel):
    """What a person may change while a run is going on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu0_bsz: int | None = None
    gpu0_bsz_auto: bool = False
    """Whether `gpu0_bsz` follows the measured memory."""
    shares: list[int] | None = None
    lr_factor: float = 1.0
