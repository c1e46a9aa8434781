"""Wrong calls of the losses: each is refused with a sentence about what was given and what to give."""

import functools
import inspect
import itertools
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from segapp import losses
from segapp.losses import CriterionCE, CriterionDice, CriterionSum, PlainCriterion
from segapp.losses.confusion import LogitsTile, upsample_sets
from tests.support.loss_cases import criteria, draw

KINDS = [getattr(losses, f"Criterion{name}") for name in ("CE", "OHEM", "Lovasz", "BCE", "Focal", "Dice", "Tversky")]
CRITERIA = [*criteria().values(), PlainCriterion(functools.partial(F.cross_entropy, ignore_index=255))]
UPSAMPLED = [losses.upsample_cross_entropy, losses.upsample_confusion]
VIEWS = [losses.upsample_argmax, losses.upsample_probabilities]
SHAPE, FIT = r"logits have shape \({}\): give \(N, C, h, w\)", r"shape \({}\) do not fit a target of shape \({}\): .*{}"
LAST = FIT.format("5, 5, 6, 4", "5, 17, 23", r"to be last: give logits.permute\(0, 3, 1, 2\)")
SWAPPED = FIT.format("5, 4, 5, 6", "5, 23, 17", "height and width of one of them seem to be swapped")
SQUASHED = FIT.format("5, 1, 5, 1", "5, 17, 23", "squashed, first resize the logits")
INDEX, TERM = "give an integer .*weights as weight=", r"give pairs such as \(1.0, CriterionCE\(\)\), and .*Plain"

