"""The sections of a config file as frozen models, in the order of the file, and the settings that may change in a run.

The docstring of a field is its documentation: the JSON schema and the page `config` are generated from it. A field that
has `OnResume` may differ when a run is resumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from segapp.config.options import (
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
    LossName,
    OptimizerName,
    ScheduleName,
    checked_options,
    options_schema,
)
from segapp.config.transforms import Transforms
from segapp.config.values import (
    BatchSize,
    Byte,
    Count,
    Decay,
    Fraction,
    HeightWidth,
    NonNegativeFloat,
    Number,
    OnResume,
    OpenFraction,
    PartName,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    RunName,
    Section,
    Seed,
    Text,
    Workers,
)
from segapp.scores import SCORES

if TYPE_CHECKING:
    ScoreName = str
else:
    ScoreName = Literal[tuple(SCORES)]

MAX_LABELS = 31
"""Most classes of `data.multilabel`: a target holds them as the bits of an int32."""


class MixConfig(Section):
    """`data.mix:` training samples mixed with the sample of another image; at most one of the three ways at once."""

    cutmix: Fraction = 0.0
    """Probability of CutMix: a rectangle of the other image and mask is pasted."""
    mixup: Fraction = 0.0
    """Probability of MixUp: images are blended; each pixel has one of the two classes, drawn by the same weights."""
    classmix: Fraction = 0.0
    """Probability of ClassMix: the pixels of half of the other mask's classes are pasted."""
    mixup_alpha: PositiveFloat = 0.2
    """Parameter of the Beta distribution of MixUp's weight."""


class DataConfig(Section):
    """`data:` the data set, its augmentation and its loading."""

    format: Literal["cityscapes", "camvid", "voc", "ade20k", "folder", "list"] | PartName
    """Layout of the files on disk, or an own part: a class with `__len__` and `image_and_mask(index)`."""
    options: dict[str, Any] = {}
    """Keyword arguments of an own part."""
    root: Annotated[str, OnResume]
    """Folder of the data set, relative to the current folder."""
    train_split: str | None = None
    """Split used for training; null: train."""
    val_split: Annotated[str | None, OnResume] = None
    """Split used for evaluation; null: val."""
    crop_px: HeightWidth = (512, 512)
    """Height and width of a training crop, in pixels."""
    resize_px: HeightWidth | None = None
    """Resize every image and mask to this height and width first (training and evaluation); null: as on disk."""
    scale: tuple[PositiveFloat, PositiveFloat] = (0.5, 2.0)
    """Range of the random scale before the crop."""
    hflip: Fraction = 0.5
    """Probability of a horizontal flip."""
    cat_max_ratio: PositiveFraction = 0.75
    """A crop in which one class has more than this share of the pixels is drawn again, at most ten times."""
    photometric: bool | NonNegativeFloat = True
    """Jitter of brightness, contrast, saturation and hue: true, false, or a strength (1.0 is the same as true)."""
    augment: Transforms = None
    """Transforms in order: a list of names in albumentations or own parts, or a file of A.save; null: crop, flip and
    colors as scale, hflip, cat_max_ratio and photometric say (segapp train --print-config shows that list)."""
    mix: MixConfig = MixConfig()
    """Training samples mixed with the sample of another image."""
    sampling: Literal["uniform", "class-balanced", "foreground"] = "uniform"
    """An epoch has each image once, or crops aimed at all classes equally often, or a share aimed at the foreground."""
    foreground_classes: list[str] | None = None
    """Classes that crops are aimed at, equally often (foreground); null: every class but the first, the background."""
    foreground_share: PositiveFraction = 0.33
    """Share of the crops that are aimed at foreground_classes (foreground)."""
    bands: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Bands of the image files that the network gets, in this order, e.g. [1, 2, 3, 4]; pictures show the first three
    of them as RGB; null: any 8-bit image, as RGB."""
    dtype: Literal["uint8", "uint16", "int16", "float32"] = "uint8"
    """Type of the values in the image files; another type than uint8 needs data.bands and data.value_range."""
    value_range: Annotated[tuple[tuple[Number, Number], ...], Field(min_length=1)] | None = None
    """Lowest and highest value of each band, or one pair for all, which become 0 and 1 before mean and std, as values
    beyond them do; segapp check measures them; null: [[0, 255]]."""
    mean: Annotated[tuple[Number, ...], Field(min_length=1)] = (0.485, 0.456, 0.406)
    """Mean subtracted in normalization, of each band in 0..1; default: ImageNet's for RGB, whose mean any further band
    gets, and every band of fewer than three."""
    std: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (0.229, 0.224, 0.225)
    """Standard deviation divided by in normalization, as data.mean; default: ImageNet's."""
    classes: list[str] | None = None
    """Class names in the order of their ids; required by the formats folder and list."""
    palette: list[tuple[Byte, Byte, Byte]] | None = None
    """RGB color of each class, for pictures and for RGB masks; further colors of RGB masks are ignored pixels."""
    rgb_masks: bool = False
    """Masks are RGB images with the colors of data.palette."""
    multilabel: Literal["files", "channels", "bits"] | None = None
    """A pixel may have several of the classes, or none. Of each class: a mask file ({class} in mask_dir or mask_suffix,
    or a column of a list), a channel (or page of a TIFF), or a bit of the value. One class: binary with one logit."""
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
    list_dir: Annotated[str | None, OnResume] = None
    """Folder of the files that list the splits (list), relative to the current folder; null: root."""
    mask_root: Annotated[str | None, OnResume] = None
    """Folder that masks are listed relative to (list), relative to the current folder; null: root."""
    allow_overlap: Annotated[bool, OnResume] = False
    """Accept images that are in the training and in the validation split, to overfit on purpose."""
    allow_outside_root: Annotated[bool, OnResume] = False
    """Accept files outside root, reached by links or named in a list file; root itself may be a link in any case."""
    workers: Annotated[Workers, OnResume] = "auto"
    """Data loading processes of each rank; auto: by processors and the measured cost of a sample; 0: none."""
    cache: Annotated[Literal["none", "ram", "disk"], OnResume] = "none"
    """Keep decoded images and masks from their first read on, for all workers and ranks: ram, or disk (cache_dir)."""
    cache_dir: Annotated[str | None, OnResume] = None
    """Folder of data.cache = disk, on a local disk outside data.root; null: $XDG_CACHE_HOME/segapp/pixels."""
    timeout_s: Annotated[NonNegativeFloat, OnResume] = 120.0
    """Seconds to wait for a data worker before the run fails; 0: no limit."""

    @property
    def transforms(self) -> list[dict[str, dict[str, Any]]]:
        """`augment`, or the built-in transforms with the numbers of scale, hflip, cat_max_ratio and photometric."""
        if self.augment is not None:
            return self.augment
        crop = {"ScaledCrop": {"scale": list(self.scale), "cat_max_ratio": self.cat_max_ratio}}
        colors = [{"PhotometricChange": {"strength": float(self.photometric)}}] if self.photometric else []
        return [crop, {"HorizontalFlip": {"p": self.hflip}}, *colors]


