"""Rules about several config keys: what is just accepted, and what lies just beyond, each worked by hand."""

from __future__ import annotations

import pytest

from segapp.config import RunConfig
from segapp.config.load import config_of
from segapp.errors import ConfigError
from tests.support.cures import followed

LABELS_31, LABELS_32 = (f"data.classes=[{','.join(f'c{i}' for i in range(count))}]" for count in (31, 32))
SETS = "data.format=folder; loss.name=bce; data.multilabel=channels; "
AB, THREE_COLORS = "data.classes=[a,b]; ", "data.palette=[[0,0,0],[9,9,9],[5,5,5]]"
BUDGET, NO_TERM = "parallel.memory_budget_mib", "pixel_wise: 0, pair_wise: 0, holistic: 0"
PLUS = "loss.plus=[{name: dice}"
EOMT = "model={library: segapp, name: eomt, encoder: tu-x}; loss.name=mask_classification; "

RULES: list[tuple[str, str, str, str]] = [
    # key, accepted, refused, part of the message
    ("data.crop_px", "data.crop_px=[8192,8192]", "data.crop_px=[8192,8193]", "67 megapixels"),
    ("data.scale", "data.scale=[1,1]", "data.scale=[1.1,1]", "swap them"),
    ("data.cutmix", "data.cutmix=0.5; data.classmix=0.5", "data.cutmix=0.75; data.classmix=0.5", "add up to 1.25"),
    ("data.augment", "data.augment=[ScaledCrop]", "data.augment=[]", "is empty"),
    (
        "data.sampling",
        "data.sampling=foreground; data.augment=[Blur, ScaledCrop]",
        "data.sampling=foreground; data.augment=[RandomCrop]",
        "needs ScaledCrop",
    ),
    ("data.hflip", "data.augment=[Blur]; data.hflip=0.5", "data.augment=[Blur]; data.hflip=0.4", "built-in transforms"),
    ("data.classes", f"data.format=list; {AB}", "data.format=list", "does not fix the classes"),
    ("data.classes", f"{SETS}data.classes=[a]", "data.format=folder; data.classes=[a]", "is one class"),
    ("data.classes", SETS + LABELS_31, SETS + LABELS_32, "has 32 names: at most 31"),
    (
        "data.multilabel",
        f"{SETS}{AB}data.multilabel=files; data.mask_dir='m/{{class}}'",
        f"{SETS}{AB}data.multilabel=files",
        "needs {class}",
    ),
    ("data.sampling", SETS + AB, f"{SETS}{AB}data.sampling=class-balanced", "needs one class per pixel"),
    ("data.label_map", SETS + AB, f"{SETS}{AB}data.label_map={{1: 0}}", "cannot be combined"),
    ("data.palette", "data.rgb_masks=false", "data.rgb_masks=true", "needs one color per class"),
    ("data.palette", f"{AB}{THREE_COLORS}; data.rgb_masks=true", AB + THREE_COLORS, "3 colors, but data.classes has 2"),
    ("data.bands", "data.dtype=uint16; data.bands=[2]", "data.dtype=uint16", "needs the bands"),
    ("data.value_range", "data.value_range=[[0,1]]", "data.value_range=[[0,0],[1,2],[3,1]]", "[3.0, 1.0] is"),
    ("data.value_range", "data.value_range=[[0,1],[0,2],[0,3]]", "data.value_range=[[0,1],[0,2]]", "for 3 bands"),
    ("data.mean", "data.bands=[1,2,3,4]; data.mean=[0,0,0]", "data.bands=[1,2,3,4]; data.mean=[0,0]", "give 4"),
    ("data.std", "data.bands=[1]; data.std=[1]", "data.std=[1]", "has 1 values for 3 bands"),
    ("model.encoder", "model.library=torchvision", "model.library=smp", "model.encoder=resnet34"),
    ("model.freeze_epochs", "model.freeze=[a]; model.freeze_epochs=1", "model.freeze_epochs=1", "model.freeze"),
    ("model.encoder", EOMT, f"{EOMT}model.encoder=null", "eomt needs one"),
    ("loss.name", EOMT, f"{EOMT}loss.name=ce", "eomt is trained with"),
    ("loss.name", "loss.name=ce", "loss.name=mask_classification", "is for eomt"),
    ("loss.plus", EOMT, f"{EOMT}loss.plus=[{{name: mask_classification}}]", "leave it out"),
    ("loss.plus", "loss.name=bce; loss.plus=[{name: bce}]", "loss.name=bce; loss.plus=[{name: ce}]", "(bce)"),
    ("loss.plus.1.name", f"{SETS}{AB}{PLUS}]", f"{SETS}{AB}{PLUS}, {{name: ce}}]", "ce is for one class per pixel"),
    ("loss.name", SETS + AB, f"{SETS}{AB}{PLUS}]; loss.name=ohem", "ohem is for one class per pixel"),
    ("loss.plus.0.name", "loss.plus=[{name: ohem}]", "loss.plus=[{name: mask_classification}]", "cannot be added"),
    ("loss.label_smoothing", "loss.label_smoothing=0.1", "loss={name: dice, label_smoothing: 0.1}", "not dice"),
    ("loss.class_weights", f"{AB}loss.class_weights=[0,1]", f"{AB}loss.class_weights=[0,0]", "no weight above 0"),
    ("loss.class_weights", f"{AB}loss.class_weights=[1,2]", f"{AB}loss.class_weights=[1,2,3]", "3 values, but"),
    ("loss.class_weights", EOMT, f"{EOMT}loss.class_weights=inverse", "are not used"),
    ("optim.options.nesterov", "optim.momentum=0", "optim.options.nesterov=true; optim.momentum=0", "momentum > 0"),
    ("schedule.min_lr", "schedule.min_lr=0.01", "schedule.min_lr=0.02", "above optim.lr = 0.01"),
    ("schedule.options", "schedule={name: step, options: {steps: [9]}}", "schedule.name=step", "list the epochs"),
    ("schedule.warmup_steps", "schedule.warmup_steps=1", "schedule={name: onecycle, warmup_steps: 1}", "set it to 0"),
    (
        "schedule.warmup_steps",
        "schedule={name: poly, warmup_steps: 0.4%}",
        "schedule={name: onecycle, warmup_steps: 0.4%}",
        "set it to 0",
    ),
    ("train.compile", "train.compile=true", "train.compile=true; parallel.mode=dp", "mode: dp"),
    ("train.compile", "train.compile=reduce-overhead", "train.compile=reduce-overhead; parallel.mode=ddp", "mode: ddp"),
    ("train.compile", "train.compile=reduce-overhead", "train.compile=reduce-overhead; train.accumulate=2", "a pass"),
    ("train.compile", "distill={teacher: t}", "distill={teacher: t}; train.compile=true", "support distill"),
    ("parallel.gpu0_bsz", "parallel.gpu0_bsz=8", "parallel.gpu0_bsz=9", "9 is above train.batch_size = 8: use 0 to 8"),
    ("parallel.gpu0_bsz", "parallel.gpu0_bsz=9; train.batch_size=auto", "parallel.gpu0_bsz=-1", "= -1"),
    ("parallel.shares", "parallel.shares=[0,1]", "parallel.shares=[0,0]", "adds up to 0"),
    ("parallel.shares", "parallel.shares=[1,2]", "parallel.shares=[1,2]; parallel.gpu0_bsz=1", "keep one of them"),
    ("parallel.devices", "parallel.devices=[0]", "parallel.devices=[]", "is empty"),
    ("model.name", f"{EOMT}parallel.mode=dp", f"{EOMT}parallel.mode=model", "eomt does not support"),
    (BUDGET, f"parallel.devices=[0,1]; {BUDGET}=[1,2]", f"parallel.devices=[0,1]; {BUDGET}=[1]", "1 budgets for 2"),
    (BUDGET, f"parallel.devices=[0,1]; {BUDGET}=[1]; parallel.mode=single", f"{BUDGET}=[]", "is empty"),
    (BUDGET, f"parallel.mode=dp; {BUDGET}=[1]", f"parallel.mode=model; {BUDGET}=[1]", "does not support"),
    ("distill", "distill={teacher: t}", f"distill={{teacher: t, {NO_TERM}}}", "has no term"),
    *(
        ("distill", f"distill={{teacher: t, {NO_TERM.replace(f'{term}: 0', f'{term}: 1')}}}", words, message)
        for term, words, message in (
            ("pixel_wise", "distill={teacher: t}; parallel.mode=model", "parallel.mode: model"),
            ("pair_wise", f"{EOMT}distill={{teacher: t}}", "can be the teacher"),
            ("holistic", f"{SETS}{AB}distill={{teacher: t}}", "with data.multilabel"),
        )
    ),
]

