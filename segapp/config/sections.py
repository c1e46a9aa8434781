"""The sections of a config file as frozen models, and the settings that may change during a run. No torch.

The docstring of a field is its documentation: the JSON schema and the README's reference are generated from it.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer


class Section(BaseModel):
    """A frozen section of the config that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the section class of a field, optional or not; None if the field holds a value."""
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
"""The value of `train.batch_size: auto` until the training resolves it."""

MAX_BATCH = 2**16
"""Upper limit of `train.batch_size`; more is taken for a typing error."""


def _auto_as_number(value: object) -> object:
    if value == "auto":
        return AUTO_BATCH
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not 1 <= value <= MAX_BATCH:
        raise ValueError(f"a whole number from 1 to {MAX_BATCH} is expected, or auto")
    return _no_bool(value)


BatchSize = Annotated[
    int,
    BeforeValidator(
        _auto_as_number, json_schema_input_type=Annotated[int, Field(ge=1, le=MAX_BATCH)] | Literal["auto"]
    ),
    PlainSerializer(lambda value: "auto" if value == AUTO_BATCH else value, return_type=int | str),
]


MAX_WORKERS = 512
"""Upper limit of `data.workers`; more is taken for a typing error."""


def _check_workers(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "auto" and not (is_number and value in range(MAX_WORKERS + 1)):
        raise ValueError(f"a whole number from 0 to {MAX_WORKERS} is expected, or auto")
    return value


Workers = Annotated[
    Annotated[int, Field(ge=0, le=MAX_WORKERS)] | Literal["auto"],
    BeforeValidator(_check_workers),
]


class DataConfig(Section):
    """`data:` the data set, its augmentation and its loading."""

    format: Literal["cityscapes", "camvid", "voc", "ade20k", "folder", "list"]
    """Layout of the files on disk."""
    root: str
    """Folder of the data set, relative to the current folder."""
    train_split: str | None = None
    """Split used for training; null: train."""
    val_split: str | None = None
    """Split used for evaluation; null: val."""
    crop_px: HeightWidth = (512, 512)
    """Height and width of a training crop, in pixels."""
    resize_px: HeightWidth | None = None
    """Resize every image and mask to this height and width first (training and evaluation); null: as on disk."""
    scale: tuple[PositiveFloat, PositiveFloat] = (0.5, 2.0)
    """Range of the random scale before the crop."""
    hflip: Fraction = 0.5
    """Probability of a horizontal flip."""
    cat_max_ratio: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=1)] = 0.75
    """A crop in which one class has more than this share of the pixels is drawn again, at most ten times."""
    photometric: bool | NonNegativeFloat = True
    """Jitter of brightness, contrast, saturation and hue: true, false, or a strength (1.0 is the same as true)."""
    mean: tuple[Number, Number, Number] = (0.485, 0.456, 0.406)
    """Mean subtracted in normalisation, RGB in 0..1; default: ImageNet's."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.229, 0.224, 0.225)
    """Standard deviation divided by in normalisation, RGB in 0..1; default: ImageNet's."""
    classes: list[str] | None = None
    """Class names in the order of their ids; required by the formats folder and list."""
    palette: list[tuple[Byte, Byte, Byte]] | None = None
    """RGB colour of each class, for pictures and for RGB masks; further colours of RGB masks are ignored pixels."""
    rgb_masks: bool = False
    """Masks are RGB images with the colours of data.palette."""
    groups: dict[str, list[str]] | None = None
    """Group name -> classes, for which evaluation reports an IoU of the group too; null: as the format defines them."""
    label_map: dict[int, int] | None = None
    """Value in the mask file -> class id; other values must be class ids or ignore_index."""
    ignore_index: int | None = None
    """Class id of pixels excluded from loss and metrics; null: as the format defines it, usually 255."""
    image_dir: str | None = None
    """Folder of the images below root (folder); null: images."""
    mask_dir: str | None = None
    """Folder of the masks below root (folder); null: masks."""
    image_suffix: str | None = None
    """End of the image file names, replaced by mask_suffix to find the mask; null: any image extension."""
    mask_suffix: str | None = None
    """End of the mask file names, e.g. "_mask.png"; null: .png."""
    list_dir: str | None = None
    """Folder of the files that list the splits (list), relative to the current folder; null: root."""
    mask_root: str | None = None
    """Folder that masks are listed relative to (list), relative to the current folder; null: root."""
    allow_overlap: bool = False
    """Accept images that are in the training and in the validation split, to overfit on purpose."""
    allow_outside_root: bool = False
    """Accept files outside root, reached by links or named in a list file; root itself may be a link in any case."""
    workers: Workers = "auto"
    """Data loading processes of each rank; auto: by processors and the measured cost of a sample; 0: none."""
    cache: Literal["none", "ram", "disk"] = "none"
    """Keep decoded images and masks from their first read on, for all workers and ranks: ram, or disk (cache_dir)."""
    cache_dir: str | None = None
    """Folder of data.cache = disk, on a local disk outside data.root; null: $XDG_CACHE_HOME/segapp/pixels."""
    timeout_s: NonNegativeFloat = 120.0
    """Seconds to wait for a data worker before the run fails; 0: no limit."""


