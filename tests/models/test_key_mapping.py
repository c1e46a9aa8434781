"""Names and shapes of a few tensors, mapped by hand."""

from __future__ import annotations

import pytest

from segapp.errors import CheckpointError
from segapp.models.keys import map_keys

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
            "stages.0.w stages.1.w",
            "stages_0.w stages_1.w",
            "stages.0.w stages.1.w",
            "the same names, numbers after an underscore",
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
    ("found", "wanted", "message"),
    [
        ("h.a", "back.w h.a h.b", None),  # one of two
        ("h.a h.b", "back.w h.a h.b h.c h.d", None),
        ("h.a", "back.w h.a h.b h.c", "gives 1 of the 3 tensors of this model's head and none of its backbone"),
        ("h.a h.b", "back.w h.a h.b h.c h.d h.e", "gives 2 of the 5 tensors"),
        ("h.a z.b z.c", "back.w h.a h.b h.c", "gives 1 of the 3 tensors"),
        ("back.w", "back.w h.a h.b h.c", None),
        ("back.w h.a", "back.w back.v h.a", "another backbone: 1 of 2 tensors are missing .* such as back.v"),
        ("back.x h.a", "back.w h.a", "another backbone: 1 of 1 tensors are missing"),
        ("back.w back.v", "back.w back.v back.mean", "another backbone: 1 of 3 tensors"),
    ],
)
def test_too_little_of_backbone_or_head_is_refused(found, wanted, message):
    whole = map_keys(shapes(found), shapes(wanted), "back.", is_partial=True)
    assert set(whole.taken) == {name for name in wanted.split() if name in found.split()}
    if message is None:
        assert map_keys(shapes(found), shapes(wanted), "back.") == whole
    else:
        with pytest.raises(CheckpointError, match=message):
            map_keys(shapes(found), shapes(wanted), "back.")


def test_buffers_may_be_missing_and_do_not_count():
    wanted = shapes("back.w back.mean h.a h.mean")
    found = map_keys(shapes("back.w"), wanted, "back.", optional={"back.mean", "h.mean"})
    assert found.missing == dict.fromkeys(["back.mean", "h.a", "h.mean"], "not in the file")
    with pytest.raises(CheckpointError, match="holds no tensor of this model"):
        map_keys(shapes("back.mean"), wanted, "back.", optional={"back.mean", "h.mean"})


@pytest.mark.parametrize(
    ("file", "own", "reasons"),
    [
        ({"h.w": (9, 4), "h.b": (9,)}, {"h.w": (2, 4), "h.b": (2,)}, ["for 9 classes there, 2 here"] * 2),
        ({"h.w": (9, 4), "h.b": (8,)}, {"h.w": (2, 4), "h.b": (2,)}, ["9x4 there, 2x4 here", "8 there, 2 here"]),
        ({"h.w": (9, 4), "h.b": (9,)}, {"h.w": (2, 5), "h.b": (2,)}, ["9x4 there, 2x5 here", "9 there, 2 here"]),
        ({"h.w": (9, 4), "h.b": ()}, {"h.w": (2, 4), "h.b": (2,)}, ["9x4 there, 2x4 here", "a number there, 2 here"]),
    ],
)
def test_other_shapes_are_other_classes_where_only_they_differ(file, own, reasons):
    there = {f"net.{name}": shape for name, shape in {"back.w": V, **file}.items()}
    mapped = map_keys(there, {"back.w": V, **own}, "back.")
    assert mapped.missing == dict(zip(["h.w", "h.b"], reasons, strict=True))
    assert mapped.left_out == dict(zip(["net.h.w", "net.h.b"], reasons, strict=True))
    partial = map_keys({"h.a": V, "back.w": (9, 3)}, {"h.a": V, "back.w": (2, 3)}, "back.", is_partial=True)
    assert partial.missing == {"back.w": "9x3 there, 2x3 here"}


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
    if is_refused:
        with pytest.raises(CheckpointError, match=f"it has further blocks: {further}"):
            map_keys(shapes(f"{own} {further}"), shapes(own))
    else:
        assert list(map_keys(shapes(f"{own} {further}"), shapes(own)).left_out) == [further]


def test_two_networks_of_a_file_are_refused_unless_one_has_more():
    with pytest.raises(CheckpointError, match=r"fit equally well \(tensors such as a\.w and b\.w\)"):
        map_keys(shapes("a.w a.v b.w b.v"), shapes("w v"))
    assert map_keys(shapes("a.w b.w b.v"), shapes("w v")).taken == {"w": "b.w", "v": "b.v"}


def test_nearest_name_is_told_for_the_first_eight():
    far = [f"{letter * 9}" for letter in "zyxutsrq"]
    for own, is_told in (([*far[:7], "weights"], True), ([*far, "weights"], False)):
        with pytest.raises(CheckpointError) as caught:
            map_keys(shapes("weight"), shapes(" ".join(own)))
        assert ("; nearest: weight there, weights here" in str(caught.value)) == is_told
