"""EoMT: mask classification with a plain vision transformer, whose last blocks also process learned queries.

Kerssies et al., "Your ViT is Secretly an Image Segmentation Model" (CVPR 2025). timm builds the transformer. The head
consists of a linear layer for the queries' classes and a small MLP, whose product with the upscaled patches gives the
masks. The input may have any size that is a multiple of the patch size.

Shapes: N images, C classes, Q queries, D channels, T tokens (prefix, queries, patches in this order), H x W of the
input in pixels, h x w of the masks, gh x gw of the grid of patches.
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.compat.models import embed_positions
from segapp.errors import ConfigError
from segapp.models.names import check_options, timm_options, unknown_name
from segapp.models.network import SegmentationModel

NUM_QUERIES, NUM_BLOCKS = 100, 4
_OWN_OPTIONS: Mapping[str, Any] = {"num_queries": NUM_QUERIES, "num_blocks": NUM_BLOCKS, "mask_steps": None}
"""The options that are not arguments of the timm model, with their defaults."""


class EomtModel(SegmentationModel):
    """A vision transformer with learned queries in its last blocks.

    In training mode it returns the input of `CriterionMaskClassification`: mask and class logits of the last prediction
    and, with `aux`, of the state before each of the last blocks. In evaluation mode it returns semantic logits.

    Args:
        encoder: a timm VisionTransformer or Eva for images of any size, without a classifier.
        num_queries: Q.
        num_blocks: blocks at the end that process the queries.
        aux: in training, also predict before each of these blocks.
        mask_steps: number of steps during which each query attends only to the patches of its own mask; this applies to
            fewer queries as the training proceeds, block after block. None: no masked attention.
    """

    def __init__(
        self,
        encoder: Any,
        num_queries: int,
        num_blocks: int,
        *,
        aux: bool,
        mask_steps: int | None,
        **about: Any,
    ) -> None:
        patch_px = int(encoder.patch_embed.patch_size[0])
        super().__init__(library="segapp", name="eomt", size_divisor=patch_px, **about)
        self.encoder: Any = encoder
        self.num_queries, self.num_blocks, self.aux = num_queries, num_blocks, aux
        self.num_prefix = int(encoder.num_prefix_tokens)
        self.queries = nn.Parameter(torch.randn(num_queries, encoder.embed_dim))
        self.decoder = MaskDecoder(encoder.embed_dim, self.num_classes, patch_px)
        self.masking = None if mask_steps is None else QueryMasking(num_blocks, mask_steps)
        for block in encoder.blocks[-num_blocks:]:
            block.attn.num_prefix_tokens = self.num_prefix + num_queries  # the tokens without rotary embedding

    def count_update(self) -> None:
        """Count an update, without waiting for the device; the count is a buffer, so checkpoints hold it."""
        if self.masking is not None:
            self.masking.num_updates.add_(1)

    def compute_with_features(self, images_NCHW: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the outputs, and the upscaled patches (N, D, h, w).

        In training mode, the outputs are (mask logits (N, Q, h, w), class logits (N, Q, C + 1)) of the last prediction,
        then the same pair for each earlier one; in evaluation mode, the semantic logits (N, C, h, w).
        """
        patches = self.encoder.patch_embed(images_NCHW)
        grid = patches.shape[1:3]
        tokens, rope = embed_positions(self.encoder, patches)
        tokens = self.encoder.norm_pre(tokens)
        earlier: list[Tensor] = []
        first = len(self.encoder.blocks) - self.num_blocks
        for number, block in enumerate(self.encoder.blocks):
            if number == first:
                queries = self.queries.expand(tokens.shape[0], -1, -1).to(tokens.dtype)
                tokens = torch.cat([tokens[:, : self.num_prefix], queries, tokens[:, self.num_prefix :]], 1)
            options = {} if rope is None else {"rope": rope}
            # The masks of earlier blocks are only for learning: they have losses, and guide the attention.
            if number >= first and self.training and self.aux:
                masks, classes, _ = self._predict(tokens, grid)
                earlier += [masks, classes]
                if self.masking is not None:
                    options["attn_mask"] = self.masking(masks, number - first, grid, self.num_prefix)
            tokens = block(tokens, **options)
        masks, classes, features = self._predict(tokens, grid)
        if self.training:
            return (masks, classes, *earlier), features
        return (semantic_logits(masks, classes),), features

    def _predict(self, tokens: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.encoder.norm(tokens)[:, self.num_prefix :]
        queries, patches = normed[:, : self.num_queries], normed[:, self.num_queries :]
        outputs: tuple[Tensor, Tensor, Tensor] = self.decoder(queries, patches.transpose(1, 2).unflatten(2, grid))
        return outputs


class MaskDecoder(nn.Module):
    """Class and mask logits from the tokens of queries and patches (D = `channels`)."""

    def __init__(self, channels: int, num_classes: int, patch_px: int) -> None:
        super().__init__()
        self.class_head = nn.Linear(channels, num_classes + 1)
        layers = [nn.Linear(channels, channels) for _ in range(3)]
        self.mask_head = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
        self.upscale = nn.Sequential(*[UpscaleBlock(channels) for _ in range(num_upscales(patch_px))])

    def forward(self, queries: Tensor, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mask logits (N, Q, h, w), class logits (N, Q, C + 1) and the upscaled patches (N, D, h, w).

        `queries` is (N, Q, D), `patches` (N, D, gh, gw).
        """
        features = self.upscale(patches)
        masks = torch.einsum("nqd,ndhw->nqhw", self.mask_head(queries), features)
        return masks, self.class_head(queries), features


class UpscaleBlock(nn.Module):
    """Doubles height and width: transposed convolution, GELU, depthwise 3x3 convolution, LayerNorm over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.mix = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, features: Tensor) -> Tensor:
        """Return (N, D, 2h, 2w) from (N, D, h, w)."""
        mixed = self.mix(F.gelu(self.up(features)))
        normed: Tensor = self.norm(mixed.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2)


class QueryMasking(nn.Module):
    """Masked attention that is reduced during training: a query attends only to the patches of its predicted mask.

    The share of masked queries falls from 1 to 0 as (1 - progress)^0.9, one block after another: in block i of B
    between the shares (i + 1) / (B + 2) and (i + 2) / (B + 2) of the training, as in the published configs. The masked
    queries depend only on the number of updates, so no split of a batch changes them; the published code draws them per
    image. An evaluation has no masks: it measures the network that will be used.
    """

    num_updates: Tensor

    def __init__(self, num_blocks: int, num_steps: int) -> None:
        super().__init__()
        self.num_blocks, self.num_steps = num_blocks, num_steps
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))

    def masked_share(self, block: int) -> Tensor:
        """Return the share of masked queries in a block, 0 to 1, as a 0-dim tensor."""
        step_of_unit = self.num_steps / (self.num_blocks + 2)
        progress = (self.num_updates / step_of_unit - (block + 1)).clamp(0, 1)
        return (1 - progress) ** 0.9

    def forward(self, masks: Tensor, block: int, grid: tuple[int, int], num_prefix: int) -> Tensor:
        """Return which tokens attend to which, (N, 1, T, T) bool; blocks are counted from the first one with queries.

        `masks` are logits (N, Q, h, w), `grid` is (gh, gw), `num_prefix` the number of tokens before the queries.
        """
        N, Q = masks.shape[:2]
        inside = F.interpolate(masks.detach(), grid, mode="bilinear", align_corners=False).flatten(2) > 0
        # Multiples of the golden ratio, modulo 1, are spread evenly over the queries and over the steps.
        numbers = torch.arange(Q, device=masks.device) + Q * (self.num_updates * self.num_blocks + block)
        is_free = numbers * 2654435761 % 2**32 >= self.masked_share(block) * 2**32
        patches = num_prefix + Q
        T = patches + inside.shape[2]
        attends = torch.ones(N, 1, T, T, dtype=torch.bool, device=masks.device)
        attends[:, 0, num_prefix:patches, patches:] = inside | is_free[:, None]
        return attends