class ModelConfig(Section):
    """`model:` the network."""

    library: Literal["torchvision", "smp"] = "torchvision"
    """torchvision.models.segmentation, or segmentation_models_pytorch."""
    name: str = "deeplabv3_resnet50"
    """Name of the model in its library."""
    encoder: str | None = None
    """Encoder of an smp model, e.g. resnet34."""
    weights: str | None = None
    """Initial weights of the whole model: name of a torchvision weights enum, or a file; null: random."""
    weights_backbone: str | None = None
    """Initial weights of the backbone: IMAGENET1K_V1 (torchvision), imagenet (smp), or a file; null: random."""
    partial_weights: bool = False
    """Take the tensors of a weights file that match, also of another backbone or of a part of one."""
    aux: bool = True
    """Build the auxiliary head, if the model has one."""
    options: dict[str, Any] = {}
    """Further keyword arguments for the library's constructor."""


class LossTerm(Section):
    """A criterion with its weight in the sum of the terms."""

    name: Literal["ce", "ohem", "dice", "focal", "lovasz"] = "ce"
    """Criterion: cross-entropy, cross-entropy of hard pixels (ohem), Dice, focal, or Lovász-softmax."""
    weight: NonNegativeFloat = 1.0
    """Weight of this term in the sum."""
    align_corners: bool = True
    """align_corners of the bilinear upsampling of the logits; evaluation uses the first term's."""
    aux_weight: NonNegativeFloat = 0.4
    """Weight of the auxiliary head's loss."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target probability spread evenly over all classes (ce)."""
    implementation: Literal["auto", "compiled", "reference"] = "auto"
    """auto: fused, Triton on GPUs; compiled: fused by torch.compile (CPU); reference: full-resolution logits (ce)."""
    class_weights: list[NonNegativeFloat] | Literal["inverse", "enet", "median-frequency"] | None = None
    """Weight of each class, or a rule that computes them from the training masks (ce, ohem, focal)."""
    ohem_threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    """A pixel is hard if the probability of its target class is below this (ohem)."""
    ohem_min_kept: Count = 100_000
    """Smallest number of valid pixels of a step that contribute (ohem)."""
    focal_gamma: NonNegativeFloat = 2.0
    """Focusing exponent gamma (focal)."""
    dice_smooth: NonNegativeFloat = 1.0
    """Added to numerator and denominator (dice)."""


class LossConfig(LossTerm):
    """`loss:` a criterion, and further ones added to it."""

    plus: list[LossTerm] = []
    """Further terms; the loss is the weighted sum of all."""


class OptimConfig(Section):
    """`optim:` the optimizer."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimizer."""
    lr: PositiveFloat = 0.01
    """Learning rate of the backbone."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum (sgd)."""
    nesterov: bool = False
    """Nesterov momentum (sgd)."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of the first and second moment (adamw)."""
    weight_decay: NonNegativeFloat = 0.0005
    """Weight decay."""
    decay_norm_and_bias: bool = True
    """Apply weight decay to normalisation layers and biases too."""
    head_lr_factor: PositiveFloat = 1.0
    """Factor on the learning rate of the head."""
    clip_grad_norm: PositiveFloat | None = None
    """Largest norm of the total gradient; null: no clipping."""


