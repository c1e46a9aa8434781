"""The comparison of transcripts: other numbers and cut lines pass; a removed line, a label or a column does not."""

from __future__ import annotations

import pytest

from tests.support.page_blocks import difference

LS = """
RUN   STATE     EPOCH  STEP  EPOCH LOSS  MIOU            BEST            AGE
demo  finished  7/7    126   0.6134      0.4939 (11/19)  0.4939 (11/19)  43s
"""
EVAL = """
          IoU    Dice  precision
fence  0.0000  0.0000          -
car    0.4255  0.5969     0.6095
wall   absent       -          -
mean   0.4884  0.5932     0.7301
val: mIoU 0.4884 over 11 of 19 classes  20 images  (best.pt, step 108)
"""
TRAIN = """
run folder: runs/demo
epoch 1/7  step 10/18  loss 2.42  lr 2.37e-03  37.2 images/s  eta 1s epoch, 13s run
epoch 1/7  step 18/18  loss 1.41  lr 4.19e-03  42.8 images/s  eta 0s epoch, 2m05s run
saved checkpoints/epoch_0007.pt at step 126 (best)
finished: 7 epochs
"""


@pytest.mark.parametrize(
    ("output", "transcript"),
    [
        (LS, LS.replace("43s", "3d").replace("7/7    126 ", "45/45  810 ").replace("0.6134", "-     ")),
        (EVAL, EVAL.replace("fence  0.0000  0.0000", "sky    0.8597  0.9246")),
        (EVAL, "...\ncar    0.1  0.2  0.3\n...\nval: mIoU 0.3 over 3 of 4 classes  2 images  (last.pt, step 1)"),
        (TRAIN, TRAIN.replace("epoch 1/7  step 10/18", "epoch 45/45  step 8/8").replace("2m05s", "13s")),
        (TRAIN, "run folder: runs/demo-2\n...\nfinished: 45 epochs"),
        (EVAL.replace("wall   absent       -          -\n", ""), EVAL.replace("car    0.4255", "...\ncar    0.4255")),
        ("error: " + "word " * 30 + "end", "error: " + "word " * 20 + "\n" + "word " * 10 + "end"),
    ],
)
def test_other_numbers_and_cut_lines_are_the_same_shape(output: str, transcript: str) -> None:
    assert difference(output, transcript) == ""


@pytest.mark.parametrize(
    ("output", "old", "new"),
    [
        (LS, "EPOCH LOSS", "LOSS"),
        (LS, "(11/19)  0.4939", "0.4939"),
        (LS, "  AGE", ""),
        (EVAL, "  precision", ""),
        (EVAL, "mean   0.4884  0.5932     0.7301\n", ""),
        (EVAL, "0.5969     0.6095", "0.5969"),
        (TRAIN, "run folder: runs/demo\n", ""),
        (TRAIN, "finished: 7 epochs\n", "finished: 7 epochs\nended\n"),
        (TRAIN, "run folder: runs/demo\nepoch", "run folder: runs/demo epoch"),
    ],
)
def test_a_changed_label_line_or_column_is_another_shape(output: str, old: str, new: str) -> None:
    assert output.count(old) >= 1
    assert difference(output.replace(old, new), output) != ""
    assert difference(output, output.replace(old, new)) != ""
