"""EoMT: its transformer against timm's with register tokens, its masks and scores by hand, and what it refuses."""

import copy

import pytest
import timm
import torch
from torch import nn

from segapp.commands.models import all_names
from segapp.errors import ConfigError
from segapp.models import build_model, by_name
from segapp.models.eomt import QueryMasking, num_upscales, semantic_logits

DINO_V3, DINO_V2 = "tu-vit_small_patch16_dinov3", "tu-vit_small_patch14_reg4_dinov2"
SMALL = {"depth": 3, "embed_dim": 48, "num_heads": 3}


def build(encoder=DINO_V3, num_classes=5, *, aux=True, **options):
    torch.manual_seed(0)
    options = {"num_queries": 7, "num_blocks": 2, **SMALL, **options}
    return build_model("segapp", "eomt", num_classes, encoder=encoder, aux=aux, options=options)


@pytest.mark.usefixtures("_uninspected")
@pytest.mark.parametrize("encoder", [DINO_V3, DINO_V2])
def test_queries_in_all_blocks_equal_timms_register_tokens(encoder):
    torch.manual_seed(1)
    arguments = {**SMALL, "num_classes": 0, "global_pool": "", "dynamic_img_size": True}
    original = timm.create_model(encoder.removeprefix("tu-"), **arguments).eval()
    torch.nn.init.normal_(original.reg_token)  # queries take the place of these four
    name = "num_reg_tokens" if encoder == DINO_V3 else "reg_tokens"
    model = build(encoder, num_queries=4, num_blocks=3, **{name: 0}).eval()
    state = original.state_dict()
    model.queries.data = state.pop("reg_token")[0]
    model.encoder.load_state_dict(state)
    seen = []
    model.decoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    images = torch.randn(2, 3, 3 * model.size_divisor, 5 * model.size_divisor)
    with torch.no_grad():
        model(images)
        expected = original.forward_features(images)
    ((queries, patches),) = seen
    torch.testing.assert_close(queries, expected[:, 1:5])
    torch.testing.assert_close(patches.flatten(2).transpose(1, 2), expected[:, 5:])


def test_outputs_have_documented_shapes_at_any_size():
    model = build()
    outputs = model(torch.randn(2, 3, 48, 80))
    assert [tuple(each.shape) for each in outputs] == [(2, 7, 12, 20), (2, 7, 6)] * 3
    assert model.logits_stride == 4
    assert [tuple(each.shape) for each in model.eval()(torch.randn(1, 3, 32, 16))] == [(1, 5, 8, 4)]
    alone = build(aux=False)
    assert [tuple(each.shape) for each in alone(torch.randn(2, 3, 48, 80))] == [(2, 7, 12, 20), (2, 7, 6)]
    with pytest.raises(ValueError, match="takes multiples of 16: pad to 48x80"):
        model(torch.randn(1, 3, 47, 65))


@pytest.mark.usefixtures("_uninspected")
def test_options_left_out_are_those_of_the_published_network():
    options = {**SMALL, "depth": 5}
    model = build_model("segapp", "eomt", 3, encoder=DINO_V3, options=options)
    assert (model.num_queries, model.num_blocks, model.masking) == (100, 4, None)


@pytest.mark.usefixtures("_uninspected")
def test_gradient_reaches_every_parameter():
    model = build(mask_steps=10)
    assert "masking.num_updates" in model.state_dict(), "a resumed run lowers the masked share from where it was"
    sum(output.square().sum() for output in model(torch.randn(2, 3, 32, 48))).backward()
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
    backbone = {id(p) for p in model.backbone_module.parameters()}
    names = {name for name, p in model.named_parameters() if id(p) not in backbone}
    assert names == {"queries"} | {name for name, _ in model.named_parameters() if name.startswith("decoder.")}


def test_semantic_logits_by_hand():
    masks = torch.tensor([[[[0.0]], [[2.0]]]], dtype=torch.float64)
    classes = torch.tensor([[[0.2, 0.3, 0.5], [0.6, 0.1, 0.3]]], dtype=torch.float64).log()
    sure = 1 / (1 + torch.tensor(-2.0, dtype=torch.float64).exp())
    expected = torch.stack([0.2 * 0.5 + 0.6 * sure, 0.3 * 0.5 + 0.1 * sure])
    torch.testing.assert_close(semantic_logits(masks, classes).flatten().exp(), expected, rtol=0, atol=2e-6)


