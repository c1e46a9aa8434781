import copy
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import segapp.errors
import segapp.memory
import segapp.metrics
import segapp.precision
from segapp.losses import CriterionDice, CriterionSum, PlainCriterion, upsample_argmax, upsample_confusion
from segapp.metrics import ConfusionMatrix, Counts, LabelCounts


def confusion_of(prediction, target, num_classes, **kwargs) -> ConfusionMatrix:
    confusion = ConfusionMatrix(num_classes, **kwargs)
    confusion.update(torch.as_tensor(prediction)[None], torch.as_tensor(target)[None])
    return confusion


def test_scores_by_hand():
    """Class 2 is neither predicted nor in the target; 3 is predicted in the first table only."""
    assert confusion_of([[0, 3]], [[0, 0]], 4).scores().iou == (0.5, None, None, 0.0)
    assert confusion_of([[0, 3]], [[0, 0]], 4).scores().recall == (0.5, None, None, None)
    confusion = confusion_of([[0, 0, 1], [1, 2, 0]], [[0, 1, 1], [1, 255, 255]], 3)
    assert confusion.matrix.tolist() == [[1, 0, 0], [1, 2, 0], [0, 0, 0]]
    scores = confusion.scores()
    assert scores.iou == (1 / 2, 2 / 3, None)
    assert scores.miou == pytest.approx(7 / 12)
    assert scores.mean_recall == pytest.approx(5 / 6)
    assert scores.dice == (2 / 3, 4 / 5, None)
    assert scores.precision == (1 / 2, 1.0, None)
    assert scores.mean_precision == pytest.approx(3 / 4)
    assert scores.frequency == (1 / 4, 3 / 4, 0.0)
    assert scores.frequency_weighted_iou == pytest.approx(1 / 8 + 1 / 2)


