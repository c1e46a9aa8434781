"""The sections of how it is trained: `optim`, `schedule`, `train`, `parallel`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from segapp.config.sections.values import (
    BatchSize,
    Count,
    Fraction,
    NonNegativeFloat,
    PartName,
    PositiveFloat,
    PositiveInt,
    Section,
)


class ParamGroupConfig(Section):
    """An entry of `optim.groups`."""

    pattern: Annotated[str, Field(min_length=1)]
    """backbone, or a pattern of names of parameters and modules, e.g. "decoder.*"; the first that matches holds."""
    lr_factor: PositiveFloat | None = None
    """Factor on optim.lr, instead of head_lr_factor, backbone_lr_factor and layer_decay; null: as these say."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay; null: as optim.weight_decay and decay_norm_and_bias say."""


class OptimConfig(Section):
    """`optim:` the optimizer."""

    name: Literal["sgd", "adam", "adamw"] | PartName = "sgd"
    """Optimizer; adam: weight decay as part of the gradient (L2), adamw: beside it; or an own part."""
    options: dict[str, Any] = {}
    """Keyword arguments of an own part."""
    lr: PositiveFloat = 0.01
    """Learning rate, before the factors of backbone, head and groups."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum (sgd)."""
    nesterov: bool = False
    """Nesterov momentum (sgd)."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of the first and second moment (adam, adamw)."""
    weight_decay: NonNegativeFloat = 0.0005
    """Weight decay."""
    decay_norm_and_bias: bool = True
    """Apply weight decay to normalisation layers and biases too."""
    head_lr_factor: PositiveFloat = 1.0
    """Factor on the learning rate of the head."""
    backbone_lr_factor: PositiveFloat = 1.0
    """Factor on the learning rate of the backbone."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor on the learning rate from each block of a transformer or ConvNeXt backbone to the one before; null: 1."""
    groups: list[ParamGroupConfig] = []
    """Learning-rate factor and weight decay of parameters by pattern, e.g. [{pattern: "decoder.*", lr_factor: 10}]."""
    clip_grad_norm: PositiveFloat | None = None
    """Largest norm of the total gradient; null: no clipping."""


class ScheduleConfig(Section):
    """`schedule:` the learning rate as a function of the step."""

    name: Literal["poly", "cosine", "step", "constant", "onecycle", "plateau"] | PartName = "poly"
    """Shape, or an own part; plateau: falls when the evaluations of checkpoint.monitor stop improving."""
    options: dict[str, Any] = {}
    """Keyword arguments of an own part."""
    power: PositiveFloat = 0.9
    """Exponent of the decay (poly)."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end (poly, cosine), or the lowest (plateau)."""
    warmup_steps: Count = 0
    """Number of steps of linear warm-up."""
    warmup_factor: Fraction = 0.001
    """Factor on the learning rate at the first warm-up step."""
    step_epochs: list[PositiveInt] = []
    """Epochs after which the learning rate is multiplied by gamma (step)."""
    step_steps: list[PositiveInt] = []
    """Steps after which the learning rate is multiplied by gamma (step)."""
    gamma: PositiveFloat = 0.1
    """Factor at each of step_epochs and step_steps (step), or of a reduction (plateau)."""
    patience: Count = 10
    """Evaluations without a better result that are accepted before a reduction (plateau)."""
    pct_start: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of the steps in which the learning rate rises (onecycle)."""
    div_factor: PositiveFloat = 25.0
    """optim.lr divided by the first learning rate (onecycle)."""
    final_div_factor: PositiveFloat = 1e4
    """First learning rate divided by the last (onecycle)."""


class TrainConfig(Section):
    """`train:` duration, batch size, precision and stability."""

    epochs: PositiveInt = 100
    """Number of passes over the training set."""
    steps: PositiveInt | None = None
    """Number of steps, instead of epochs: the run ends after so many, also within an epoch; null: by epochs."""
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
    ema_warmup: bool = True
    """The decay after n steps is at most (1 + n) / (10 + n): the initial weights are soon forgotten."""
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