def test_every_update_lowers_the_masked_share():
    masking = QueryMasking(2, 8)  # a unit is 2 steps: block 0 falls from update 2 to 4, block 1 from 4 to 6
    shares = []
    for _ in range(8):
        shares.append([float(masking.masked_share(block)) for block in range(2)])
        masking.num_updates.add_(1)
    half = 0.5**0.9
    expected = ([1, 1], [1, 1], [1, 1], [half, 1], [0, 1], [0, half], [0, 0], [0, 0])
    assert shares == [pytest.approx(row) for row in expected]


def test_queries_attend_to_their_masks_and_everything_else():
    masking = QueryMasking(2, 400)
    masks = torch.full((1, 3, 2, 2), -1.0)
    masks[0, 1, 0] = 1.0  # query 1 has the upper row
    attends = masking(masks, 0, (2, 2), num_prefix=1)
    assert attends.shape == (1, 1, 8, 8)
    expected = torch.ones(8, 8, dtype=torch.bool)
    expected[1:4, 4:] = False
    expected[2, 4:6] = True
    assert attends[0, 0].equal(expected)
    masking.num_updates.fill_(400)
    assert masking(masks, 0, (2, 2), num_prefix=1).all()


def test_half_of_the_queries_are_masked_at_a_share_of_half():
    masking, masks = QueryMasking(1, 300), torch.full((2, 100, 2, 2), -1.0)
    rows = []
    for step in range(140, 160):
        masking.num_updates.fill_(step)
        attends = masking(masks, 0, (2, 2), num_prefix=0)[:, 0, :100, 100:].all(-1)
        assert attends[0].equal(attends[1])  # no image differs from another: no split changes it
        assert float(attends[0].float().mean()) == pytest.approx(1 - float(masking.masked_share(0)), abs=0.02)
        rows.append(attends[0])
    assert float(torch.stack(rows).float().mean(0).min()) > 0.2  # no query is always masked


@pytest.mark.usefixtures("_uninspected")
def test_evaluation_has_no_masked_attention():
    model = build(mask_steps=10).eval()
    plain = copy.deepcopy(model)
    plain.masking = None
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert model(images)[0].equal(plain(images)[0])
        model.train()
        assert not model(images)[0].equal(plain.train()(images)[0])


@pytest.mark.parametrize(("patch_px", "stride"), [(8, 4), (14, 7), (16, 4), (32, 4)])
def test_masks_have_a_stride_of_about_four_pixels(patch_px, stride):
    assert patch_px / 2 ** num_upscales(patch_px) == stride


@pytest.mark.parametrize(
    ("encoder", "options", "message"),
    [
        (None, {}, r"'None' is not a vision transformer of timm, such as tu-vit_small_patch16_dinov3"),
        ("resnet50", {}, "is not a vision transformer of timm"),
        ("tu-resnet18", {}, "is not an option of eomt with encoder tu-resnet18"),
        ("tu-vit_small_patch16_dinov9", {}, "did you mean .*dinov3"),
        (DINO_V3, {"num_queries": 0}, r"num_queries = 0 is not a whole number of at least 1"),
        (DINO_V3, {"num_blocks": 4}, r"num_blocks = 4, but .* has 3"),
        (DINO_V3, {"num_querys": 4}, "num_querys.* is not an option of eomt .*num_queries"),
        (DINO_V3, {"patch_size": (16, 8)}, "is not a plain vision transformer with square patches"),
        ("tu-vit_small_patch16_rope_mixed_224", {}, "is not a plain vision transformer"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_next_move(encoder, options, message):
    with pytest.raises(ConfigError, match=message):
        build(encoder, **options)


def test_row_of_the_table_is_all_that_a_model_needs(monkeypatch):
    def build_tiny(num_classes, aux, encoder, options, in_channels):
        network = nn.Conv2d(in_channels, num_classes, 3, padding=1)
        return by_name.PythonModel(network, name="tiny", num_classes=num_classes, in_channels=in_channels)

    monkeypatch.setitem(by_name.OWN, "tiny", (build_tiny, None))
    model = build_model("segapp", "tiny", 5, in_channels=2).eval()
    assert model(torch.zeros(1, 2, 8, 12))[0].shape == (1, 5, 8, 12)
    with pytest.raises(ConfigError, match=r"model\.encoder: tiny has an encoder of its own"):
        build_model("segapp", "tiny", 5, encoder=DINO_V3)
    own = {name.encoder for name in all_names() if (name.library, name.name) == ("segapp", "tiny")}
    assert own == {None}


def test_masked_attention_needs_predictions_of_earlier_blocks():
    with pytest.raises(ConfigError, match=r"mask_steps needs the predictions of model\.aux"):
        build(aux=False, mask_steps=10)