@st.composite
def batches(draw, fewest_classes=1):
    """A number of classes, an id of ignored pixels, and predictions and targets (B, N, H, W) of B batches."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_classes, ignore_index = draw(st.integers(fewest_classes, 8)), draw(st.sampled_from([255, -1]))
    shape = draw(st.tuples(*[st.integers(1, most) for most in (3, 2, 9, 9)]))
    known = generator.choice(num_classes, draw(st.integers(1, num_classes)), replace=False)  # the others are absent
    target = generator.choice(known, shape)
    prediction = np.where(generator.random(shape) < 0.6, target, generator.integers(0, num_classes, shape))
    target[generator.random(shape) < draw(st.sampled_from([0.0, 0.3, 0.95]))] = ignore_index
    return num_classes, ignore_index, torch.from_numpy(prediction), torch.from_numpy(target)


def assert_scores_equal(ours, theirs):
    """torchmetrics gives 0 where we give None, in float32."""
    assert [0.0 if value is None else value for value in ours] == pytest.approx(theirs.tolist(), abs=1e-6)


def assert_each_class_matches(scores, kind, *pixels, **options):
    """Compare the scores of every class with the functions of torchmetrics for a kind of labels."""
    names = {"iou": "jaccard_index", "dice": "f1_score", "precision": "precision", "recall": "recall"}
    for ours, theirs in names.items():
        assert_scores_equal(
            getattr(scores, ours), of_torchmetrics(f"{kind}_{theirs}")(*pixels, average="none", **options)
        )


def of_torchmetrics(name):
    from torchmetrics.functional import classification

    return getattr(classification, name)


@given(batches(fewest_classes=2))
@settings(max_examples=25)
def test_every_score_matches_torchmetrics(case):
    """Its macro means of precision and recall count a class without denominator as 0, which ours leave out."""
    num_classes, ignore_index, prediction, target = case
    confusion = ConfusionMatrix(num_classes, ignore_index=ignore_index)
    for each in zip(prediction, target, strict=True):
        confusion.update(*each)
    scores = confusion.scores()
    pixels = prediction.flatten(), target.flatten(), num_classes
    options = {"ignore_index": ignore_index}
    assert torch.equal(confusion.matrix, of_torchmetrics("multiclass_confusion_matrix")(*pixels, **options))
    assert scores.num_valid_px == int((target != ignore_index).sum())
    if not scores.num_valid_px:
        return
    assert_each_class_matches(scores, "multiclass", *pixels, **options)
    assert_scores_equal(
        [scores.miou, scores.mean_dice, scores.frequency_weighted_iou, scores.pixel_accuracy],
        torch.stack([
            of_torchmetrics("multiclass_jaccard_index")(*pixels, average="macro", **options),
            of_torchmetrics("multiclass_f1_score")(*pixels, average="macro", **options),
            of_torchmetrics("multiclass_jaccard_index")(*pixels, average="weighted", **options),
            of_torchmetrics("multiclass_accuracy")(*pixels, average="micro", **options),
        ]),
    )  # fmt: skip


@given(batches(fewest_classes=2), st.integers(0, 2**32))
@settings(max_examples=20)
def test_every_score_of_sets_matches_torchmetrics(case, seed):
    """Classes that do not exclude each other; a pixel is ignored for all of them."""
    num_classes, ignore_index, prediction, target = case
    valid = target != ignore_index
    generator = torch.Generator().manual_seed(seed)
    prediction, sets = (torch.randint(0, 1 << num_classes, target.shape, generator=generator) for _ in range(2))
    counts = LabelCounts(num_classes)
    for each in zip(prediction, torch.where(valid, sets, -1), strict=True):
        counts.update(*each)
    scores = counts.scores()

    def as_maps(bits):
        return (bits.flatten().unsqueeze(1) >> torch.arange(num_classes)) & 1

    pixels = as_maps(prediction), torch.where(valid.view(-1, 1), as_maps(sets), -1), num_classes
    options = {"ignore_index": -1}
    assert torch.equal(counts.matrix, of_torchmetrics("multilabel_confusion_matrix")(*pixels, **options))
    assert scores.num_valid_px == int(valid.sum())
    assert_each_class_matches(scores, "multilabel", *pixels, **options)
    assert_scores_equal(
        [scores.pixel_accuracy], of_torchmetrics("multilabel_accuracy")(*pixels, average="micro", **options)[None]
    )


@pytest.mark.parametrize("shape", [(1, 2, 2), (0, 4, 4), (3, 0, 5)])
def test_no_valid_pixel_gives_no_score(shape):
    confusion = ConfusionMatrix(3)
    confusion.update(torch.zeros(shape, dtype=torch.int64), torch.full(shape, 255, dtype=torch.uint8))
    scores = confusion.scores()
    assert scores.iou == scores.recall == scores.frequency == (None, None, None)
    assert (scores.miou, scores.pixel_accuracy, scores.mean_recall, scores.frequency_weighted_iou) == (None,) * 4
    assert scores.num_valid_px == 0
    json.dumps(vars(scores), allow_nan=False)


def test_ignored_class_has_no_iou_and_predicting_it_is_wrong():
    scores = confusion_of([[0, 1, 1]], [[1, 1, 0]], 2, ignore_index=0).scores()
    assert scores.iou == (None, 0.5)
    assert scores.pixel_accuracy == 0.5


@pytest.mark.parametrize(
    ("counts", "named"), [(ConfusionMatrix(4), "class"), (LabelCounts(2, ignore_index=255), "set of classes")]
)
@pytest.mark.parametrize(("prediction", "target"), [(4, 0), (-1, 0), (0, 4), (0, -1), (0, 2**40)])
def test_ids_out_of_range_are_refused_and_not_counted(prediction, target, counts, named):
    """A prediction where the target is ignored may be any. Two classes have four sets."""
    before = counts.counts.clone()
    counts.update(torch.tensor([[[7, 3]]]), torch.tensor([[[255, 3]]]))
    after = counts.counts.clone()
    assert (after - before).sum() == (1 if named == "class" else 2)
    with pytest.raises(ValueError, match=rf"1 pixels .* not a {named} 0\.\.3 .* ignore_index=255"):
        counts.update(torch.tensor([[[prediction, 3]]]), torch.tensor([[[target, 3]]]))
    assert torch.equal(counts.counts, after)


@pytest.mark.parametrize(
    ("prediction_type", "target_type"),
    [
        (torch.uint8, torch.int16),
        (torch.uint8, torch.uint16),
        (torch.int32, torch.uint8),
        (torch.int64, torch.uint32),
        (torch.int64, torch.uint64),
    ],
)
def test_every_integer_type_counts_the_same(prediction_type, target_type):
    """In inference mode too, and the inputs stay as they were."""
    prediction = torch.tensor([[[0, 1, 2, 5]]]).to(prediction_type)
    target = torch.tensor([[[2, 1, 255, 1]]]).to(target_type)
    confusion = ConfusionMatrix(6)
    with torch.inference_mode():
        confusion.update(prediction, target)
    assert confusion.matrix.nonzero().tolist() == [[1, 1], [1, 5], [2, 0]]
    assert (prediction.tolist(), target.tolist()) == ([[[0, 1, 2, 5]]], [[[2, 1, 255, 1]]])


@pytest.mark.parametrize(
    ("metric", "ids"),
    [
        (ConfusionMatrix(256, ignore_index=-1), torch.tensor([255, 156, 3], dtype=torch.uint8)),
        (ConfusionMatrix(256, ignore_index=-100), torch.tensor([255, 156, 3], dtype=torch.uint8)),
        (LabelCounts(8), torch.tensor([255, 156, 3], dtype=torch.uint8)),
        (ConfusionMatrix(128, ignore_index=2**64 - 2), torch.tensor([127, 0, 3], dtype=torch.int8)),
        (ConfusionMatrix(2), torch.tensor([True, False, True])),
    ],
)
def test_an_id_is_not_ignored_because_its_type_is_small(metric, ids):
    """In uint8, -1 is 255 and -100 is 156."""
    metric.update(ids, ids)
    wide = [int(each) for each in ids]
    if isinstance(metric, LabelCounts):
        assert metric.matrix[:, 1, 1].tolist() == [sum(each >> c & 1 for each in wide) for c in range(8)]
    else:
        assert {(t, p): int(metric.matrix[t, p]) for t, p in metric.matrix.nonzero().tolist()} == {
            (each, each): wide.count(each) for each in wide
        }
        with pytest.raises(ValueError, match="1 pixels whose prediction or target is not a class"):
            ConfusionMatrix(3).update(*torch.tensor([[0, 2], [0, -1]], dtype=torch.int8))
    plain = PlainCriterion(torch.nn.functional.cross_entropy, ignore_index=metric.ignore_index)
    assert plain.denominator(ids.to(torch.uint8)) == 3


@pytest.fixture(params=[ConfusionMatrix, LabelCounts])
def filled(request):
    """Counts of two batches for 3 classes, of which class 2 occurs nowhere, and counts of the first batch."""
    counts, first = request.param(3, ignore_index=255), request.param(3, ignore_index=255)
    for number, (prediction, target) in enumerate([([[[0, 1, 1]]], [[[0, 0, 255]]]), ([[[1, 0, 1]]], [[[1, 1, 1]]])]):
        counts.update(torch.tensor(prediction), torch.tensor(target))
        if not number:
            first.update(torch.tensor(prediction), torch.tensor(target))
    return counts, first


def test_computed_tensors_are_the_scores(filled):
    for counts in filled:
        scores, computed = vars(counts.scores()), counts.compute()
        assert computed.keys() == scores.keys()
        for name, value in scores.items():
            known = [
                float("nan") if each is None else each for each in (value if isinstance(value, tuple) else [value])
            ]
            torch.testing.assert_close(
                computed[name].view(-1), torch.tensor(known, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
            )
    assert counts.compute()["iou"].isnan()[2]
    counts.reset()
    assert counts.compute()["miou"].isnan()


def test_counts_are_merged_saved_and_restored(filled):
    counts, first = filled
    rest = type(counts)(3, ignore_index=255).merge(counts.matrix - first.matrix)
    assert torch.equal(rest.merge(first).counts, counts.counts)
    state = counts.state_dict()
    counts.reset()
    again = type(counts)(3, ignore_index=255).to("cpu")
    again.load_state_dict(state)
    assert torch.equal(again.counts, rest.counts), "a state does not change with its metric"
    assert repr(again) == f"{type(counts).__name__}(3, ignore_index=255)"


KINDS = [ConfusionMatrix, LabelCounts]
IDS = torch.zeros(1, 3, 5, dtype=torch.int64)


def other(counts):
    return KINDS[type(counts) is ConfusionMatrix](3, ignore_index=255)


def load(metric, **changes):
    metric.load_state_dict(metric.state_dict() | changes)


MISUSES = [  # call with a metric c of three classes that ignores 255, words
    (lambda c: Counts(3, ignore_index=255), "Counts is the base class .*: use ConfusionMatrix or LabelCounts"),
    *((lambda c, n=n: type(c)(n), f"num_classes={n!r}: give an integer") for n in (4.0, "4", None, True)),
    *((lambda c, n=n: type(c)(n), f"num_classes={n}: give at least one class") for n in (0, -1)),
    (lambda c: type(c)(3, "cpu"), "takes 2 positional arguments"),
    *((lambda c, i=i: type(c)(3, ignore_index=i), f"ignore_index={i!r}: give an int") for i in ("cpu", None, 0.5)),
    *((lambda c, d=d: type(c)(3, device=d), f"device={d!r} cannot hold counts: give") for d in ("gpu", "meta", 0.5)),
    *((lambda c, d=d: c.to(d), f"device={d!r} cannot hold counts: give") for d in ("cpu:x", None, torch.float32)),
    (lambda c: c.update(IDS.numpy(), IDS), "prediction of type ndarray: give a tensor"),
    (lambda c: c.update(IDS, IDS.tolist()), "target of type list: give a tensor"),
    (lambda c: c.update(torch.zeros(1, 3, 3, 5), IDS), "prediction of torch.float32: .* take the argmax"),
    (lambda c: c.update(IDS, IDS * 0.5), "target of torch.float32: class ids are integers"),
    (lambda c: c.update(IDS.to("meta"), IDS), "prediction on meta holds no values"),
    (lambda c: c.update(IDS, IDS.to("meta")), "target on meta holds no values"),
    (lambda c: c.update(IDS, IDS[:, :2]), r"\(1, 3, 5\), target of shape \(1, 2, 5\): they must have the same"),
    (lambda c: c.update(IDS[:, 0], IDS), r"\(1, 5\), target of shape \(1, 3, 5\): they must have the same"),
    (lambda c: c.update(IDS[None], IDS[None]), r"\(1, 1, 3, 5\): .* one (class|set of classes) for each pixel"),
    *((lambda c, make=make: c.merge(make(c)), f"255\\) cannot take {words}: give counts of the same")
      for words, make in [
        (r"\w+\(4, ignore_index=255\)", lambda c: type(c)(4, ignore_index=255)),
        (r"\w+\(3, ignore_index=7\)", lambda c: type(c)(3, ignore_index=7)),
        (r"OTHER\(3, ignore_index=255\)", other),
        ("a ndarray", lambda c: c.matrix.numpy()),
        (r"counts of shape \(2, .* on cpu", lambda c: c.matrix[:2]),
        (r"counts of shape \((9|12),\) and torch.int64 on cpu", lambda c: c.counts),
        ("counts of .* and torch.float64 on cpu", lambda c: c.matrix.double()),
        ("counts of .* and torch.bool on cpu", lambda c: c.matrix > 0),
        ("counts of .* and torch.int64 on meta", lambda c: c.matrix.to("meta")),
        ("negative counts, down to -1", lambda c: torch.arange(c.matrix.numel()).view(c.matrix.shape) - 1)]),
    (lambda c: ConfusionMatrix.from_matrix(c.matrix[:2, :].flatten(1)), r"\(2, .* take .* \(2, [34]\).* \(2, 2\), at"),
    (lambda c: ConfusionMatrix.from_matrix(c.matrix.tolist()), "cannot take a list: give counts"),
    (lambda c: load(c, counts=c.counts[:1]), r"cannot take counts of shape \(1,\) .*int64 \((9|12),\), at least 0"),
    (lambda c: load(c, counts=torch.arange(len(c.counts)) - 1), "cannot take negative counts, down to -1"),
    (lambda c: load(c, more=1), r"the state of \w+\(3, ignore_index=255\) does not fit \w+\(3, .*: give"),
    *((lambda c, state=state: c.load_state_dict(state(c)), f"the state of {words} does not fit \\w+\\(3, .*=255")
      for words, state in [
        (r"\w+\(4, ignore_index=255\)", lambda c: type(c)(4, ignore_index=255).state_dict()),
        (r"\w+\(3, ignore_index=7\)", lambda c: type(c)(3, ignore_index=7).state_dict()),
        (r"OTHER\(3, ignore_index=255\)", lambda c: other(c).state_dict()),
        (r"\w+\(3, ignore_index=255\)", lambda c: {"metric": repr(c)}),
        (r"\['scale'\]", lambda c: {"scale": 3}),
        (r"\[\]", lambda c: {}),
        ("a Tensor", lambda c: c.counts)]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), MISUSES)
def test_misuse_of_a_metric_is_named(call, words):
    for kind in KINDS:
        counts = kind(3, ignore_index=255)
        with pytest.raises((TypeError, ValueError), match=words.replace("OTHER", type(other(counts)).__name__)):
            call(counts)
        assert not counts.counts.any()


def in_inference_mode(counts, batches):
    with torch.inference_mode():
        made = type(counts)(np.int64(3), ignore_index=np.int16(255), device=torch.device("cpu")).to("cpu:0")
        made.update(*batches[0])
    for prediction, target in batches[1:]:
        made.update(prediction, target)
    return made


def in_parts(counts, batches):
    """Of flat pixels, of an image (H, W), and in a merge of a metric with itself."""
    parts = [type(counts)(3, ignore_index=255) for _ in batches]
    with torch.no_grad():
        for part, ids, cut in zip(parts, batches, (torch.flatten, torch.squeeze, torch.clone), strict=True):
            part.update(*map(cut, ids))
    total = parts[0].merge(parts[1]).merge(parts[2].matrix)
    return total.merge(total).merge(total.state_dict()["counts"].view(total.matrix.shape) // 2)


def in_copies(counts, batches):
    for ids, again in zip(
        batches, (copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), copy.deepcopy), strict=True
    ):
        kept, counts = counts, again(counts)
        before = kept.counts.clone()
        counts.update(*ids)
        assert torch.equal(kept.counts, before)
    return counts


@pytest.mark.parametrize(("usage", "factor"), [(in_inference_mode, 1), (in_parts, 3), (in_copies, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_metric_means_what_it_says(kind, usage, factor):
    """Compared with numpy, over three batches of one image each."""
    num_ids = 3 if kind is ConfusionMatrix else 8
    prediction, target = torch.randint(num_ids, (2, 3, 1, 5, 7), generator=torch.Generator().manual_seed(3)).unbind()
    target[:, :, 1, 2:5] = 255
    found = usage(kind(3, ignore_index=255), list(zip(prediction, target, strict=True)))
    pixels = target.numpy().ravel(), prediction.numpy().ravel()
    if kind is ConfusionMatrix:
        expected = np.histogram2d(*pixels, bins=[np.arange(4) - 0.5] * 2)[0]
    else:
        bits = [(ids[pixels[0] != 255, None] >> np.arange(3)) & 1 for ids in pixels]
        expected = np.stack([np.histogram2d(*(each[:, c] for each in bits), bins=[[0, 1, 2]] * 2)[0] for c in range(3)])
    assert found.matrix.tolist() == (factor * expected).tolist()


def test_counts_of_upsampled_logits_lead_to_scores():
    logits, target = torch.randn(2, 5, 4, 6), torch.randint(5, (2, 13, 21))
    expected = ConfusionMatrix(5)
    expected.update(upsample_argmax(logits, (13, 21)).long(), target)
    for ignore_index in (255, 2):
        expected.ignore_index = ignore_index
        found = ConfusionMatrix.from_matrix(upsample_confusion(logits, target).confusion, ignore_index=ignore_index)
        assert (repr(found), found.scores()) == (repr(expected), expected.scores())


def test_reprs_and_lists_of_names_are_short():
    logits, target = torch.randn(2, 19, 4, 6), torch.randint(19, (2, 13, 21))
    sums = upsample_confusion(logits, target)
    assert repr(sums) == f"ConfusionSums(confusion=<shape (19, 19)>, loss_sum={float(sums[1])}, weight_sum=546.0)"
    for number, inner in [(7, 7), (8, 6), (10, 6)]:
        lines = repr(CriterionSum([(0.5 + n, CriterionDice(smooth=n)) for n in range(number)])).splitlines()
        assert [line[:8] for line in lines[1 : inner + 1]] == [f"  ({0.5 + n}, " for n in range(inner)]
        assert lines[inner + 1 :] == ([f"  ... and {number - 6} more"] if number > 7 else []) + ["])"]
    assert "Integral" not in dir(segapp.metrics)
    for module in (segapp.metrics, segapp.precision, segapp.memory):
        assert dir(module) == sorted(module.__all__)
    own = [name for name, value in vars(segapp.errors).items() if getattr(value, "__module__", "") == "segapp.errors"]
    assert segapp.errors.__all__ == sorted(name for name in own if isinstance(getattr(segapp.errors, name), type))


def test_sets_of_63_classes_are_counted():
    counts = LabelCounts(63)
    counts.update(torch.tensor([[[2**63 - 1, 1 << 62]]]), torch.tensor([[[1 << 62, -1]]]))
    assert counts.matrix[62].tolist() == [[0, 0], [0, 1]]
    assert counts.matrix[:62, 0, 1].tolist() == [1] * 62


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated", "ignore:.*contains no parameters")
def test_metrics_run_in_frameworks_beside_torchmetrics(tmp_path):
    """Three evaluations of two batches, the second without a valid pixel. Ids are classes, or sets of two classes."""
    accelerate, lightning, torchmetrics = map(pytest.importorskip, ("accelerate", "lightning", "torchmetrics"))
    ids = torch.randint(4, (3, 2, 2, 2, 5, 7), generator=torch.Generator().manual_seed(1))
    ids[:, :, 1, 0, 2:] = ids[1, :, 1] = 255

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.counts = ConfusionMatrix(4), LabelCounts(2, ignore_index=255)
            self.theirs = (
                torchmetrics.JaccardIndex("multiclass", num_classes=4, ignore_index=255),
                torchmetrics.JaccardIndex("multilabel", num_labels=2, ignore_index=255),
            )

        def on_validation_epoch_start(self):
            for metric in (*self.counts, *self.theirs):
                metric.to(self.device).reset()

        def validation_step(self, batch):
            for metric in (*self.counts, self.theirs[0]):
                metric.update(*batch)
            self.theirs[1].update(*(torch.stack([x & 1, x >> 1], 1).where(x[:, None] < 4, 255) for x in batch))

        def on_validation_epoch_end(self):
            self.log_dict({type(metric).__name__: metric.compute()["miou"] for metric in self.counts})

        def on_save_checkpoint(self, checkpoint):
            checkpoint["counts"] = [metric.state_dict() for metric in self.counts]

        def on_load_checkpoint(self, checkpoint):
            for metric, state in zip(self.counts, checkpoint["counts"], strict=True):
                metric.load_state_dict(state)

    module, trainer = Module(), lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    for epoch, batches in enumerate(ids):
        (logged,) = trainer.validate(module, torch.utils.data.DataLoader(batches, batch_size=None), verbose=False)
        expected = [float("nan")] * 2 if epoch == 1 else [float(metric.compute()) for metric in module.theirs]
        found = [logged["ConfusionMatrix"], logged["LabelCounts"]]
        assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Module.load_from_checkpoint(tmp_path / "last.ckpt").counts

    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.register_for_checkpointing(*module.counts)
    accelerator.save_state(tmp_path)
    for metric in module.counts:
        metric.reset()
    accelerator.load_state(tmp_path)
    for metric, restored, per_pixel in zip(module.counts, again, (1, 2), strict=True):
        assert restored.counts.sum() == per_pixel * (ids[2, :, 1] != 255).sum()
        assert torch.equal(metric.counts, restored.counts)


def test_metrics_import_nothing_of_segapp_and_no_vision_library():
    imported = re.findall(r"^\s*(?:from|import) (\w+)", Path(segapp.metrics.__file__).read_text(), re.M)
    assert "torch" in imported
    assert not {"segapp", "torchvision", "segmentation_models_pytorch", "timm"} & set(imported)