class AdapterConfig(Section):
    """`model.adapters:` low-rank adapters in a frozen backbone; needs the package peft (`uv sync --extra lora`)."""

    kind: Literal["lora"] = "lora"
    """LoRA: a layer W x becomes W x + (alpha / rank) B A x, of which A and B are trained."""
    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 16.0
    """Factor on the adapters, divided by rank."""
    targets: list[Text] | None = None
    """Layers of the backbone by their names, ends of names (qkv) or patterns; null: those of attention and MLPs."""
    dropout: Decay = 0.0
    """Probability of dropout before the adapters."""


class ModelConfig(Section):
    """`model:` the network."""

    library: Literal["torchvision", "smp", "segapp", "python"] = "torchvision"
    """torchvision.models.segmentation, segmentation_models_pytorch, segapp (eomt), or python: own code."""
    name: str = "deeplabv3_resnet50"
    """Name of the model in its library; with library python an own part: package.module:factory, ./file.py:factory."""
    encoder: str | None = None
    """Encoder of an smp model, e.g. resnet34, or tu- and a model of timm; for eomt a vision transformer of timm."""
    weights: Annotated[str | None, OnResume] = None
    """Initial weights of the whole model: name of a torchvision weights enum, a file, or a run; null: random."""
    weights_backbone: Annotated[str | None, OnResume] = None
    """Initial weights of the backbone: IMAGENET1K_V1 (torchvision), imagenet (smp, eomt), or a file; null: random."""
    partial_weights: Annotated[bool, OnResume] = False
    """Take the tensors of a weights file that match, also of another backbone or of a part of one."""
    freeze: list[Text] = []
    """Parts that are not trained, BatchNorm and dropout in evaluation mode: backbone, or names or patterns of names."""
    freeze_epochs: PositiveInt | None = None
    """Epochs for which model.freeze holds; null: the whole run."""
    adapters: AdapterConfig | None = None
    """Train low-rank adapters instead of the backbone, and the head as a whole; null: train all."""
    aux: bool = True
    """Build the auxiliary head, if the model has one; for eomt: also learn from the queries before each block."""
    options: dict[str, Any] = {}
    """Further keyword arguments for the library's constructor; eomt: num_queries, num_blocks, mask_steps, timm's."""


