"""The section `data` of the config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from segapp.config.sections.transforms import Transforms
from segapp.config.sections.values import (
    Byte,
    Fraction,
    HeightWidth,
    NonNegativeFloat,
    Number,
    PartName,
    PositiveFloat,
    PositiveInt,
    Section,
    Workers,
    no_bool,
)

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
    cutmix_alpha: PositiveFloat = 1.0
    """Parameter of the Beta distribution of the share of the image that CutMix keeps."""
    mixup_alpha: PositiveFloat = 0.2
    """Parameter of the Beta distribution of MixUp's weight."""


class DataConfig(Section):
    """`data:` the data set, its augmentation and its loading."""

    format: Literal["cityscapes", "camvid", "voc", "ade20k", "folder", "list"] | PartName
    """Layout of the files on disk, or an own part: a class with `__len__` and `image_and_mask(index)`."""
    options: dict[str, Any] = {}
    """Keyword arguments of an own part."""
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
    cat_max_ratio: Annotated[float, Field(gt=0, le=1), BeforeValidator(no_bool)] = 0.75
    """A crop in which one class has more than this share of the pixels is drawn again, at most ten times."""
    photometric: bool | NonNegativeFloat = True
    """Jitter of brightness, contrast, saturation and hue: true, false, or a strength (1.0 is the same as true)."""
    augment: Transforms = None
    """Transforms in order: a list of names in albumentations or own parts, or a file of A.save; null: crop, flip and
    colours as scale, hflip, cat_max_ratio and photometric say (segapp train --print-config shows that list)."""
    mix: MixConfig = MixConfig()
    """Training samples mixed with the sample of another image."""
    sampling: Literal["uniform", "class-balanced", "foreground"] = "uniform"
    """An epoch has each image once, or crops aimed at all classes equally often, or a share aimed at the foreground."""
    foreground_classes: list[str] | None = None
    """Classes that crops are aimed at, equally often (foreground); null: every class but the first, the background."""
    foreground_share: Annotated[float, Field(gt=0, le=1), BeforeValidator(no_bool)] = 0.33
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
    """Mean subtracted in normalisation, of each band in 0..1; default: ImageNet's for RGB, whose mean any further band
    gets, and every band of fewer than three."""
    std: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (0.229, 0.224, 0.225)
    """Standard deviation divided by in normalisation, as data.mean; default: ImageNet's."""
    classes: list[str] | None = None
    """Class names in the order of their ids; required by the formats folder and list."""
    palette: list[tuple[Byte, Byte, Byte]] | None = None
    """RGB colour of each class, for pictures and for RGB masks; further colours of RGB masks are ignored pixels."""
    rgb_masks: bool = False
    """Masks are RGB images with the colours of data.palette."""
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

    @property
    def transforms(self) -> list[dict[str, dict[str, Any]]]:
        """`augment`, or the built-in transforms with the numbers of scale, hflip, cat_max_ratio and photometric."""
        if self.augment is not None:
            return self.augment
        crop = {"ScaledCrop": {"scale": list(self.scale), "cat_max_ratio": self.cat_max_ratio}}
        colors = [{"PhotometricChange": {"strength": float(self.photometric)}}] if self.photometric else []
        return [crop, {"HorizontalFlip": {"p": self.hflip}}, *colors]
