"""Forty questions of users of segmentation trainers, as they type them: each finds its page among the first three hits.

The questions are those of threads of SMP, mmsegmentation, ultralytics, nnU-Net, lightly-train and others.
"""

from __future__ import annotations

import pytest

from segapp.docs.pages import search_pages

FIRST = 3
QUESTIONS: list[tuple[str, str]] = [
    ("GradScaler", "own-loop"),
    ("CriterionDSN is_target_scattered", "own-loop"),
    ("loss in forward mean of means", "own-loop"),
    ("Windows WSL", "platforms"),
    ("macOS MPS Apple Silicon", "platforms"),
    ("ROCm AMD", "platforms"),
    ("Colab", "platforms"),
    ("Kaggle notebook", "platforms"),
    ("Jupyter", "python"),
    ("Docker", "platforms"),
    ("conda", "platforms"),
    ("how large is the installation", "platforms"),
    ("which GPU do I need", "platforms"),
    ("how much GPU memory", "plan"),
    ("how long does training take", "speed"),
    ("images and masks in folders", "own-data"),
    ("custom dataset", "own-data"),
    ("masks are 0 and 255", "masks"),
    ("colored masks", "masks"),
    ("RGB masks palette", "masks"),
    ("palette PNG", "masks"),
    ("grayscale rgba", "masks"),
    ("unlabeled pixels", "masks"),
    ("ignore index background", "masks"),
    ("binary segmentation one logit or two classes", "masks"),
    ("COCO polygons", "own-data"),
    ("YOLO labelme annotations", "own-data"),
    ("test split", "tune"),
    ("images of different sizes", "tune"),
    ("crop size", "tune"),
    ("how many images do I need", "tune"),
    ("which loss", "choose-loss"),
    ("dice focal lovasz", "choose-loss"),
    ("which model", "choose-model"),
    ("class imbalance", "choose-loss"),
    ("learning rate batch size", "tune"),
    ("how many epochs", "tune"),
    ("early stopping", "tune"),
    ("train a finished run longer", "resume-refused"),
    ("more images same model", "resume-refused"),
    ("fine-tune freeze backbone", "weights"),
    ("transfer learning", "weights"),
    ("other number of classes", "weights"),
    ("IoU is 0 or nan for a class", "low-miou"),
    ("overfitting", "tune"),
    ("validation loss rises", "tune"),
    ("confidence per pixel", "predict"),
    ("probability threshold", "predict"),
    ("inference without segapp", "run-elsewhere"),
    ("TensorRT OpenVINO CoreML", "run-elsewhere"),
    ("int8 quantization", "run-elsewhere"),
    ("FPS frames per second", "speed"),
    ("multi-GPU speed-up", "several-gpus"),
    ("CUDA out of memory", "out-of-memory"),
    ("gradient checkpointing", "recompute"),
    ("FSDP", "several-gpus"),
    ("NaN fp16", "not-finite"),
    ("reproducible", "deterministic"),
    ("custom model", "own-parts"),
    ("custom loss", "own-parts"),
    ("callbacks", "python"),
    ("TensorBoard", "train"),
    ("polygons GeoJSON", "predict"),
    ("webcam", "predict"),
    ("license of weights commercial use", "platforms"),
    ("cite", "platforms"),
    ("report a bug", "platforms"),
    ("privacy telemetry", "platforms"),
]


@pytest.mark.parametrize(("words", "topic"), QUESTIONS, ids=lambda value: value)
def test_question_finds_its_page_among_the_first_hits(words: str, topic: str) -> None:
    found = [hit.page.topic for hit in search_pages(words)[:FIRST]]
    assert topic in found, f"{words}: {found}"


def test_words_are_found_whole() -> None:
    assert [hit.page.topic for hit in search_pages("mac")] == ["platforms"]  # and not "machine"


def test_almost_all_questions_find_their_page_first() -> None:
    first = [topic == search_pages(words)[0].page.topic for words, topic in QUESTIONS]
    assert sum(first) >= 0.8 * len(first)


IN_FULL: list[tuple[str, str]] = [
    ("Colab, Kaggle, Jupyter?", "platforms#colab-kaggle-and-jupyter"),
    ("Docker?", "platforms#docker"),
    ("How large is the installation?", "platforms#how-large-is-the-installation"),
    ("Which GPU and how much memory do I need?", "platforms#which-gpu-do-i-need"),
    ("How long will it take?", "speed"),
    ("I have images/ and masks/", "own-data#images-and-masks-in-splits"),
    ("Masks are 0 and 255", "masks"),
    ("Colored masks", "masks"),
    ("Palette PNGs, gray or RGBA images", "masks#which-images-can-be-read"),
    ("Unlabeled is not background", "masks#unlabeled-is-not-background"),
    ("Binary: one logit or two classes?", "masks#two-classes-one-logit-or-two"),
    ("COCO, YOLO, labelme polygons", "own-data#annotations-instead-of-masks"),
    ("A third, test split", "tune#the-test-split"),
    ("Different image sizes: crop or resize, which crop size?", "tune#different-image-sizes-crop-or-resize"),
    ("How many images do I need?", "tune#how-many-images-do-i-need"),
    ("Which loss?", "choose-loss"),
    ("Which model, with what mIoU and speed?", "choose-model"),
    ("Class imbalance", "choose-loss#class-imbalance"),
    ("Learning rate, batch, epochs for N images", "tune#batch-size-and-learning-rate"),
    ("Early stopping", "tune#early-stopping"),
    ("Train a finished run longer", "train#train-a-finished-run-longer"),
    ("Fine-tune, freeze", "weights#fine-tune-freeze-layers-lower-learning-rates"),
    ("Other number of classes from old weights", "weights#another-number-of-classes"),
    ("IoU 0 or nan for a class", "low-miou"),
    ("Overfitting: validation loss rises", "tune#overfitting-the-validation-loss-rises"),
    ("Per-pixel confidence", "predict#leave-out-uncertain-pixels"),
    ("Inference without segapp", "run-elsewhere"),
    ("TensorRT", "run-elsewhere#tensorrt"),
    ("Frames per second of a model", "speed"),
    ("Several GPUs: how, and what speed-up?", "several-gpus"),
    ("Out of memory", "out-of-memory"),
    ("NaN with fp16", "not-finite"),
    ("Reproducibility", "deterministic"),
    ("Custom data set, model, loss", "own-parts"),
    ("Callbacks", "python#callbacks-and-stopping"),
    ("Open TensorBoard", "train#tensorboard-weights--biases-and-mlflow"),
    ("Polygons, GeoJSON or COCO from predictions", "predict"),
    ("License of weights", "platforms#licenses"),
]


@pytest.mark.parametrize(("words", "topic"), IN_FULL, ids=lambda value: value)
def test_question_in_full_finds_the_section_that_answers(words: str, topic: str) -> None:
    assert search_pages(words)[0].topic == topic