class LossTerm(Section):
    """A criterion with its weight in the sum of the terms."""

    name: LossName | PartName = "ce"
    """Criterion: (binary) cross-entropy, hard pixels (ohem), overlap, boundary, eomt's, or an own part."""
    options: dict[str, Any] = Field({}, json_schema_extra=options_schema(LOSSES))
    """Options of this criterion alone, or keyword arguments of an own part."""
    weight: NonNegativeFloat = 1.0
    """Weight of this term in the sum."""
    align_corners: bool = True
    """align_corners of the bilinear upsampling of the logits; evaluation uses the first term's."""
    aux_weight: NonNegativeFloat = 0.4
    """Weight of the auxiliary head's loss."""
    label_smoothing: Decay = 0.0
    """Share of the target probability spread evenly over all classes (ce), or over yes and no (bce)."""
    class_weights: list[NonNegativeFloat] | Literal["inverse", "enet", "median-frequency"] | None = None
    """Weight of each class, or a rule that computes them from the training masks (ce, ohem, bce, focal)."""

    _checked = checked_options(LOSSES)


class LossConfig(LossTerm):
    """`loss:` a criterion, and further ones added to it."""

    plus: list[LossTerm] = []
    """Further terms; the loss is the weighted sum of all."""

    def by_key(self) -> dict[str, LossTerm]:
        """Return all terms by their keys: `loss`, `loss.plus.0` and so on."""
        return {"loss": self, **{f"loss.plus.{i}": term for i, term in enumerate(self.plus)}}


class ParamGroupConfig(Section):
    """An entry of `optim.groups`."""

    pattern: Text
    """backbone, or a pattern of names of parameters and modules, e.g. "decoder.*"; the first that matches holds."""
    lr_factor: PositiveFloat | None = None
    """Factor on optim.lr, instead of head_lr_factor, backbone_lr_factor and layer_decay; null: as these say."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay; null: as optim.weight_decay and decay_norm_and_bias say."""


class OptimConfig(Section):
    """`optim:` the optimizer."""

    name: OptimizerName | PartName = "sgd"
    """Optimizer; adam: weight decay as part of the gradient (L2), adamw: beside it; or an own part."""
    options: dict[str, Any] = Field({}, json_schema_extra=options_schema(OPTIMIZERS))
    """Options of this optimizer alone, or keyword arguments of an own part."""
    lr: PositiveFloat = 0.01
    """Learning rate, before the factors of backbone, head and groups."""
    momentum: Decay = 0.9
    """Momentum (sgd)."""
    weight_decay: NonNegativeFloat = 0.0005
    """Weight decay."""
    decay_norm_and_bias: bool = True
    """Apply weight decay to normalization layers and biases too."""
    head_lr_factor: PositiveFloat = 1.0
    """Factor on the learning rate of the head."""
    backbone_lr_factor: PositiveFloat = 1.0
    """Factor on the learning rate of the backbone."""
    layer_decay: PositiveFraction | None = None
    """Factor on the learning rate from each block of a transformer or ConvNeXt backbone to the one before; null: 1."""
    groups: list[ParamGroupConfig] = []
    """Learning-rate factor and weight decay of parameters by pattern, e.g. [{pattern: "decoder.*", lr_factor: 10}]."""
    clip_grad_norm: PositiveFloat | None = None
    """Largest norm of the total gradient; null: no clipping."""

    _checked = checked_options(OPTIMIZERS)