MISUSES = [  # functions or criteria, call with logits (5, 4, 5, 6) and target (5, 17, 23), error, words
    (CRITERIA + UPSAMPLED, lambda f, x, t: f(x, t.numpy()), TypeError, "target of type ndarray: give a tensor"),
    (CRITERIA + UPSAMPLED, lambda f, x, t: f(x.numpy(), t), TypeError, "ndarray: give"),
    (CRITERIA, lambda f, x, t: f((x, x.numpy()), t), TypeError, "logits of type ndarray: give a tensor"),
    (CRITERIA + UPSAMPLED, lambda f, x, t: f(x, t[:, None]), ValueError, r"\(5, 1, 17, 23\): give \(N, H, W\)"),
    (CRITERIA + UPSAMPLED, lambda f, x, t: f(x, t.float()), TypeError, "target is torch.float32: give .*int"),
    (CRITERIA + UPSAMPLED, lambda f, x, t: f(x.long(), t), TypeError, "logits are torch.int64: give a floating-point"),
    (CRITERIA[:-1] + UPSAMPLED, lambda f, x, t: f(t, x), ValueError, SHAPE.format("5, 17, 23")),
    (CRITERIA + UPSAMPLED, lambda f, x, t: f(x[0], t[0]), ValueError, SHAPE.format("4, 5, 6")),
    (CRITERIA + UPSAMPLED, lambda f, x, t: f(x, t[:3]), ValueError, "5 images and the target 3: give the same number"),
    (CRITERIA, lambda f, x, t: f({"y": x, "aux": x}, t), TypeError, r"keys \['aux', 'y'\]: the main .* under \"out\""),
    (CRITERIA, lambda f, x, t: f(3, t), TypeError, "outputs are a int: give logits"),
    (CRITERIA, lambda f, x, t: f([], t), ValueError, "empty sequence"),
    (CRITERIA, lambda f, x, t: f(x.permute(0, 2, 3, 1), t), ValueError, LAST),
    (CRITERIA, lambda f, x, t: f({"out": x, "aux": x.permute(0, 2, 3, 1)}, t), ValueError, LAST),
    (CRITERIA, lambda f, x, t: f.statistics((x, x, x.permute(0, 2, 3, 1)), t), ValueError, LAST),
    (CRITERIA, lambda f, x, t: f(x, t.mT), ValueError, SWAPPED),
    (CRITERIA, lambda f, x, t: f(x[:, :1, :, :1], t), ValueError, SQUASHED),
    *((KINDS + UPSAMPLED, lambda f, x, t, i=i: (f() if f in KINDS else f)(x[:, :1], t % i), ValueError,
       "logits have one class, .* one logit per pixel, .* multilabel=True") for i in (1, 2)),
    (KINDS[:1], lambda f, x, t: f()(x[:, :1], t[:, None] * 1.0), ValueError, "logits have one class"),
    *((KINDS, lambda f, x, t, i=i: f(ignore_index=i), TypeError, f"ignore_index is {name}: {INDEX}")
      for i, name in ((None, "None"), (True, "a bool"), ("x", "a str"))),
    *(([f for f in KINDS if name in inspect.signature(f).parameters],
       lambda f, x, t, name=name, value=value: f(**{name: value}), ValueError, f"{name}={value!r}: give a")
      for name in ("label_smoothing", "smooth", "gamma", "alpha", "beta", "pos_weight", "aux_weight", "threshold")
      for value in (None, "x", True, -0.5, math.nan, math.inf)),
    *((KINDS[1:2], lambda f, x, t, value=value: f(min_kept=value), TypeError, "min_kept=.* is not a whole number: us")
      for value in (None, "x", 0.5)),
    (KINDS[:1], lambda f, x, t: f(implementation="x"), ValueError, "implementation='x': give one of auto, reference"),
    *(([f for f in KINDS if name in inspect.signature(f).parameters],
       lambda f, x, t, name=name, value=value: f(**{name: value}), TypeError, f"{name}={value!r}: give True or False")
      for name in ("align_corners", "multilabel") for value in ("no", None, 1)),
    *((UPSAMPLED, lambda f, x, t, name=name: f(x, t, **{name: "x"}), (TypeError, ValueError), f"{name}='x': give ")
      for name in ("align_corners", "label_smoothing")),
    (VIEWS, lambda f, x, t: f(x, (8, 9), align_corners="x"), TypeError, "align_corners='x': give True or False"),
    *((VIEWS, lambda f, x, t, view=view: f(view, (8, 9)), TypeError, "logits given as .*: give a tensor")
      for view in (None, [None], 3)),
    *(([upsample_sets], lambda f, x, t, p=p: f(x, (8, 9), p), ValueError, "threshold=.*: give a number from 0 to 1")
      for p in (None, "x", 1.5)),
    *(([losses.pixel_wise_divergence], lambda f, x, t, each=each: f(x, x, temperature=each), ValueError, "temperature=")
      for each in (None, "x", 0.0)),
    *((KINDS[:2] + KINDS[3:5], lambda f, x, t, n=n: f(weight=[1.0] * n)(x, t), ValueError,
       rf"weight has shape \({n},\): give one weight for each of 4 classes") for n in (3, 5)),
    (UPSAMPLED, lambda f, x, t: f(x, t, weight=torch.tensor([1.0, 2, 3, -1])), ValueError, "-1.0.: give finite numb"),
    *((KINDS[:1] + UPSAMPLED[:1], lambda f, x, t, n=n, c=c: (f() if f in KINDS else f)(x, torch.ones(n, c, 17, 23)),
       ValueError, words) for n, c, words in ((5, 3, r"\(5, 3, 17, 23\): give \(N, C, H, W\) with C = 4"),
                                              (3, 4, "5 images and the target 3"))),
    (UPSAMPLED[:1], lambda f, x, t: f(x, torch.ones(5, 4, 17, 23), weight=torch.ones(3)), ValueError, "of 4 classes"),
    ([CriterionSum], lambda f, x, t: f([(1.0, CRITERIA[0]), (math.nan, CRITERIA[1])]), ValueError, "factor=nan: give"),
    ([losses.CriterionDistilled], lambda f, x, t: f(CRITERIA[0], {"a": 1, "b": None}), ValueError, "b=None: give"),
    *(([losses.CriterionMaskClassification], lambda f, x, t, o=o: f(**{"num_queries": 2, "num_classes": 3} | o),
       (TypeError, ValueError), f"{next(iter(o))}=")
      for o in ({"num_queries": 0}, {"num_classes": None}, {"no_object": "x"}, {"align_corners": 0})),
    (UPSAMPLED, lambda f, x, t: f(x, t, ignore_index=None), TypeError, f"ignore_index is None: {INDEX}"),
    ([PlainCriterion], lambda f, x, t: f(F.cross_entropy, ignore_index=None), TypeError, f"index is None: {INDEX}"),
    ([CriterionCE], lambda f, x, t: f(torch.ones(4)), TypeError, f"ignore_index is a Tensor: {INDEX}"),
    ([CriterionCE], lambda f, x, t: f([0.1, 0.2]), TypeError, f"ignore_index is a list: {INDEX}"),
    (KINDS[1:], lambda f, x, t: f(255), TypeError, "takes 1 positional argument but 2 were given"),
    (KINDS[1:2], lambda f, x, t: f(threshold=torch.ones(4)), ValueError, "threshold=tensor.*: give a number"),
    (KINDS[1:2], lambda f, x, t: f(threshold=0.0), ValueError, r"threshold=0\.0"),
    (KINDS[6:], lambda f, x, t: f(gamma=0), ValueError, "gamma=0"),
    (KINDS[3:4], lambda f, x, t: f(weight=[0.0, 0.0]), ValueError, r"weight=\[0\.0, 0\.0\]"),
    (KINDS[3:], lambda f, x, t: f(multilabel=True)(x, t % 16 + 16), ValueError, "holds the ids 16, 17"),
    ([losses.CriterionMaskClassification], lambda f, x, t: f(4, 3)((x, x[:, :, 0, :4]), t[:, :15, :18] % 2 * 7),
     ValueError, "ids 7"),
    ([CriterionCE], lambda f, x, t: f(weight=torch.tensor([-1.0, 1.0])), ValueError, r"weight=\[-1.0, 1.0\]"),
    (UPSAMPLED, lambda f, x, t: f(x, t, weight=[1.0] * 4), TypeError, "weight of type list: give a tensor"),
    (UPSAMPLED, lambda f, x, t: f(x, t, weight=torch.ones(3)), ValueError, "one weight for each of 4 classes"),
    (UPSAMPLED[:1], lambda f, x, t: f(x, t, implementation="fast"), ValueError, "implementation='fast'"),
    (VIEWS, lambda f, x, t: f(x[0], (8, 9)), ValueError, SHAPE.format("4, 5, 6")),
    (VIEWS, lambda f, x, t: f([x, x.numpy()], (8, 9)), TypeError, "logits of type ndarray: give a tensor"),
    (VIEWS, lambda f, x, t: f(x.long(), (8, 9)), TypeError, "logits are torch.int64: give"),
    (VIEWS, lambda f, x, t: f([], (8, 9)), ValueError, "no views"),
    (VIEWS, lambda f, x, t: f([[]], (8, 9)), ValueError, "no views"),
    (VIEWS, lambda f, x, t: f([x, x[:1]], (8, 9)), ValueError, "N and C must agree"),
    (VIEWS, lambda f, x, t: f([[LogitsTile(x, 4, 0, (8, 9), (8, 9))]], (4, 9)), ValueError, "no tile covers the o"),
    *((VIEWS, lambda f, x, t, size=size: f(x, size), ValueError, r"size=.*: give \(H, W\) of at least 1, such as t")
      for size in (16, (0, 4), (4.5, 8), (2, 17, 23), None, "ab")),
    *(([CriterionSum], lambda f, x, t, terms=terms: f(terms), TypeError, rf"the term \({given}\): {TERM}")
      for terms, given in [
        ([CriterionCE(), CriterionDice()], "CriterionCE"),
        ([(1.0, CriterionCE()), (0.5, nn.CrossEntropyLoss())], "float, CrossEntropyLoss"),
        (((c, 1.0) for c in CRITERIA[:1]), "CriterionCE, float"),
        ([(1.0, CriterionCE(), 2.0)], "float, CriterionCE, float"),
        (CriterionCE(), "CriterionCE")]),
]  # fmt: skip


