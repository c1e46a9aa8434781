"""What four pages advise under a condition, a command says by itself; or the table below says why it cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import segapp

ROOT = Path(segapp.__file__).parent

PAGES = ("troubleshooting/low-miou", "tasks/choose-loss", "tasks/tune", "start/masks")
KEY = re.compile(
    r"`?\b(data|loss|train|optim|schedule|eval|model|checkpoint)\.[a-z_]+|label_map|rgb_masks|ignore_index|`(alpha|beta|dice:)"
)
BY_EYE = "only a person sees it in the pictures"
BY_AIM = "it depends on what the user wants"
BY_SCORES = "how much is too much depends on the task; eval and report print the numbers"

SAID: dict[str, str | tuple[str, str]] = {
    # start of the sentence -> why it is not computed, or the file of the product and the words that say it
    "| one class covers everything": ("training/learning.py", "every pixel is predicted as"),
    "| the training loss falls, the evaluation stays poor": ("session/build.py", "train.bn_momentum = "),
    "| few images": ("commands/check.py", "a model with random weights: set model.weights_backbone"),
    "| fine structures are lost": ("onboarding/proposal.py", "would keep only"),
    "| from the first steps": ("training/trainer.py", "add schedule.warmup_steps or optim.clip_grad_norm"),
    "| after some epochs": ("training/trainer.py", "add schedule.warmup_steps or optim.clip_grad_norm"),
    "| only with `amp-fp16`": ("training/trainer.py", "with half precision use train.precision amp-bf16"),
    "| rare classes have a low IoU": ("commands/check.py", "if the IoU stays low, set"),
    "| small objects are missed": ("training/learning.py", "has an IoU of 0 in"),
    "| thin structures break": ("onboarding/proposal.py", "would keep only"),
    "| a class is found too rarely": BY_SCORES,
    "| a class is predicted too often": BY_SCORES,
    "| the loss is low, yet hard regions": BY_EYE,
    "| mIoU is the only goal": BY_AIM,
    "| some labels are wrong": "segapp suspects ranks them, and a person decides",
    "| several classes per pixel": ("datasets/masks.py", "set data.multilabel: channels"),
    "| `data.crop_px`": ("session/start_checks.py", "lower data.crop_px"),
    "| `data.scale`": BY_EYE,
    "| `data.resize_px`": BY_AIM,
    "| `eval.slide`": ("inference/workspace.py", "does not fit into memory: images of more than"),
    "- If objects appear at different distances": BY_EYE,
    "If the batch does not fit": ("planning/auto.py", "or set train.batch_size to"),
    "If most pixels are background": ("commands/check.py", "set checkpoint.monitor="),
    "| the loss jumps or becomes NaN": ("training/trainer.py", "add schedule.warmup_steps or optim.clip_grad_norm"),
    "| the loss falls, and the validation stays poor": ("session/build.py", "train.bn_momentum = "),
    "- If you resume a run with another": "a fact about a resume, with nothing to set",
    "| gray PNG with other values": ("datasets/masks.py", "Check data.classes, or map the ids in data.label_map"),
    "| black and white": ("datasets/masks.py", "A black and white mask: set data.label_map to {255: 1}"),
    "| palette PNGs whose palettes disagree": (
        "datasets/masks.py",
        "set data.rgb_masks to true, and data.palette, to read colors",
    ),
    "true` and `palette` if the colors": (
        "datasets/masks.py",
        "set data.rgb_masks to true, and data.palette, to read colors",
    ),
    "| RGB colors, one per class": ("datasets/masks.py", "its colors are the classes, or export gray or palette PNGs"),
    "If a color has one index": ("datasets/masks.py", "set data.rgb_masks to true, and data.palette, to read colors"),
    "If masks are valid only in a part": ("onboarding/hypotheses.py", "name them as data.valid_area"),
    "Use one class with `data.multilabel`": BY_AIM,
    "If sizes do not tell": ("datasets/orientation.py", "data.mask_orientation"),
    "Set `data.multilabel` if": ("datasets/masks.py", "set data.multilabel: channels"),
    "A class is predicted if": "a definition",
    "If your masks are black and white": (
        "datasets/masks.py",
        "A black and white mask: set data.label_map to {255: 1}",
    ),
}


def conditions() -> list[str]:
    """Return every sentence and every row of a table in which a condition and a key of the config stand together."""
    found = []
    for page in PAGES:
        text = re.sub(r"<!--.*?-->|```.*?```", "", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.DOTALL)
        text = re.sub(r"^\|.*\n(?=\|[-|]+\n)", "", text, flags=re.MULTILINE)  # heads of tables
        for part in re.split(r"\n(?=[|\-]|\d\. )|\n\s*\n|(?<=[.:?!])\s", text):
            sentence = " ".join(part.split())
            if KEY.search(sentence) and (sentence.startswith("|") or re.search(r"\b[Ii]f\b", sentence)):
                found.append(sentence)
    return found


def test_every_condition_of_four_pages_has_an_entry():
    sentences = conditions()
    entries = {sentence: [start for start in SAID if sentence.startswith(start)] for sentence in sentences}
    assert {sentence: starts for sentence, starts in entries.items() if len(starts) != 1} == {}
    assert set(SAID) == {start for starts in entries.values() for start in starts}, "entries without a sentence"


@pytest.mark.parametrize("start", [start for start, said in SAID.items() if isinstance(said, tuple)])
def test_words_that_a_command_says_are_in_its_source(start):
    file, words = SAID[start]
    source = (ROOT / file).read_text()
    assert words in re.sub(r'"\n\s*f?"', "", source)