class ScheduleConfig(Section):
    """`schedule:` the learning rate as a function of the step."""

    name: Literal["poly", "cosine", "step", "constant"] = "poly"
    """Shape of the schedule."""
    power: PositiveFloat = 0.9
    """Exponent of the decay (poly)."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end (poly, cosine)."""
    warmup_steps: Count = 0
    """Number of steps of linear warm-up."""
    warmup_factor: Fraction = 0.001
    """Factor on the learning rate at the first warm-up step."""
    step_epochs: list[PositiveInt] = []
    """Epochs after which the learning rate is multiplied by gamma (step)."""
    gamma: PositiveFloat = 0.1
    """Factor at each of step_epochs (step)."""


class TrainConfig(Section):
    """`train:` duration, batch size, precision and stability."""

    epochs: PositiveInt = 100
    """Number of passes over the training set."""
    batch_size: BatchSize = 8
    """Images of a micro-batch over all devices; auto: the largest predicted to fit, for training and evaluation."""
    accumulate: PositiveInt = 1
    """Micro-batches per step: a step processes batch_size x accumulate images."""
    effective_batch_size: PositiveInt | None = None
    """Images per step, a multiple of batch_size: sets accumulate to effective_batch_size / batch_size; null: unused."""
    precision: Literal["auto", "fp32", "fp16", "amp-fp16", "amp-bf16"] = "fp32"
    """fp16: half weights, fp32 masters; amp-*: autocast; auto: amp-bf16, or what the device of the first start has."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of the exponential moving average of the weights, which evaluation uses; null: no average."""
    bn_momentum: Annotated[float, Field(gt=0, le=1)] | None = None
    """Momentum of all BatchNorm layers; null: the model's own, usually 0.1."""
    precise_bn: Count = 0
    """Micro-batches from which BatchNorm statistics are recomputed before each evaluation; 0: keep the running ones."""
    max_bad_steps: PositiveInt = 10
    """The run fails after this many consecutive steps with a non-finite loss or gradient."""
    hang_timeout_s: NonNegativeFloat = 600.0
    """Seconds without progress after which the run fails, with all stacks in RUN/stacks.log; 0: never."""
    early_stop: PositiveInt | None = None
    """Stop after this many evaluations without improvement of checkpoint.monitor; null: never."""
    channels_last: bool | Literal["auto"] = "auto"
    """Memory format NHWC; auto: on GPUs, for convolutional networks in half precision or TF32."""
    compile: bool = False
    """Compile the network's forward and backward pass with torch.compile; not with dp, model or distill."""
    keep_freed_memory: bool = True
    """On the CPU, keep freed memory for reuse (glibc only): fewer page faults, a slightly higher peak."""
    cudnn_benchmark: bool = True
    """Let cuDNN benchmark its algorithms for each shape of a training; never in an evaluation."""
    deterministic: bool = False
    """On GPUs, use algorithms that repeat their results bit for bit only; slower, without cudnn_benchmark."""
    tf32: bool = True
    """On GPUs, float32 convolutions and matrix products round their inputs to TF32; false: full float32, slower."""


class ParallelConfig(Section):
    """`parallel:` the devices, and how a batch is divided among them."""

    mode: Literal["auto", "single", "dp", "ddp", "model"] = "auto"
    """auto: one process per GPU (ddp) on several GPUs, dp if gpu0_bsz or shares is set, single on one device."""
    devices: str | list[int | str] = "auto"
    """auto, one device ("cuda:1"), or a list ([0, 1], [cpu, cpu])."""
    gpu0_bsz: Count | Literal["auto"] | None = None
    """Images of a batch on the first device (dp, ddp); null: even split; 0: weights only; auto: balanced by memory."""
    shares: list[Count] | None = None
    """Images of a full batch on each device (dp, ddp), for GPUs of different size; null: gpu0_bsz applies."""
    stages: dict[str, int | str] | None = None
    """Module -> device (model), e.g. {backbone: cuda:0, classifier: cuda:1}; null: balanced by memory."""
    memory_budget_mib: list[PositiveFloat] | None = None
    """Limit of tensor memory in MiB for each device (ddp: rank), also on the CPU; null: no limit."""
    sync_bn: bool = True
    """Synchronise BatchNorm statistics over devices (dp, ddp)."""
    gradient_as_bucket_view: bool = True
    """Gradients are views into DDP's buckets, which saves their memory (ddp)."""

    @property
    def has_split(self) -> bool:
        """True if the batch is to be divided in a certain way, for which `auto` takes dp."""
        return self.gpu0_bsz is not None or self.shares is not None