class ScheduleConfig(Section):
    """`schedule:` the learning rate as a function of the step."""

    name: ScheduleName | PartName = "poly"
    """Shape, or an own part; plateau: falls when the evaluations of checkpoint.monitor stop improving; wsd: warm-up,
    stable, decay, which more epochs lengthen without a jump."""
    options: dict[str, Any] = Field({}, json_schema_extra=options_schema(SCHEDULES))
    """Options of this shape alone, or keyword arguments of an own part."""
    power: PositiveFloat = 0.9
    """Exponent of the decay (poly)."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end (poly, cosine, wsd), or the lowest (plateau)."""
    warmup_steps: Count = 0
    """Number of steps of linear warm-up."""
    warmup_factor: Fraction = 0.001
    """Factor on the learning rate at the first warm-up step."""

    _checked = checked_options(SCHEDULES)


class TrainConfig(Section):
    """`train:` duration, batch size, precision and stability."""

    epochs: Annotated[PositiveInt, OnResume] = 100
    """Number of passes over the training set."""
    steps: Annotated[PositiveInt | None, OnResume] = None
    """Number of steps, instead of epochs: the run ends after so many, also within an epoch; null: by epochs."""
    batch_size: BatchSize = 8
    """Images of a micro-batch over all devices; auto: the largest predicted to fit, for training and evaluation."""
    accumulate: PositiveInt = 1
    """Micro-batches per step: a step processes batch_size x accumulate images."""
    effective_batch_size: PositiveInt | None = None
    """Images per step, a multiple of batch_size: sets accumulate to effective_batch_size / batch_size; null: unused."""
    recompute: Annotated[Literal["off", "auto", "all"] | list[Text], OnResume] = "off"
    """Blocks of the network that keep their inputs alone and are computed again in the backward pass: the same result
    in less memory and more time. auto: the cheapest set that fits the GPUs by the memory plan; or names and patterns of
    blocks, e.g. ["encoder.layer1.*"]."""
    offload: Annotated[bool, OnResume] = False
    """Keep the activations of the other blocks in host memory until their backward pass; slower if the GPU's bus is."""
    precision: Literal["auto", "fp32", "fp16", "amp-fp16", "amp-bf16"] = "fp32"
    """fp16: half weights, fp32 masters; amp-*: autocast; auto: amp-bf16, or what the device of the first start has."""
    ema: OpenFraction | None = None
    """Decay of the exponential moving average of the weights, which evaluation uses; less in the first steps; null: no
    average."""
    bn_momentum: PositiveFraction | None = None
    """Momentum of all BatchNorm layers; null: the model's own, usually 0.1."""
    precise_bn: Count = 0
    """Micro-batches from which BatchNorm statistics are recomputed before each evaluation; 0: keep the running ones."""
    max_bad_steps: Annotated[PositiveInt, OnResume] = 10
    """The run fails after this many consecutive steps with a non-finite loss or gradient."""
    hang_timeout_s: Annotated[NonNegativeFloat, OnResume] = 600.0
    """Seconds without progress after which the run fails, with all stacks in RUN/stacks.log; 0: never."""
    early_stop: Annotated[PositiveInt | None, OnResume] = None
    """Stop after this many evaluations without improvement of checkpoint.monitor; null: never."""
    channels_last: Annotated[bool | Literal["auto"], OnResume] = "auto"
    """Memory format NHWC; auto: on GPUs, for convolutional networks in half precision or TF32."""
    compile: Annotated[bool, OnResume] = False
    """Compile the network's forward and backward pass with torch.compile; not with dp, model or distill."""
    cuda_graph: Annotated[bool, OnResume] = False
    """Replay forward and backward pass as one CUDA graph, for small networks on one GPU, whose steps wait for the host;
    only with single, not with compile, distill or a custom network or loss."""
    keep_freed_memory: Annotated[bool, OnResume] = True
    """On the CPU, keep freed memory for reuse (glibc only): fewer page faults, a slightly higher peak."""
    cudnn_benchmark: Annotated[bool, OnResume] = True
    """Let cuDNN benchmark its algorithms for each shape of a training; never in an evaluation."""
    deterministic: Annotated[bool, OnResume] = False
    """On GPUs, use algorithms that repeat their results bit for bit only; slower, without cudnn_benchmark."""
    tf32: Annotated[bool, OnResume] = True
    """On GPUs, float32 convolutions and matrix products round their inputs to TF32; false: full float32, slower."""