def num_upscales(patch_px: int) -> int:
    """Return how often the patches' height and width are doubled: up to stride 4, or 7 for patches of 14."""
    return max(1, int(math.log2(patch_px)) - 2)


def semantic_logits(masks: Tensor, classes: Tensor) -> Tensor:
    """Return the logarithm of each class's score, (N, C, h, w) in float32 or better.

    The score of a pixel and class is the sum over the queries of class probability x mask probability (Cheng et al.,
    MaskFormer, NeurIPS 2021, section 3.4), here at the masks' resolution. Its logarithm serves as the logits of the
    upsampling, softmax and argmax; softmax gives the scores divided by their sum. `masks` are logits (N, Q, h, w),
    `classes` logits (N, Q, C + 1) with "no object" last.
    """
    wide = torch.promote_types(masks.dtype, torch.float32)
    kind = masks.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        probability = classes.to(wide).softmax(-1)[..., :-1]
        scores = torch.einsum("nqc,nqhw->nchw", probability, masks.to(wide).sigmoid())
        return (scores + 1e-6).log()


def build_eomt(
    num_classes: int, aux: bool, encoder: str | None, options: Mapping[str, Any], in_channels: int
) -> SegmentationModel:
    """Return a network with random weights; see `build_model`.

    The encoder is `tu-` and the name of a timm vision transformer; the options are `num_queries`, `num_blocks`,
    `mask_steps` (see `EomtModel`) and arguments of the timm model.

    Raises:
        ConfigError: an encoder that is not a plain vision transformer, or options that do not fit it.
    """
    settings: dict[str, Any] = {key: options.get(key, default) for key, default in _OWN_OPTIONS.items()}
    further = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
    for key, value in settings.items():
        if value != _OWN_OPTIONS[key] and (type(value) is not int or value < 1):
            raise _refused(f"{key} = {value!r} is not a whole number of at least 1")
    if settings["mask_steps"] is not None and not aux:
        raise _refused("mask_steps needs the predictions of model.aux: set it to true")
    net = _build_transformer(encoder, further, in_channels)
    if settings["num_blocks"] > len(net.blocks):
        raise _refused(f"num_blocks = {settings['num_blocks']}, but {encoder} has {len(net.blocks)}")
    about: dict[str, Any] = {"encoder_name": str(encoder), "num_classes": num_classes, "in_channels": in_channels}
    return EomtModel(net, **settings, aux=aux, **about)