class EvalConfig(Section):
    """`eval:` when and how the model is evaluated."""

    every_epochs: PositiveInt = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    batch_size: PositiveInt = 1
    """Images evaluated at once, if they have the same size."""
    slide: bool = False
    """Sliding window instead of the whole image."""
    slide_px: HeightWidth | None = None
    """Height and width of the window, in pixels; null: data.crop_px."""
    slide_overlap: Annotated[float, Field(ge=0, lt=1)] = 1 / 3
    """Overlap of neighbouring windows, as a share of the window."""
    slide_weighting: Literal["uniform", "gaussian"] = "uniform"
    """Weight of a window where windows overlap: uniform, or largest at its centre (gaussian)."""
    tta: bool = False
    """Test-time augmentation: average over a horizontal flip and eval.scales."""
    scales: list[PositiveFloat] = [0.75, 1.0, 1.25]
    """Image scales of test-time augmentation."""


class CheckpointConfig(Section):
    """`checkpoint:` when checkpoints are saved and which are kept."""

    every_epochs: PositiveInt | None = 1
    """Epochs between checkpoints; null: not by epochs."""
    every_steps: PositiveInt | None = None
    """Steps between checkpoints; null: not by steps."""
    every_minutes: PositiveFloat | None = None
    """Minutes between checkpoints; null: not by time."""
    keep: Count = 3
    """Number of epoch_*.pt files kept, besides last.pt and best.pt."""
    grace_s: PositiveFloat = 30.0
    """Seconds between SIGTERM and SIGKILL (SLURM, Kubernetes: 30); a save that takes longer raises an alert."""
    monitor: Literal["miou", "loss", "pixel_accuracy"] = "miou"
    """Evaluation result that selects best.pt."""


class LogConfig(Section):
    """`log:` what is recorded during training."""

    every_steps: PositiveInt = 10
    """Steps between `step` events."""
    tensorboard: bool = True
    """Write scalars, memory, sample images and settings for TensorBoard into the run folder."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Weights & Biases project; needs the package wandb (WANDB_MODE=offline: no upload); null: off."""
    mlflow: Annotated[str, Field(min_length=1)] | None = None
    """MLflow tracking URI, e.g. sqlite:///mlflow.db; needs the package mlflow-skinny or mlflow; null: off."""


class CriticConfig(Section):
    """`distill.critic:` the network that scores prediction maps in the holistic term, and its training."""

    penalty: Literal["wgan-gp", "wgan-lp", "dragan"] = "wgan-gp"
    """Gradient penalty."""
    penalty_weight: NonNegativeFloat = 10.0
    """Weight of the gradient penalty."""
    width: PositiveInt = 64
    """Channels of the first stage."""
    batchnorm: bool = True
    """Normalise the input over the whole batch."""
    lr: PositiveFloat = 0.0004
    """Initial learning rate (Adam); it follows the schedule."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """Decay rates of the first and second moment (Adam)."""


class DistillConfig(Section):
    """`distill:` knowledge distillation from a trained model; modes single, dp and ddp."""

    teacher: Annotated[str, Field(min_length=1)]
    """Teacher with the same classes: a run (name or folder; its best checkpoint is used) or a checkpoint file."""
    pixel_wise: NonNegativeFloat = 10.0
    """Weight of the KL divergence between the class probabilities of each pixel; 0: off."""
    temperature: PositiveFloat = 1.0
    """Temperature by which the logits are divided in the pixel-wise term."""
    pair_wise: NonNegativeFloat = 10.0
    """Weight of the squared difference between the similarities of pairs of image regions; 0: off."""
    pair_grid: HeightWidth = (8, 8)
    """Number of regions along height and width, for the pair-wise term."""
    holistic: NonNegativeFloat = 0.1
    """Weight of the critic's score of whole prediction maps (adversarial term); 0: off."""
    critic: CriticConfig = CriticConfig()
    """The critic of the holistic term."""


class RunConfig(Section):
    """The complete config, fixed for a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the run folder: letters, digits, dot, underscore, hyphen."""
    seed: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, lt=2**31)] = 0
    """Random seed of initial weights, sample order and augmentation."""
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
    """Knowledge distillation; null: off."""


class LiveSettings(BaseModel):
    """Settings that commands may change during a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu0_bsz: int | None = None
    gpu0_bsz_auto: bool = False
    """True if `gpu0_bsz` follows the measured memory."""
    shares: list[int] | None = None
    lr_factor: float = 1.0