# part of a message of RULES -> what it tells the user to do, way by way; of the others, `accepted` is the way
WAYS: dict[str, tuple[str, ...]] = {
    "67 megapixels": ("data.crop_px=[8192,8191]",),
    "add up to 1.25": ("data.cutmix=0.25",),
    "is empty: list": ("data.augment=[ScaledCrop]", "data.augment=null"),
    "needs ScaledCrop": ("data.augment=[ScaledCrop, RandomCrop]",),
    "built-in transforms": ("-data.hflip; data.augment=[{HorizontalFlip: {p: 0.4}}, Blur]",),
    "does not fix the classes": ("data.classes=[a,b]",),
    "is one class": ("data.classes=[background,a]", "data.multilabel=channels; loss.name=bce"),
    "needs {class}": ("data.mask_dir=masks/{class}", "data.mask_suffix='_{class}.png'"),
    "class-balanced needs": ("data.sampling=uniform",),
    "cannot be combined with data.multilabel": ("-data.label_map",),
    "rgb_masks needs one color": ("data.classes=[a,b]; data.palette=[[1,2,3],[4,5,6]]",),
    "3 colors, but data.classes has 2": ("data.palette=[[0,0,0],[9,9,9]]",),
    "needs the bands": ("data.bands=[1, 2, 3]",),
    "for 3 bands: give one": ("data.value_range=[[0,1]]", "data.value_range=[[0,1],[0,2],[0,3]]"),
    "give 4, or": ("data.mean=[0,0,0,0]", "data.mean=[0,0,0]"),
    "has 1 values for 3 bands": ("data.std=[1,1,1]",),
    "model.encoder=resnet34": (
        "model.encoder=resnet34",
        "model.encoder=efficientnet-b3",
        "model.encoder=tu-convnext_tiny",
    ),
    "model.freeze: name": ("model.freeze=[backbone]", "-model.freeze_epochs"),
    "eomt needs one": ("model.encoder=tu-vit_small_patch16_dinov3",),
    "is for eomt": (
        "loss.name=ce",
        "model.library=segapp; model.name=eomt; model.encoder=tu-vit_small_patch16_dinov3",
    ),
    "mask_classification: leave it out": ("-loss.plus",),
    "softmax: use ce": (
        "loss.name=ce",
        "loss.plus=[{name: bce}]; data.multilabel=channels; data.format=folder; data.classes=[a,b]",
    ),
    "loss.plus.1.name: ce is": tuple(f"{PLUS}, {{name: {name}}}]" for name in ("bce", "dice", "tversky", "focal")),
    "ohem is for one class": tuple(f"loss.name={name}" for name in ("bce", "dice", "tversky", "focal")),
    "cannot be added": (f"-loss.plus; {EOMT}",),
    "not dice": ("loss={name: dice, label_smoothing: 0}",),
    "are not used": ("loss.class_weights=null",),
    "momentum > 0": ("optim.momentum=0.9",),
    "above optim.lr": ("schedule.min_lr=0.01",),
    "list the epochs": ("schedule={name: step, options: {epochs: [60, 80]}}",),
    "has its own warm-up": ("schedule={name: onecycle, warmup_steps: 0}",),
    "mode: dp: use": ("parallel.mode=single", "parallel.mode=ddp", "train.compile=false"),
    "mode: ddp: use": ("parallel.mode=single", "train.compile=true"),
    "of its graph": ("train.compile=true", "train.accumulate=1"),
    "support distill": ("train.compile=false", "-distill"),
    "use 0 to 8": ("parallel.gpu0_bsz=0", "parallel.gpu0_bsz=8", "parallel.gpu0_bsz=null"),
    "keep one of them": ("-parallel.shares", "-parallel.gpu0_bsz"),
    "name at least one device": ("parallel.devices=[0]", "parallel.devices=auto"),
    "eomt does not": (*(f"parallel.mode={mode}" for mode in ("single", "dp", "ddp")), "-model; -loss.name"),
    "1 budgets for 2": (f"{BUDGET}=[1,1]",),
    "give one number per device": (f"{BUDGET}=null", f"{BUDGET}=[1]; parallel.devices=[0]"),
    "parts of the model: leave": (f"-{BUDGET}",),
    "has no term": (f"distill={{teacher: t, {NO_TERM.replace('holistic: 0', 'holistic: 1')}}}", "-distill"),
    "parallel.mode: model: use": (*(f"parallel.mode={mode}" for mode in ("single", "dp", "ddp")), "-distill"),
    "can be the teacher": ("-distill",),
    "leave it out with data.multilabel": ("-distill",),
}


def built(words: str) -> RunConfig:
    given = [word for word in words.split("; ") if word]
    return config_of({"name": "x", "data": {"format": "voc", "root": "d"}}, given)


@pytest.mark.parametrize(("key", "accepted", "refused", "part"), RULES)
def test_rule_holds_up_to_its_bound(key: str, accepted: str, refused: str, part: str) -> None:
    built(accepted)
    with pytest.raises(ConfigError) as caught:
        built(refused)
    problems = str(caught.value).splitlines()
    found = [line for line in problems if line.strip().startswith((f"config: {key}: ", f"config: {key} = "))]
    assert any(part in line for line in found), problems
    for way in next((ways for said, ways in WAYS.items() if said in found[0]), (accepted,)):
        built("; ".join(followed(refused.split("; "), way.split("; "))))
