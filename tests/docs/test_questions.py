"""Questions of users of segmentation trainers, as they type them: each finds its page among the first three hits.

The questions are those of threads of SMP, mmsegmentation, ultralytics, nnU-Net, lightly-train and others.
"""

from __future__ import annotations

import functools

import pytest

from segapp.docs import pages

FIRST = 3
search_pages = functools.cache(pages.search_pages)
QUESTIONS = {
    "own-loop": "GradScaler | CriterionDSN is_target_scattered | loss in forward mean of means",
    "platforms": (
        "Windows WSL | macOS MPS Apple Silicon | ROCm AMD | Colab | Kaggle notebook | Docker | conda | how "
        "large is the installation | which GPU do I need | license of weights commercial use | cite | report "
        "a bug | privacy telemetry"
    ),
    "python": "Jupyter | callbacks",
    "augment": "see augmented images | preview of a batch | visualize augmentation",
    "plan": "how much GPU memory",
    "speed": "how long does training take | FPS frames per second",
    "own-data": "images and masks in folders | custom dataset",
    "layouts": "COCO polygons | YOLO labelme annotations | multispectral GeoTIFF",
    "masks": (
        "masks are 0 and 255 | colored masks | RGB masks palette | palette PNG | grayscale rgba | unlabeled "
        "pixels | ignore index background | binary segmentation one logit or two classes | FOV | field of view mask | "
        "valid area | region of interest"
    ),
    "tune": (
        "test split | images of different sizes | crop size | how many images do I need | learning rate batch "
        "size | how many epochs | early stopping | overfitting | validation loss rises"
    ),
    "choose-loss": "which loss | dice focal lovasz | class imbalance",
    "choose-model": "which model",
    "resume-refused": "train a finished run longer | more images same model",
    "weights": "fine-tune freeze backbone | transfer learning | other number of classes",
    "low-miou": "IoU is 0 or nan for a class | NaN fp16",
    "predict": "confidence per pixel | probability threshold | polygons GeoJSON | webcam",
    "export": "inference without segapp | TensorRT OpenVINO CoreML | int8 quantization",
    "several-gpus": "multi-GPU speed-up | FSDP",
    "out-of-memory": "CUDA out of memory",
    "recompute": "gradient checkpointing",
    "exact": "reproducible",
    "own-parts": "custom model | custom loss",
    "trackers": "TensorBoard",
}
"""Topic -> questions in a few words."""
IN_FULL = {
    "platforms#colab-kaggle-and-jupyter": "Colab, Kaggle, Jupyter?",
    "platforms#docker": "Docker?",
    "platforms#how-large-is-the-installation": "How large is the installation?",
    "platforms#which-gpu-do-i-need": "Which GPU and how much memory do I need?",
    "own-data": "I have images/ and masks/",
    "masks#which-images-can-be-read": "Palette PNGs, gray or RGBA images",
    "masks#unlabeled-is-not-background": "Unlabeled is not background",
    "masks#fields-of-view-and-regions-of-interest": "Field of view or region of interest",
    "masks#two-classes-one-logit-or-two": "Binary: one logit or two classes?",
    "layouts#annotations-instead-of-masks": "COCO, YOLO, labelme polygons",
    "tune#the-test-split": "A third, test split",
    "tune#different-image-sizes-crop-or-resize": "Different image sizes: crop or resize, which crop size?",
    "tune#how-many-images-do-i-need": "How many images do I need?",
    "choose-loss#class-imbalance": "Class imbalance",
    "tune#batch-size-and-learning-rate": "Learning rate, batch, epochs for N images",
    "tune#early-stopping": "Early stopping",
    "resume-refused#train-a-finished-run-longer": "Train a finished run longer",
    "weights#fine-tune-freeze-layers-lower-learning-rates": "Fine-tune, freeze",
    "weights#another-number-of-classes": "Other number of classes from old weights",
    "tune#overfitting-the-validation-loss-rises": "Overfitting: validation loss rises",
    "predict#leave-out-uncertain-pixels": "Per-pixel confidence",
    "export#tensorrt": "TensorRT",
    "python#callbacks-and-stopping": "Callbacks",
    "trackers": "Open TensorBoard",
    "platforms#licenses": "License of weights",
}
"""Topic with its section -> a question, which finds it first."""


@pytest.mark.parametrize("topic", QUESTIONS)
def test_questions_find_their_page_among_the_first_hits(topic: str) -> None:
    found = {words: [hit.page.topic for hit in search_pages(words)[:FIRST]] for words in QUESTIONS[topic].split(" | ")}
    assert {words: topics for words, topics in found.items() if topic not in topics} == {}


def test_almost_all_questions_find_their_page_first() -> None:
    pairs = [(words, topic) for topic, questions in QUESTIONS.items() for words in questions.split(" | ")]
    first = [topic == search_pages(words)[0].page.topic for words, topic in pairs]
    assert sum(first) >= 0.8 * len(first) > 50


def test_question_in_full_finds_the_section_that_answers() -> None:
    found = {words: search_pages(words)[0].topic for questions in IN_FULL.values() for words in questions.split(" | ")}
    assert found == {words: topic for topic, questions in IN_FULL.items() for words in questions.split(" | ")}


@pytest.mark.parametrize(("one", "several"), [("loss", "losses"), ("class", "classes"), ("image", "images")])
def test_one_and_several_find_the_same(one: str, several: str) -> None:
    assert [hit.page for hit in search_pages(one)] == [hit.page for hit in search_pages(several)] != []


def test_words_are_found_whole() -> None:
    assert [hit.page.topic for hit in search_pages("mac")] == ["platforms"]  # and not "machine"
