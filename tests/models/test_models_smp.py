import inspect
import re
import warnings

import pytest
import torch
from torch.nn.functional import interpolate

from segapp.errors import ConfigError
from segapp.models import build_model
from segapp.models.from_smp import smp_architectures
from segapp.models.names import timm_options

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import segmentation_models_pytorch as smp

STRIDES = {
    **dict.fromkeys(("Unet", "UnetPlusPlus", "MAnet", "Linknet"), 1),
    **dict.fromkeys(("FPN", "DeepLabV3Plus", "PAN", "UPerNet", "Segformer"), 4),
    **{"PSPNet": 8, "DeepLabV3": 8, "DPT": 2},
}  # input pixels per logit
TWO_IMAGES = ("DeepLabV3", "DeepLabV3Plus", "PAN", "UPerNet")  # in training: they normalize one pooled value
SMALL_DPT = {"decoder_intermediate_channels": [16, 14, 12, 10], "decoder_fusion_channels": 16}
SMALL = {
    **{name: {"decoder_channels": [12, 10, 8, 6, 4]} for name in ("Unet", "UnetPlusPlus", "MAnet")},
    **{name: {"decoder_channels": 16} for name in TWO_IMAGES},
    "FPN": {"decoder_pyramid_channels": 16, "decoder_segmentation_channels": 32},
    "Segformer": {"decoder_segmentation_channels": 16},
    "DPT": SMALL_DPT,
}
NETWORKS = [
    *((name, "tu-test_resnet") for name in STRIDES if name != "DPT"),
    ("DPT", "tu-test_vit"),
    ("PSPNet", "mobilenet_v2"),  # one stage of the encoder runs, and its result is not used
]


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a network was built with a download")

    # Both names under which smp and timm would download: no socket is open yet that could be counted instead.
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.setattr("segmentation_models_pytorch.encoders.hf_hub_download", refuse)


def original_with_weights_of(model, **options):
    """Return the library's own network with the same weights."""
    torch.manual_seed(99)
    if model.name == "DPT":
        options["dynamic_img_size"] = True
    # Without values, which are those of the model; mit and timm's read some while they are built.
    with torch.device("cpu" if model.encoder_name.startswith(("mit", "tu-")) else "meta"):
        original = getattr(smp, model.name)(
            encoder_name=model.encoder_name, encoder_weights=None, classes=model.num_classes, **options
        )
    result = original.load_state_dict(model.state_dict(), strict=False, assign=True)
    assert not result.unexpected_keys
    assert all(key.startswith("encoder.") for key in result.missing_keys)  # parts that never run
    return original.eval()


