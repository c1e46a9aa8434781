"""The sections of a config file as frozen models, in the order of the file, and the settings that a command can change.

The docstring of a field is its documentation: the JSON schema and the page `config` are generated from it. A field
marked with `OnResume` may differ when a run is resumed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from segapp.chunks import SPLIT_NAMES, SplitRequest
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
    PathText,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    RunName,
    Section,
    Seed,
    Share,
    Text,
    Transforms,
    Workers,
)
from segapp.scores import CLASS_SCORE_PATTERN, SCORES

if TYPE_CHECKING:
    ScoreName = str
else:
    ScoreName = Literal[tuple(SCORES)] | Annotated[str, Field(pattern=CLASS_SCORE_PATTERN)]

MAX_LABELS = 31
"""Maximum number of classes of `data.multilabel`: a target holds them as the bits of an int32."""

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
IMAGENET: Statistics = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of the images on which most backbones are pretrained, in RGB from 0 to 1."""


class DataConfig(Section):
    """`data:` the data set, its augmentation and its loading."""

    format: Literal["cityscapes", "camvid", "voc", "ade20k", "folder", "list"] | PartName
    """Layout of the files: cityscapes, camvid, voc, ade20k, folder (images/ and masks/), list (text or CSV files), or a
    custom component: a class with `__len__` and `image_and_mask(index)`. segapp init writes it."""
    options: dict[str, Any] = {}
    """Keyword arguments of a custom data set. Change it if data.format is a custom component with arguments."""
    root: Annotated[PathText, OnResume]
    """Folder of the data set, relative to the current folder."""
    train_split: str | None = None
    """Data split for training; null: train. Change it if your split has another name."""
    val_split: Annotated[str | None, OnResume] = None
    """Data split for evaluation; null: val. Change it if your split has another name."""
    crop_px: HeightWidth = (512, 512)
    """Height and width of a training crop, after resize_px and scale. Many models need multiples of 32, and for others
    crops are padded to multiples of their stride. Change it if objects are larger than a crop, or to trade context for
    memory."""
    resize_px: HeightWidth | None = None
    """Height and width at which the model sees each image; null: the size on disk. Predictions have the image's own
    size again, and evaluations compare them at that size. Change it if images are much larger than a crop and the
    details do not matter."""
    scale: tuple[PositiveFloat, PositiveFloat] = (0.5, 2.0)
    """Smallest and largest random zoom factor of an image before the crop. Change it if all objects are at the
    same distance; [1.0, 1.0] turns it off."""
    hflip: Fraction = 0.5
    """Probability of a horizontal flip. Change it to 0 if left and right differ, e.g. for text or organs."""
    photometric: bool | NonNegativeFloat = True
    """Random changes of brightness, contrast, saturation and hue: true, false, or a strength (1.0 equals true). Change
    it to false if colors carry the class."""
    augment: Transforms = None
    """Transforms in order: a list of albumentations names or custom components; null: the built-in crop, flip and color
    changes. Change it for rotations, blur, noise or custom transforms."""
    cutmix: Fraction = 0.0
    """Probability of CutMix, which pastes a rectangle of another image and mask. Change it to 0.5 if the model
    overfits."""
    classmix: Fraction = 0.0
    """Probability of ClassMix, which pastes the pixels of half of the classes of another mask, into images without
    CutMix. Change it if rare classes need more contexts."""
    sampling: Literal["uniform", "class-balanced", "foreground"] = "uniform"
    """uniform: each image once per epoch. class-balanced: each crop contains a chosen class, all classes equally often.
    foreground: the same for foreground_share of the crops, without the first class, the background. Change it if rare
    classes have a low IoU."""
    foreground_share: PositiveFraction = 0.33
    """Share of the crops that are chosen to contain a class other than the first (sampling: foreground). Change it to
    0.5 or more if the foreground is tiny."""
    bands: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Bands of the image files that the model gets, in this order, e.g. [1, 2, 3, 4]. Reports show the first three as
    RGB; null: any 8-bit image, as RGB. Change it for multispectral, depth or 16-bit data."""
    dtype: Literal["uint8", "uint16", "int16", "float32"] = "uint8"
    """Data type of the values in the image files. Types other than uint8 need data.bands and data.value_range. Change
    it for 16-bit or float images."""
    value_range: Annotated[tuple[tuple[Number, Number], ...], Field(min_length=1)] | None = None
    """Lowest and highest pixel value of each band, or one pair for all bands. They are mapped to 0 and 1 before mean
    and std, and values outside are clipped; null: [[0, 255]]. Change it to the range that segapp check measures."""
    mean: Annotated[tuple[Number, ...], Field(min_length=1)] | None = None
    """Mean that normalization subtracts, one number per band, for values from 0 to 1; null: the mean that the initial
    weights expect, or ImageNet's without them. Bands beyond RGB get the average of the three numbers, and so do images
    with fewer than three bands. Change it if a weights file expects other values."""
    std: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None
    """Standard deviation by which normalization divides, one number per band, as for data.mean. Change it together with
    data.mean."""
    classes: list[str] | None = None
    """Class names in the order of their ids. Required by the formats folder and list. Change it to your classes."""
    palette: list[tuple[Byte, Byte, Byte]] | None = None
    """RGB color of each class, in reports, overlays and RGB masks. Colors after these are ignored pixels of RGB masks;
    any other color is refused. Change it if your masks are colored, or if two classes look alike."""
    rgb_masks: bool | None = None
    """true: the classes are the colors of data.palette; null: they are ids, and palettes that disagree are refused;
    false: they are ids, whatever the palettes say. Change it to true for colored masks."""
    multilabel: Literal["files", "channels", "bits"] | None = None
    """A pixel may have several classes, or none. files: one mask file per class ({class} in mask_dir or mask_suffix, or
    one column of a list). channels: one channel or TIFF page per class. bits: one bit per class. One class: binary
    segmentation with one logit. Change it if classes overlap."""
    label_map: dict[int, int] | None = None
    """Value in the mask file -> class id. Other values must be class ids or ignore_index. Change it if mask values are
    not 0, 1, 2, ..., e.g. {255: 1}."""
    ignore_index: int | None = None
    """Class id of unlabeled pixels, which loss and scores leave out; null: the id of the format, usually 255. Change it
    if your masks use another value."""
    mask_orientation: Literal["upright", "raw"] | None = None
    """Image on which masks were drawn if it has an EXIF orientation and the sizes do not tell: upright, as viewers show
    it, or raw, as its pixels are stored; null: upright is assumed, and said. Change it to raw if masks and photos are
    turned or mirrored against each other."""
    image_dir: PathText | None = None
    """Folder of the images below root (format: folder); null: images. Change it to the name of your folder."""
    mask_dir: Annotated[PathText | None, OnResume] = None
    """Folder of the masks, relative to root; null: masks, or for the paths in a list (format: list) root itself. Change
    it to the name of your folder."""
    image_suffix: str | None = None
    """End of the image file names, which is replaced by mask_suffix to find the mask; null: any image extension. Change
    it if image and mask names differ."""
    mask_suffix: str | None = None
    """End of the mask file names; null: .png. Change it if image and mask names differ, e.g. to _mask.png."""
    valid_area: PathText | None = None
    """Image, relative to root, that is 0 where labels are ignored, e.g. fov.png for all images, or fov/*.png with the
    name of each (format: folder) or the last column of a list for the *; null: labels are valid everywhere. Change it
    if only a region of interest is labeled."""
    list_dir: Annotated[PathText | None, OnResume] = None
    """Folder of the files that list the data splits (format: list), relative to the current folder; null: root. Change
    it if the lists are not in root."""
    allow_outside_root: Annotated[bool, OnResume] = False
    """Accept files outside root that a link or a list names. root itself may always be a link. Change it to true if
    your data set links to other folders."""
    workers: Annotated[Workers, OnResume] = "auto"
    """Data loading processes per rank; auto: from the number of processors and the measured time per image; 0: load in
    the main process. Change it if GPUs wait for data, or if memory is short."""
    cache: Annotated[Literal["auto", "none", "ram", "disk"], OnResume] = "auto"
    """Keep decoded images and masks after the first read: ram, disk (below $XDG_CACHE_HOME), or none; auto: ram if they
    fit in 25 % of the free memory, else none. All workers and ranks share the cache. Change it to disk if loading is
    slower than training, or to none if memory is short."""

    @property
    def transforms(self) -> list[dict[str, dict[str, Any]]]:
        """`augment`, or the built-in transforms with the numbers of scale, hflip and photometric."""
        if self.augment is not None:
            return self.augment
        crop = {"ScaledCrop": {"scale": list(self.scale)}}
        colors = [{"PhotometricChange": {"strength": float(self.photometric)}}] if self.photometric else []
        return [crop, {"HorizontalFlip": {"p": self.hflip}}, *colors]


class ModelConfig(Section):
    """`model:` the model."""

    library: Literal["torchvision", "smp", "segapp", "python"] = "torchvision"
    """torchvision (torchvision.models.segmentation), smp (segmentation_models_pytorch), segapp (its own), or python (a
    custom component). Change it together with name; segapp models lists all."""
    name: str = "deeplabv3_resnet50"
    """Model name in its library, or for library python a custom component: package.module:factory or ./file.py:factory.
    Change it to trade accuracy for speed and memory."""
    encoder: str | None = None
    """Encoder of an smp model, e.g. resnet34, or tu- and a timm model; for eomt a timm vision transformer. Change it to
    trade accuracy for speed and memory."""
    weights: Annotated[PathText | None, OnResume] = None
    """Initial weights of the whole model: name of a torchvision weights enum, a file, or a run; null: random. The
    classifier of another number of classes is left out. Change it to fine-tune a trained model."""
    weights_backbone: Annotated[PathText | None, OnResume] = None
    """Initial weights of the backbone: IMAGENET1K_V1 or DEFAULT (torchvision), imagenet (smp, eomt; DEFAULT for a timm
    model), or a file; null: random. Change it from null unless you have tens of thousands of images."""
    partial_weights: Annotated[bool, OnResume] = False
    """Load only the tensors of a weights file that match the model; an alert names the modules that stay random. Change
    it to true for weights of another backbone or decoder."""
    freeze: list[Text] = []
    """Modules that are not trained: backbone, or names or patterns, e.g. [encoder.layer1]. Their BatchNorm and dropout
    stay in evaluation mode. Change it to [backbone] if you have few images."""
    freeze_epochs: PositiveInt | None = None
    """Epochs for which model.freeze applies; null: the whole run. Change it to train the head first and the whole model
    later."""
    adapters: PositiveInt | None = None
    """Rank of low-rank adapters (LoRA, alpha = rank) in the layers of attention and MLPs, which are trained instead of
    the backbone; the head is trained completely; null: train all weights. Needs the package peft (uv sync --extra
    lora). Change it to 16 if a large transformer does not fit into memory."""
    aux: bool = True
    """Build the auxiliary head if the model has one; eomt: also learn from the queries before each block. Change it to
    false to save memory."""
    options: dict[str, Any] = {}
    """More keyword arguments of the model's constructor in its library, e.g. {decoder_channels: 128}. eomt has
    num_queries, num_blocks, mask_steps and the arguments of timm's layers. Change it to resize the head."""

    @property
    def is_eomt(self) -> bool:
        """Whether the model is EoMT, whose masks belong to queries and not to classes."""
        return self.library == "segapp" and self.name.lower() == "eomt"


class LossTerm(Section):
    """A criterion with its weight in the sum of the terms."""

    name: LossName | PartName = "ce"
    """A loss of segapp (segapp docs choose-loss says when to use which), or a custom component. Change it for rare
    classes, thin structures or overlapping classes."""
    options: dict[str, Any] = Field({}, json_schema_extra=options_schema(LOSSES))
    """Options of this loss, or keyword arguments of a custom component. Change it to tune the loss."""
    weight: NonNegativeFloat = 1.0
    """Weight of this term in the sum. Change it to balance several terms."""
    _checked = checked_options(LOSSES)


class LossConfig(LossTerm):
    """`loss:` the loss, and more terms that are added to it."""

    align_corners: bool | Literal["auto"] = "auto"
    """Whether upsampling of the logits aligns the corner pixels, as in F.interpolate. Evaluation, predictions and
    exports use it too. With true, the place of a logit depends on the size of the crop. auto: as model.weights were
    trained, which is true for weights of smp that no run of segapp wrote; and false without them. Change it to true to
    reproduce the original code of PSPNet or DeepLab."""
    aux_weight: NonNegativeFloat = 0.4
    """Weight of the loss of the auxiliary head. Change it if you reproduce a recipe."""
    label_smoothing: Decay = 0.0
    """Share of the target probability that is spread evenly over all classes (ce), or over yes and no (bce). Change it
    to 0.1 if the model is overconfident or the masks have errors."""
    class_weights: list[NonNegativeFloat] | Literal["inverse", "enet", "median-frequency"] | None = None
    """Weight of each class, or a rule that computes the weights from the training masks (ce, ohem, bce, focal).
    inverse: 1 / pixel share, the strongest rule. enet: 1 / ln(1.02 + share), a bounded one. median-frequency: by pixels
    per image with the class. Change it if rare classes have a low IoU; begin with enet."""
    plus: list[LossTerm] = []
    """More terms; the loss is the weighted sum of all terms. Change it to combine losses, e.g. ce with dice."""

    @property
    def is_aligned(self) -> bool:
        """`align_corners`, with auto as false, as it is without weights."""
        return self.align_corners is True

    def by_key(self) -> dict[str, LossTerm]:
        return {"loss": self, **{f"loss.plus.{i}": term for i, term in enumerate(self.plus)}}


class ParamGroupConfig(Section):
    """An entry of `optim.groups`."""

    pattern: Text
    """backbone, or a pattern of parameter or module names, e.g. "decoder.*". The first entry that matches applies."""
    lr_factor: PositiveFloat | None = None
    """Factor on optim.lr, instead of head_lr_factor and layer_decay; null: these apply. Change it
    to train these parameters faster or slower."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of these parameters; null: optim.weight_decay and decay_norm_and_bias apply. Change it to 0 for
    embeddings."""


class OptimConfig(Section):
    """`optim:` the optimizer."""

    name: OptimizerName | PartName = "sgd"
    """sgd: with momentum. adam: weight decay is part of the gradient (L2). adamw: decoupled weight decay. Or a custom
    component. Change it to adamw for transformers."""
    options: dict[str, Any] = Field({}, json_schema_extra=options_schema(OPTIMIZERS))
    """Options of this optimizer, or keyword arguments of a custom component. Change it to tune the optimizer."""
    lr: PositiveFloat = 0.01
    """Learning rate of a step over all GPUs, before the factors of backbone, head and groups. It is not scaled by the
    batch size. Usual values: 0.01 for sgd, 0.0001 for adamw with a pretrained backbone. Change it first of all keys:
    lower if the loss jumps, higher if it falls slowly."""
    momentum: Decay = 0.9
    """Momentum (sgd). Change it if you reproduce a recipe."""
    weight_decay: NonNegativeFloat = 0.0005
    """Weight decay. Change it to about 0.01 to 0.05 for adamw, and to more if the model overfits."""
    decay_norm_and_bias: bool = True
    """Apply weight decay to normalization layers and biases too. Change it to false for transformers."""
    head_lr_factor: PositiveFloat = 1.0
    """Factor on the learning rate of the head. Change it to 10 to train a new head on a pretrained backbone."""
    layer_decay: PositiveFraction | None = None
    """Factor on the learning rate from each block of a transformer or ConvNeXt backbone to the one before it. With 0.75
    each block learns at 75 % of the rate of the next; null: 1. Change it to 0.65 to 0.9 to fine-tune a vision
    transformer."""
    groups: list[ParamGroupConfig] = []
    """Learning-rate factor and weight decay of parameters by pattern, e.g. [{pattern: "decoder.*", lr_factor: 10}].
    Change it if parts of the model need other rates."""
    clip_grad_norm: PositiveFloat | None = None
    """Maximum norm of the gradient over all parameters; null: no clipping. Change it to 1.0 if the loss jumps, and for
    transformers."""

    _checked = checked_options(OPTIMIZERS)


class ScheduleConfig(Section):
    """`schedule:` the learning rate as a function of the step."""

    name: ScheduleName | PartName = "poly"
    """poly: (1 - t)^power. cosine: half a cosine. step: falls at given epochs or steps. constant. onecycle: rises, then
    falls. plateau: falls when checkpoint.monitor stops improving. wsd: warm-up, stable, decay; more epochs extend it
    without a jump. Or a custom component. Change it to wsd or constant if you may extend the run."""
    options: dict[str, Any] = Field({}, json_schema_extra=options_schema(SCHEDULES))
    """Options of this schedule, or keyword arguments of a custom component. Change it to tune the schedule."""
    power: PositiveFloat = 0.9
    """Exponent of the decay (poly). Change it to 1.0 for a linear decay."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end (poly, cosine, wsd), or the lowest one (plateau). Change it if the last
    epochs no longer improve the model."""
    warmup_steps: Count | Share = 0
    """Steps of linear warm-up, from 0.001 of the learning rate, or their share of the run, such as 5%. Change it to 500
    to 1500 for transformers, and if the loss jumps at the beginning."""

    _checked = checked_options(SCHEDULES)

    def num_warmup_steps(self, total_steps: int) -> int:
        if isinstance(self.warmup_steps, int):
            return self.warmup_steps
        return round(float(self.warmup_steps.removesuffix("%")) / 100 * total_steps)


class TrainConfig(Section):
    """`train:` duration, batch size, precision and stability."""

    epochs: Annotated[PositiveInt, OnResume] = 100
    """Passes over the training set. Change it until the validation mIoU no longer rises."""
    steps: Annotated[PositiveInt | None, OnResume] = None
    """Steps of the run, instead of epochs; the run may end within an epoch; null: use epochs. Change it to compare runs
    at the same number of updates."""
    batch_size: BatchSize = 8
    """Images per step (all GPUs together); with accumulate, images per micro-batch. auto: the largest batch that is
    predicted to fit. Change it to what fits, and optim.lr with it."""
    accumulate: PositiveInt = 1
    """Micro-batches per step: a step processes batch_size x accumulate images. Change it if the batch that you want
    does not fit."""
    recompute: Annotated[Literal["off", "auto", "all"] | list[Text], OnResume] = "off"
    """Blocks of the model whose activations are recomputed in the backward pass (activation checkpointing): the
    same result with less memory and more time. auto: as many of the first or last blocks as the plan needs;
    all; or names and patterns, e.g. ["encoder.layer1.*"]. Change it to auto if the run is out of memory."""
    precision: Literal["auto", "fp32", "fp16", "amp-fp16", "amp-bf16"] = "auto"
    """amp-bf16 and amp-fp16: autocast. fp16: half-precision weights with fp32 master weights. auto: amp-bf16 if every
    GPU supports it, else amp-fp16; fp32 on the CPU, and for a custom model or loss with the attribute
    `precision = "fp32"`. Change it to fp32 to compare with results in float32."""
    ema: OpenFraction | None = None
    """Decay of the moving average of the weights, which evaluation uses and best.pt contains; the first steps use a
    smaller decay; null: no average. Change it to 0.999 for long runs; it needs the memory of one copy of the
    weights."""
    bn_momentum: PositiveFraction | Literal["auto"] | None = "auto"
    """Momentum of all BatchNorm layers, the weight of a batch in their running statistics; null: the model's own. auto:
    the model's own, raised to at most 0.1 if it is less than 100 / (steps x accumulate), as the 0.01 of MobileNetV3 is
    in a run of fewer than 10,000 steps. Change it if batches are small and the validation loss jumps."""
    hang_timeout_s: Annotated[NonNegativeFloat, OnResume] = 600.0
    """Time without progress after which the run fails and writes all stacks to RUN/stacks.log; a data worker that does
    not answer for a fifth of it fails the run, too; 0: never. Change it if a step or an evaluation batch takes minutes,
    or if your storage is sometimes slow."""
    early_stop: Annotated[PositiveInt | None, OnResume] = None
    """Stop after this number of evaluations without a better checkpoint.monitor; null: never. Change it to 10 or 20 to
    end runs that no longer improve."""
    compile: Annotated[bool | Literal["reduce-overhead"], OnResume] = False
    """Compile the forward and backward pass with torch.compile; not with the modes dp and model, nor with distill.
    reduce-overhead, an experiment in the mode single, also launches the kernels of both passes as CUDA graphs, whose
    memory segapp plan does not count. Change it to true for long runs on a GPU; the first step takes minutes."""
    deterministic: Annotated[bool, OnResume] = False
    """On GPUs, use only deterministic algorithms; slower, and cuDNN times no algorithms. Change it to
    true if two runs must agree exactly."""
    tf32: Annotated[bool, OnResume] = True
    """On GPUs, round the inputs of float32 convolutions and matrix products to TF32. Change it to false for full
    float32 precision, which is slower."""


class ParallelConfig(Section):
    """`parallel:` the devices, and how a batch is divided among them."""

    mode: Literal["auto", "single", "dp", "ddp", "model"] = "auto"
    """single: one device. dp: one process for several devices. ddp: one process per GPU. model: layers on several
    devices. auto: single on one device, ddp on several, dp if gpu0_bsz or shares is set. Change
    it to force a mode."""
    devices: str | list[int | str] = "auto"
    """auto (all visible GPUs, the one with the most free memory first), one device ("cuda:1", "mps"), or a list
    ([0, 1], [cpu, cpu]). The first is "GPU 0" of this documentation. Change it to use only some GPUs."""
    gpu0_bsz: Count | Literal["auto"] | None = None
    """Images of a batch on GPU 0, the first of parallel.devices (dp, ddp). With mode: auto it selects dp. null: an
    even batch split; 0: GPU 0 holds weights only; auto: balanced by memory. Change it if GPU 0 runs out of memory
    first."""
    shares: list[Count] | None = None
    """Images of a full batch on each device (dp, ddp); null: gpu0_bsz applies. Change it if your GPUs have different
    sizes or speeds."""
    memory_budget_mib: list[PositiveFloat] | None = None
    """Limit of tensor memory for each GPU, or for each rank in ddp; null: no limit. Change it to leave memory for other
    programs, or to rehearse a smaller GPU."""
    sync_bn: bool = True
    """Compute BatchNorm statistics over all devices (dp, ddp). Change it to false for speed if each device has 8 images
    or more."""
    gradient_as_bucket_view: bool = True
    """Let gradients share the memory of DDP's buckets (ddp). Change it to false if a custom optimizer replaces
    gradients."""

    @property
    def has_split(self) -> bool:
        return self.gpu0_bsz is not None or self.shares is not None

    @property
    def is_auto(self) -> bool:
        """True if the split follows the measured memory."""
        return self.gpu0_bsz == "auto"

    @property
    def split(self) -> SplitRequest:
        """The split of a full batch; an even one if it is automatic."""
        return SplitRequest(None if self.gpu0_bsz == "auto" else self.gpu0_bsz, self.shares)


class EvalConfig(Section):
    """`eval:` when and how the model is evaluated."""

    every_epochs: PositiveInt = 1
    """Epochs between evaluations. The end of the training is always evaluated. Change it if evaluations take much of
    the time."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations, instead of every_epochs; null: use every_epochs. Change it if an epoch is very
    long."""
    batch_size: PositiveInt = 1
    """Images evaluated together, if they have the same size. Change it to evaluate small images faster."""
    slide: bool = False
    """Use a sliding window instead of the whole image. Change it to true for images much larger than the crops, and for
    models with a fixed size."""
    slide_px: HeightWidth | None = None
    """Height and width of the window; null: data.crop_px. Change it if a larger window fits into memory."""
    slide_overlap: Decay = 1 / 3
    """Overlap of neighboring windows, as a share of the window. Change it to 0.5 for smoother borders, to 0 for
    speed."""
    threshold: OpenFraction = 0.5
    """Probability above which a class is predicted (data.multilabel). Change it to trade precision for recall."""
    tta: bool = False
    """Test-time augmentation: average over a horizontal flip and the scales 0.75, 1 and 1.25. Change it to true
    for a slightly higher mIoU at about six times the time."""


class CheckpointConfig(Section):
    """`checkpoint:` when checkpoints are saved and which are kept."""

    every_epochs: PositiveInt | None = 1
    """Epochs between checkpoints; null: not by epochs. Saves are skipped until 20 times the duration of the last one
    has passed, so a kill loses at most one interval and 21 saves. Change it to 10 to save each tenth epoch."""
    every_steps: PositiveInt | None = None
    """Steps between checkpoints; null: not by steps. Change it if an epoch takes hours."""
    every_minutes: PositiveFloat | None = None
    """Minutes between checkpoints; null: not by time. Change it to limit the work that an interruption can lose."""
    keep: Count = 3
    """Number of saved epochs to keep as epoch_*.pt, besides last.pt and best.pt. Change it if disk space is short."""
    grace_s: PositiveFloat = 30.0
    """Time between SIGTERM and SIGKILL on your scheduler (SLURM, Kubernetes: 30). A save that takes longer raises an
    alert. Change it to the value of your scheduler."""
    monitor: ScoreName = "miou"
    """Evaluation score that selects best.pt and ranks runs. Lower is better for loss. miou and mean_dice are means over
    all classes. The means over the foreground leave out class 0 if it is named background; iou:NAME and dice:NAME are
    scores of one class. Change it to dice:NAME if one class matters, or to another score that you report."""


class LogConfig(Section):
    """`log:` what is recorded during training."""

    every_steps: PositiveInt = 10
    """Steps between `step` events. Change it to 1 for a detailed chart of a short run."""
    tensorboard: bool = True
    """Write scalars, memory and settings for TensorBoard to the run folder. Change it to false to save
    disk space."""
    wandb: Text | None = None
    """Weights & Biases project. Needs the package wandb (WANDB_MODE=offline: no upload); null: off. Change it to track
    runs on wandb.ai."""
    mlflow: Text | None = None
    """MLflow tracking URI without a password, e.g. sqlite:///mlflow.db. Needs the package mlflow-skinny or mlflow;
    null: off. Change it to track runs with MLflow."""


class DistillConfig(Section):
    """`distill:` knowledge distillation from a trained model, in the modes single, dp and ddp."""

    teacher: Annotated[PathText, Field(min_length=1), OnResume]
    """Teacher with the same classes: name or folder of a run (its best checkpoint is used), or a checkpoint file."""
    pixel_wise: NonNegativeFloat = 10.0
    """Weight of the KL divergence between the class probabilities of each pixel; 0: off. Change it to balance the
    terms."""
    temperature: PositiveFloat = 1.0
    """Temperature by which the logits are divided in the pixel-wise term. Change it to 2 to 4 if the teacher is very
    confident."""
    pair_wise: NonNegativeFloat = 10.0
    """Weight of the squared difference between the similarities of pairs of image regions; 0: off. Change it to balance
    the terms."""
    holistic: NonNegativeFloat = 0.1
    """Weight of the critic's score of whole prediction maps (adversarial term); 0: off. Change it to 0 to train without
    a critic, which is faster."""
    critic_penalty: Literal["wgan-gp", "wgan-lp", "dragan"] = "wgan-gp"
    """Gradient penalty of the critic: wgan-gp (norm 1 between real and generated maps), wgan-lp (only norms above 1),
    dragan (norm 1 near real maps). Change it if the critic's loss diverges."""
    critic_width: PositiveInt = 64
    """Channels of the critic's first stage. Change it to 32 to save memory."""


class RunConfig(Section):
    """The complete config, fixed for a run."""

    name: Annotated[RunName, OnResume]
    """Name of the run folder: letters, digits, dot, underscore, hyphen."""
    seed: Seed = 0
    """Random seed of initial weights, sample order and augmentation. Change it to measure how much results vary."""
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
"""The blocks that a running training recomputes: the blocks that its config names, none, or all."""


FALLBACKS = ("num_pieces", "is_eval_single", "window_px", "is_recomputed")
"""The settings that only an out-of-memory error changes: methods that need less memory."""

AUTO_ON = {"gpu0_bsz_auto": True}
"""The change that lets the split follow the measured memory."""

SPLIT_SETTINGS = SPLIT_NAMES | AUTO_ON.keys()
"""The settings that determine the split; a change of one of them replaces all."""


def automatic(first: int | None) -> dict[str, Any]:
    """Return the change to a split that `auto` chooses, by the samples of device 0."""
    return {"gpu0_bsz": first, **AUTO_ON}


class LiveSettings(BaseModel):
    """Settings that commands and out-of-memory errors may change during a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu0_bsz: int | None = None
    gpu0_bsz_auto: bool = False
    """True if the split follows the measured memory."""
    shares: list[int] | None = None
    lr_factor: float = 1.0
    recompute: RecomputeChoice = "config"
    num_pieces: int = 1
    """Parts of a micro-batch that are computed one after the other."""
    is_eval_single: bool = False
    """Evaluate image by image, whatever `eval.batch_size` is."""
    window_px: tuple[int, int] | None = None
    """Evaluate in windows of at most this height and width; None: as configured."""
    is_recomputed: bool = False
    """True if `recompute` is `all` because of an out-of-memory error."""

    @property
    def is_auto(self) -> bool:
        return self.gpu0_bsz_auto

    @property
    def split(self) -> SplitRequest:
        return SplitRequest(self.gpu0_bsz, self.shares)

    @property
    def fallbacks(self) -> dict[str, Any]:
        """The fallbacks in force by name, without those that were never needed."""
        return self.model_dump(include={*FALLBACKS}, exclude_defaults=True)

    def with_changes(self, values: Mapping[str, Any]) -> "LiveSettings":
        """Return the settings with some replaced.

        A split replaces the one before, and switches auto off. The fallback `is_recomputed` chooses all blocks, until
        somebody chooses others.

        >>> LiveSettings(gpu0_bsz=1, gpu0_bsz_auto=True).with_changes({"shares": [2, 3]}).is_auto
        False
        """
        if SPLIT_NAMES & values.keys():
            values = {**dict.fromkeys(SPLIT_NAMES), "gpu0_bsz_auto": False, **values}
        if values.get("is_recomputed"):
            values = {"recompute": "all", **values}
        elif "recompute" in values:
            values = {"is_recomputed": False, **values}
        return self.model_copy(update=dict(values))

    def with_split(self, split: SplitRequest, *, is_auto: bool) -> "LiveSettings":
        shares = None if split.shares is None else list(split.shares)
        return self.model_copy(update={"gpu0_bsz": split.gpu0_bsz, "shares": shares, "gpu0_bsz_auto": is_auto})