@pytest.mark.parametrize(("functions", "call", "error", "words"), MISUSES)
def test_misuse_is_named(functions, call, error, words):
    for function in functions:
        with pytest.raises(error, match=words):
            call(function, *draw())


def is_accepted(low, high):
    try:
        return CRITERIA[-1](torch.ones(1, 2, *low), torch.zeros(1, *high, dtype=torch.uint8)) > 0
    except ValueError:
        return False


def test_one_stride_must_explain_both_sides():
    """By exact intervals, and for the sizes that strided convolutions give."""
    for (H, W), (h, w) in itertools.product(itertools.product((1, 2, 5, 8, 33), repeat=2), repeat=2):
        lows = [Fraction(H, h + 1), Fraction(W, w + 1)]
        highs = [Fraction(side, s - 1) if s > 1 else math.inf for side, s in ((H, h), (W, w))]
        assert is_accepted((h, w), (H, W)) == (max(lows) < min(highs)), (h, w, H, W)
    for side, stride, half in itertools.product((31, 32, 33), (2, 7, 16, 40), (0, 1, 3)):
        image, kernel = torch.empty(1, 1, side, 2 * side + 5), torch.empty(1, 1, 2 * half + 1, 2 * half + 1)
        assert is_accepted(F.conv2d(image, kernel, stride=stride, padding=half).shape[2:], image.shape[2:])
    assert is_accepted((97, 97), (769, 769))
    assert is_accepted((2, 16), (33, 500))
    logits, target = draw()
    for function in UPSAMPLED:  # they resample on purpose
        function(logits, target.mT)