class ParallelConfig(Section):
    """`parallel:` the devices, and how a batch is divided among them."""

    mode: Literal["auto", "single", "dp", "ddp", "model"] = "auto"
    """auto: single on one device, one process per GPU (ddp) on several; with gpu0_bsz or shares, dp if by an estimate
    it reaches 95% of ddp's speed; another mode if the config asks for something that works there only."""
    devices: str | list[int | str] = "auto"
    """auto, one device ("cuda:1", "mps", "xpu"), or a list ([0, 1], [cpu, cpu])."""
    gpu0_bsz: Count | Literal["auto"] | None = None
    """Images of a batch on the first device (dp, ddp); null: even split; 0: weights only; auto: balanced by memory."""
    shares: list[Count] | None = None
    """Images of a full batch on each device (dp, ddp), for GPUs of different size; null: gpu0_bsz applies."""
    stages: dict[str, int | str] | None = None
    """Module -> device (model), e.g. {backbone: cuda:0, classifier: cuda:1}; null: balanced by memory."""
    memory_budget_mib: list[PositiveFloat] | None = None
    """Limit of tensor memory in MiB for each GPU (ddp: rank); null: no limit."""
    sync_bn: bool = True
    """Synchronize BatchNorm statistics over devices (dp, ddp)."""
    gradient_as_bucket_view: bool = True
    """Gradients are views into DDP's buckets, which saves their memory (ddp)."""
    shard_optimizer: bool | Literal["auto"] = "auto"
    """Divide the optimizer's state and the average of the weights (train.ema) over the ranks (ddp): the same weights,
    less memory; the weights are sent in each step. auto: if both take 1 GiB or more on a rank."""

    @property
    def has_split(self) -> bool:
        """True if the batch is to be divided in a certain way."""
        return self.gpu0_bsz is not None or self.shares is not None


class EvalConfig(Section):
    """`eval:` when and how the model is evaluated."""

    every_epochs: PositiveInt = 1
    """Epochs between evaluations; the end of the training is always evaluated."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations, instead of every_epochs; null: by epochs."""
    batch_size: PositiveInt = 1
    """Images evaluated at once, if they have the same size."""
    slide: bool = False
    """Sliding window instead of the whole image."""
    slide_px: HeightWidth | None = None
    """Height and width of the window, in pixels; null: data.crop_px."""
    slide_overlap: Decay = 1 / 3
    """Overlap of neighboring windows, as a share of the window."""
    slide_weighting: Literal["uniform", "gaussian"] = "uniform"
    """Weight of a window where windows overlap: uniform, or largest at its center (gaussian)."""
    threshold: OpenFraction = 0.5
    """A class is predicted where its probability is above this (data.multilabel)."""
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
    monitor: ScoreName = "miou"
    """Evaluation result that selects best.pt."""
    full: bool = False
    """With model.adapters: also save the backbone that the weights files give, instead of its sha256."""


class LogConfig(Section):
    """`log:` what is recorded during training."""

    every_steps: PositiveInt = 10
    """Steps between `step` events."""
    tensorboard: bool = True
    """Write scalars, memory, sample images and settings for TensorBoard into the run folder."""
    wandb: Text | None = None
    """Weights & Biases project; needs the package wandb (WANDB_MODE=offline: no upload); null: off."""
    mlflow: Text | None = None
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
    """Normalize the input over the whole batch."""
    lr: PositiveFloat = 0.0004
    """Initial learning rate (Adam); it follows the schedule."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decay rates of the first and second moment (Adam)."""


class DistillConfig(Section):
    """`distill:` knowledge distillation from a trained model; modes single, dp and ddp."""

    teacher: Annotated[Text, OnResume]
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

    name: Annotated[RunName, OnResume]
    """Name of the run folder: letters, digits, dot, underscore, hyphen."""
    seed: Seed = 0
    """Random seed of initial weights, sample order and augmentation."""
    data: DataConfig
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    parallel: Annotated[ParallelConfig, OnResume] = ParallelConfig()
    eval: Annotated[EvalConfig, OnResume] = EvalConfig()
    checkpoint: Annotated[CheckpointConfig, OnResume] = CheckpointConfig()
    log: Annotated[LogConfig, OnResume] = LogConfig()
    distill: DistillConfig | None = None
    """Knowledge distillation; null: off."""


RecomputeChoice = Literal["config", "off", "all"]
"""The blocks that a running training computes again: those that its config names, none, or all."""


class LiveSettings(BaseModel):
    """Settings that commands may change during a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu0_bsz: int | None = None
    gpu0_bsz_auto: bool = False
    """True if `gpu0_bsz` follows the measured memory."""
    shares: list[int] | None = None
    lr_factor: float = 1.0
    recompute: RecomputeChoice = "config"