def _refused(problem: str) -> ConfigError:
    return ConfigError(f"model.options: {problem}", key="model.options")


def _build_transformer(encoder: str | None, options: Mapping[str, Any], in_channels: int) -> Any:
    """Return a plain timm vision transformer without a classifier, for images of any multiple of its patch size."""
    import timm
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    example = "tu-vit_small_patch16_dinov3 or tu-vit_small_patch14_dinov2"
    if encoder is None or not encoder.startswith("tu-") or not timm.is_model(encoder.removeprefix("tu-")):
        known = [f"tu-{name}" for name in timm.list_models("*vit*")]
        raise unknown_name("model.encoder", str(encoder), f"a vision transformer of timm, such as {example}", known)
    check_options(options, (*_OWN_OPTIONS, *timm_options(encoder)), f"eomt with encoder {encoder}")
    arguments = {"num_classes": 0, "global_pool": "", "dynamic_img_size": True, **options, "in_chans": in_channels}
    try:
        net = timm.create_model(encoder.removeprefix("tu-"), pretrained=False, **arguments)
    except Exception as error:  # timm raises exceptions of any type for wrong arguments
        raise ConfigError(
            f"model.encoder: eomt cannot be built with {encoder} and options {dict(options)} ({error}); "
            f"use a plain vision transformer such as {example}, or other options",
            key="model.encoder",
        ) from error
    is_plain = isinstance(net, VisionTransformer | Eva) and not getattr(net, "rope_mixed", False)
    if not is_plain or len(set(cast(Any, net).patch_embed.patch_size)) > 1:
        raise ConfigError(
            f"model.encoder: {encoder} is not a plain vision transformer with square patches: use {example}",
            key="model.encoder",
        )
    return net
