"""Names and shapes of a few tensors, mapped by hand."""

from __future__ import annotations

import contextlib

import pytest

from segapp.errors import CheckpointError
from segapp.models.keys import check_complete, map_keys

V = (4,)


def shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Tensors of these names and of one shape."""
    return dict.fromkeys(text.split(), V)


@pytest.mark.parametrize(
    ("found", "wanted", "taken", "convention"),
    [
        ("w x.v", "w x.v", "w x.v", "the same names"),
        ("p.q.r.s.w", "w", "p.q.r.s.w", "p.q.r.s. there, no prefix here"),
        ("p.q.0.w p.q.1.w", "0.w 1.w", "p.q.0.w p.q.1.w", "p.q. there, no prefix here"),
        ("_orig_mod.w _orig_mod.v", "w v", "_orig_mod.w _orig_mod.v", "the same names"),
        ("w v", "back.w back.v head.w", "w v", "no prefix there, back. here"),
        ("w v", "back.model.w back.model.v", "w v", "no prefix there, back.model. here"),
        ("e.w e.v", "back.w back.v", "e.w e.v", "e. there, back. here"),
        (
            "stages.0.w stages.1.w stem.conv.w",
            "back.model.body.stages_0.w back.model.body.stages_1.w back.model.body.stem_conv.w h.w",
            "stages.0.w stages.1.w stem.conv.w",
            "no prefix there, back.model.body. here",
        ),
        (
            "d.denselayer1.norm.1.w d.norm.1.w",
            "d.denselayer1.norm1.w d.norm.1.w",
            "d.denselayer1.norm.1.w d.norm.1.w",
            "the same names",
        ),
    ],
)
def test_prefixes_and_spellings_that_match_most_are_used(found, wanted, taken, convention):
    mapped = map_keys(shapes(found), shapes(wanted), "back." if "back." in wanted else "")
    assert mapped.taken == dict(zip(wanted.split(), taken.split(), strict=False))
    assert mapped.convention == convention
    assert mapped.left_out == {}


@pytest.mark.parametrize("found", ["p.q.r.s.t.w", "p.0.w", "0.w"])
def test_deeper_prefixes_and_numbers_are_not_left_out(found):
    with pytest.raises(CheckpointError, match="holds no tensor of this model"):
        map_keys(shapes(found), shapes("w"))


@pytest.mark.parametrize(
    ("found", "required", "message"),
    [
        ("back.w h.a h.b", "back.w h.a h.b", None),
        ("x.back.w x.h.a", "back.w h.a", None),
        (
            "back.w h.b",
            "back.w h.a h.b h.c",
            r"lacks 2 of the 4 tensors of this model, such as h\.a \(not in the file\); ",
        ),
        (
            "back.w h.a h.b",
            "back.w back.v h.a",
            "lacks 1 of the 3 tensors of this model, such as back.v .*; give weights",
        ),
        ("h.a h.b", "back.w h.a h.b", "lacks 1 of the 3 tensors of this model, such as back.w"),
        (
            "w",
            "back.w back.v back.mean",
            "lacks 2 of the 3 tensors of this backbone, such as back.v .*; give weights of",
        ),
        ("w z", "back.w h.a h.b", "lacks 2 of the 3 tensors .*; train with it as model.weights_backbone"),
        ("back.l1.2.w back.l1.0.w", "back.l1.0.w h.a", r"lacks 1 of the 2 tensors of this model, such as h\.a"),
    ],
)
def test_file_without_a_required_tensor_is_refused(found, required, message):
    mapped = map_keys(shapes(found), shapes(required) | shapes("back.count h.z"), "back.")
    assert set(mapped.missing) >= {"back.count", "h.z"}
    for is_trained in (True, False):
        if message is None:
            check_complete(mapped, shapes(found), required.split(), "back.", is_trained=is_trained)
            continue
        with pytest.raises(CheckpointError, match=message) as caught:
            check_complete(mapped, shapes(found), required.split(), "back.", is_trained=is_trained)
        assert str(caught.value).endswith("model.partial_weights: true to take what matches") == is_trained


def test_counters_do_not_show_whose_file_it_is():
    wanted = shapes("back.count back.w h.a h.count")
    found = map_keys(shapes("back.count back.w"), wanted, "back.", {"back.count", "h.count"})
    assert found.missing == dict.fromkeys(["h.a", "h.count"], "not in the file")
    with pytest.raises(CheckpointError, match="holds no tensor of this model"):
        map_keys(shapes("back.count"), wanted, "back.", {"back.count", "h.count"})


@pytest.mark.parametrize(
    ("file", "own", "reasons"),
    [
        ({"h.w": (9, 4), "h.b": (9,)}, {"h.w": (2, 4), "h.b": (2,)}, ["for 9 classes there, 2 here"] * 2),
        ({"h.w": (10, 4), "h.b": (10,)}, {"h.w": (3, 4), "h.b": (3,)}, ["for 9 classes there, 2 here"] * 2),  # EoMT
        ({"h.w": (9, 4), "h.b": (9,)}, {"h.w": (4, 4), "h.b": (4,)}, ["9x4 there, 4x4 here", "9 there, 4 here"]),
        ({"h.w": (9, 4), "h.b": (8,)}, {"h.w": (2, 4), "h.b": (2,)}, ["9x4 there, 2x4 here", "8 there, 2 here"]),
        ({"h.w": (9, 4), "h.b": (9,)}, {"h.w": (2, 5), "h.b": (2,)}, ["9x4 there, 2x5 here", "9 there, 2 here"]),
        ({"h.w": (9, 4), "h.b": ()}, {"h.w": (2, 4), "h.b": (2,)}, ["9x4 there, 2x4 here", "a number there, 2 here"]),
    ],
)
def test_other_shapes_are_other_classes_where_only_they_differ(file, own, reasons):
    there = {f"net.{name}": shape for name, shape in {"back.w": V, **file}.items()}
    mapped = map_keys(there, {"back.w": V, **own}, "back.", num_classes=2)
    assert mapped.missing == dict(zip(["h.w", "h.b"], reasons, strict=True))
    assert mapped.left_out == dict(zip(["net.h.w", "net.h.b"], reasons, strict=True))
    is_classes = "classes" in reasons[0]
    assert set(mapped.classifier) == (set(own) if is_classes else set())
    for is_trained in (True, False):
        refused = pytest.raises(CheckpointError, match=r"lacks 2 of the 3 tensors .* such as h\.w")
        with contextlib.nullcontext() if is_classes and is_trained else refused as caught:
            check_complete(mapped, there, ["back.w", *own], "back.", is_trained=is_trained)
        if is_classes and not is_trained:
            assert str(caught.value).endswith("; train with it as model.weights")


@pytest.mark.parametrize(
    ("name", "backbone", "reason"),
    [
        ("fc.w", "", "the backbone's own classifier"),
        ("back.head.w", "back.", "the backbone's own classifier"),
        ("classifier.1.w", "back.", "of another head"),
        ("aux_classifier.0.w", "back.", "this model has no auxiliary head (model.aux)"),
        ("decode_head.w", "back.", "of another head"),
        ("ema.w", "back.", "this model has no such tensor"),
    ],
)
def test_tensors_left_out_have_their_reason(name, backbone, reason):
    own = f"{backbone}w {backbone}v"
    assert map_keys(shapes(f"{own} {name}"), shapes(own), backbone).left_out == {name: reason}


@pytest.mark.parametrize(
    ("further", "is_refused"), [("l1.3.w", True), ("l1.1.w", False), ("l2.1.w", False), ("l3.0.w", False)]
)
def test_blocks_between_those_taken_are_another_backbone(further, is_refused):
    """Blocks behind the last one taken are parts that a network never runs."""
    own = "l1.2.w l1.0.w l2.0.w"
    mapped = map_keys(shapes(f"{own} {further}"), shapes(own))
    assert list(mapped.left_out) == [further]
    refused = pytest.raises(CheckpointError, match=f"is of a deeper backbone, with further blocks: {further}; give")
    with refused if is_refused else contextlib.nullcontext():
        check_complete(mapped, shapes(f"{own} {further}"), own.split(), "", is_trained=True)


def test_two_networks_of_a_file_are_refused_unless_one_has_more():
    with pytest.raises(CheckpointError, match=r"fit equally well \(tensors such as a\.w and b\.w\)"):
        map_keys(shapes("a.w a.v b.w b.v"), shapes("w v"))
    assert map_keys(shapes("a.w b.w b.v"), shapes("w v")).taken == {"w": "b.w", "v": "b.v"}


def test_nearest_name_is_told_for_the_first_eight():
    far = [f"{letter * 9}" for letter in "zyxutsrq"]
    for own, is_told in (([*far[:7], "weights"], True), ([*far, "weights"], False)):
        with pytest.raises(CheckpointError) as caught:
            map_keys(shapes("weight"), shapes(" ".join(own)))
        assert ("; nearest: weight (4) there, weights (4) here" in str(caught.value)) == is_told