def assert_upsampled_matches(model, original, height_px, width_px):
    images = torch.randn(1, 3, height_px, width_px)
    with torch.no_grad():
        (logits,), expected = model.eval()(images), original(images)
    assert logits.shape[-2:] == (height_px // model.logits_stride, width_px // model.logits_stride)
    upsampled = interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=True)
    torch.testing.assert_close(upsampled, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(("name", "encoder"), NETWORKS)
def test_every_architecture_computes_what_smp_does_and_trains(name, encoder):
    torch.manual_seed(0)
    options = SMALL.get(name, {})
    model = build_model("smp", name, 5, encoder=encoder, options=options)
    assert (model.logits_stride, model.min_train_batch) == (STRIDES[name], 1 + (name in TWO_IMAGES))
    height_px, width_px = model.suitable_size(64, 90)
    (logits,) = model(torch.randn(model.min_train_batch, 3, height_px, width_px))
    logits.square().sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert all(name.startswith("encoder.") for name in frozen)
    assert bool(frozen) == ((name, encoder) == ("PSPNet", "mobilenet_v2"))
    if model.min_train_batch > 1:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(torch.randn(1, 3, height_px, width_px))

    for key, buffer in model.named_buffers():
        if key.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
    assert_upsampled_matches(model, original_with_weights_of(model, **options), height_px, width_px)
    bad, good = (height_px + 1, width_px - 1), (height_px + model.size_multiple, width_px)
    assert model.suitable_size(*bad) == good
    if model.size_divisor == 1:
        assert model(torch.randn(1, 3, 65, 43))[0].shape[-2:] == (65, 43)
        return
    with pytest.raises(ValueError, match=f"{bad[0]}x{bad[1]} px: smp {name} .* pad to {good[0]}x{good[1]}"):
        model(torch.randn(1, 3, *bad))


def test_pan_refuses_images_below_its_minimum_size():
    model = build_model("smp", "PAN", 5, encoder="tu-test_resnet").eval()
    assert (model.size_divisor, model.min_size_px) == (16, 128)
    with pytest.raises(ValueError, match="needs at least 128 px a side: pad to 128x256"):
        model(torch.randn(1, 3, 112, 160))
    for size in ((128, 161), (161, 128)):  # not below it, but no multiple
        with pytest.raises(ValueError, match="takes multiples of 16: pad to"):
            model(torch.randn(1, 3, *size))


def test_published_pspnet_has_whole_backbone_at_stride_8():
    options = {"encoder_depth": 5, "encoder_output_stride": 8, "psp_out_channels": 32}
    model = build_model("smp", "pspnet", 150, encoder="resnet18", options=options)
    assert (model.name, model.size_divisor, model.logits_stride) == ("PSPNet", 8, 8)
    assert any("layer4" in name for name, _ in model.named_parameters())
    original = original_with_weights_of(model, encoder_depth=5, output_stride=8, psp_out_channels=32)
    assert_upsampled_matches(model, original, 64, 72)


@pytest.mark.usefixtures("_uninspected")
def test_architecture_and_timm_encoder_options_are_passed_on():
    options = {"encoder_depth": 3, "decoder_channels": [8, 8, 4]}
    with torch.device("meta"):  # sizes only
        unet = build_model("smp", "unet", 3, encoder="tu-test_resnet", options=options)
        plain, small = (
            build_model("smp", "FPN", 5, encoder="tu-test_convnext", options=options)
            for options in ({}, {"depths": (1, 1, 1, 1)})
        )
        assert build_model("smp", "Linknet", 2).encoder_name == "resnet34", "smp's default"
    assert (unet.name, unet.segmentation_head[0].in_channels) == ("Unet", 4)
    assert len(list(small.encoder.parameters())) < len(list(plain.encoder.parameters()))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("UNet3", {}, r"model\.name: 'UNet3' is not an architecture of smp: did you mean Unet"),
        ("Unet", {"encoder": "resnet19"}, r"model\.encoder: 'resnet19' is not .*did you mean .*resnet18"),
        ("Unet", {"encoder": "tu-resnet19"}, r"model\.encoder: 'tu-resnet19' is not a model of timm: did you .*tu-"),
        ("Unet", {"encoder": "resnet18", "options": {"decoder_chanels": [8]}}, r"did you mean decoder_channels"),
        ("Unet", {"encoder": "tu-resnet18", "options": {"decoder_chanels": [8]}}, r"did you mean decoder_channels"),
        ("Unet", {"encoder": "resnet18", "options": {"decoder_channels": [8]}}, r"cannot be built .*decoder_channels"),
        ("FPN", {"encoder": "resnet18", "options": {"upsampling": 2}}, r"'upsampling' is not an option of smp FPN"),
        ("FPN", {"encoder": "resnet18", "options": {"encoder_output_stride": 8}}, r"'encoder_output_stride' is not"),
        ("Linknet", {"encoder": "mit_b0"}, r"smp Linknet cannot be built with mit_b0"),
        ("DPT", {"encoder": "resnet18"}, r"smp DPT cannot be built with resnet18"),
        ("DeepLabV3", {"encoder": "resnet18", "options": {"encoder_output_stride": 4}}, r"output stride 8 or 16"),
    ],
)  # fmt: skip
def test_unknown_name_is_refused_with_the_nearest(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        build_model("smp", name, 3, **kwargs)


def test_names_are_those_of_every_installed_smp_architecture():
    assert [*smp_architectures()] == [cls.__name__ for cls in smp.MODEL_ARCHITECTURES_MAPPING.values()]
    assert set(smp_architectures()) == set(STRIDES)


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained", "pretrained_cfg_overlay", "cache_dir", "kwargs"])
@pytest.mark.parametrize(("library", "name"), [("smp", "Unet"), ("segapp", "eomt")])
def test_options_that_load_files_are_not_passed_to_timm(option, library, name, tmp_path, monkeypatch):
    import timm

    encoder = {"smp": "tu-resnet18", "segapp": "tu-vit_tiny_patch16_224"}[library]
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("timm was called"))
    with pytest.raises(ConfigError, match=f"'{option}' is not an option of"):
        build_model(library, name, 3, encoder=encoder, options={option: str(tmp_path / "evil.pth")})


def test_no_option_of_any_model_of_timm_loads_a_file():
    import timm
    from timm.models._builder import build_model_with_cfg

    loading = {*inspect.signature(timm.create_model).parameters, *inspect.signature(build_model_with_cfg).parameters}
    words = re.compile(r"(^|_)(file|path|url|dir|hub|cache|weights|pretrained|checkpoint|source)(_|$)")
    harmless = {"use_checkpoint", "grad_checkpointing", "pretrained_window_size", "pretrained_window_sizes"}
    harmless |= {"drop_path", "drop_path_prob", "drop_path_rate", "drop_path_rates", "transformer_drop_path"}
    for model in timm.list_models():
        options = timm_options(f"tu-{model}")
        assert "in_chans" in options or "in_channels" in options, model
        assert not options & loading, model
        assert {name for name in options if words.search(name)} <= harmless, model
