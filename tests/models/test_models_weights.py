"""Files of weights: every form that is read, what is refused, and how names become files without and with a network."""

import hashlib
import os
import pickle
import re
import socket
import threading
import time
import urllib.error
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from segapp.errors import CheckpointError, ConfigError
from segapp.models import build_model
from segapp.models.by_name import expected_statistics
from segapp.models.from_torchvision import build_torchvision
from segapp.models.keys import KeyMap, LoadReport, random_modules
from segapp.models.weights import (
    check_reachable,
    fetch_hub_file,
    fetch_url,
    hub_problem,
    load_weights,
    read_weights_file,
)

BACKBONE = "mobilenet_v3_small"


pytestmark = pytest.mark.usefixtures("_uninspected")


def build(num_classes=3, name="lraspp", **kwargs):
    return build_model("torchvision", name, num_classes, encoder=kwargs.pop("encoder", BACKBONE), **kwargs)


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(5)
    model = build_torchvision("lraspp", 3, False, BACKBONE, {}, 3)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_tensors(model, state):
    for name, value in model.state_dict().items():
        assert value.equal(state[name]), name


# Files that can be read


def prefixed(state, prefix):
    return {f"{prefix}{name}": value for name, value in state.items()}


def zeros(state):
    return {name: torch.zeros_like(value) for name, value in state.items()}


FORMS = {
    "plain": lambda state: state,
    "checkpoint": lambda state: {"net": zeros(state), "model": state, "step": 7, "config": {"a": [1, 2]}},
    "checkpoint with an average": lambda state: {"model": zeros(state), "ema": {"module": state, "num_updates": 7}},
    "checkpoint with another average": lambda state: {"model": state, "ema": {"shadow": zeros(state)}},
    "module in state_dict": lambda state: {"state_dict": prefixed(state, "module.")},
    "compiled": lambda state: prefixed(state, "_orig_mod."),
    "compiled in module": lambda state: prefixed(state, "module._orig_mod."),
    "lightning": lambda state: {"state_dict": prefixed(state, "model.")},
}


@pytest.mark.parametrize("form", [*FORMS, "safetensors"])
def test_every_usual_form_of_a_file_loads(tmp_path, state, form):
    if form == "safetensors":
        file = tmp_path / "weights.safetensors"
        save_file(state, file)
    else:
        file = tmp_path / "weights.pt"
        torch.save(FORMS[form](state), file)
    model = build(weights=str(file))
    assert_same_tensors(model, state)
    (report,) = model.load_reports
    assert report.source == str(file)
    assert set(report.keys.taken) == set(state)
    assert report.keys.missing == report.keys.left_out == {}


def test_half_precision_weights_become_the_models_type(tmp_path, state):
    half = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    torch.save(half, tmp_path / "half.pt")
    model, other = (build(weights=str(tmp_path / "half.pt")) for _ in range(2))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():  # no network shares its memory with the file
        next(other.parameters()).zero_()
    torch.testing.assert_close(model.state_dict(), state, rtol=1e-3, atol=1e-3)


# Tensors that do not fit


def test_head_of_other_classes_stays_initialised_and_is_named(tmp_path, state):
    torch.save(state | {"ema.decay": torch.tensor(0.9)}, tmp_path / "weights.pt")
    head = {f"classifier.{part}_classifier.{kind}" for part in ("low", "high") for kind in ("weight", "bias")}
    torch.manual_seed(0)
    fresh = build(7).state_dict()
    torch.manual_seed(0)
    model = build(7, weights=str(tmp_path / "weights.pt"))
    (report,) = model.load_reports
    classes = dict.fromkeys(head, "for 3 classes there, 7 here")
    assert report.keys.missing == classes
    assert report.keys.left_out == classes | {"ema.decay": "this model has no such tensor"}
    assert set(report.keys.taken) == set(state) - head
    assert all(model.state_dict()[name].equal(fresh[name]) for name in head)
    assert "left at initialization classifier.low_classifier.weight, classifier" in report.lines()[1]
    assert "and 2 more (for 3 classes there, 7 here)" in report.lines()[1]
    torch.save({"model": state}, tmp_path / "best.pt")  # of which the backbone alone is wanted
    model = build(9, weights_backbone=str(tmp_path / "best.pt"))
    assert all(v.equal(state[n]) for n, v in model.state_dict().items() if n.startswith("backbone."))


def test_summary_of_many_names_is_short():
    missing = {f"m{i}": f"reason {i // 60}" for i in range(300)}
    report = LoadReport("f", KeyMap("its own names", {"a": "a"}, {}, missing), notes=("one note", "and another"))
    assert "m0, m1 and 58 more (reason 0)" in report.lines()[1]
    assert report.lines()[1].endswith("and 2 more reasons")
    assert report.lines()[2:] == ("weights f: one note", "weights f: and another")
    assert all(len(line) < 300 for line in report.lines())
    event = report.as_event()
    assert (event.num_taken, event.num_tensors, len(event.missing)) == (1, 301, 100)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"a": torch.zeros(2), "b": torch.zeros(2)},
            r"holds no tensor of this model \(it has a, b, the model backbone",
        ),
        ({}, r"holds no state dict; save one with torch\.save"),
        ({"step": 3, "model": None}, r"holds no state dict"),
        (
            {"student": {"a": torch.zeros(1)}, "teacher": {"a": torch.zeros(1)}, "step": 3},
            r"holds several state dicts \(student, teacher\)",
        ),
    ],
)
def test_file_without_tensors_of_the_model_is_refused(tmp_path, tensors, message):
    torch.save(tensors, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=message):
        build(weights=str(tmp_path / "weights.pt"))


def without(state, part):
    return {name: value for name, value in state.items() if part not in name}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "running_var",
            r"lacks \d+ of the \d+ tensors of this \w+, such as backbone\.0\.1\.running_var \(not in the file",
        ),
        (".5.block.1.1.", r"lacks 4 of the 2\d\d tensors .* such as backbone\.5\.block\.1\.1\.weight .*; give weights"),
        (
            "scale.",
            r"lacks 1 of the 216 tensors of this model.* classifier\.scale\.1\.weight .* as model\.weights_backbone",
        ),
        ("high_classifier", r"lacks 2 of the 216 tensors of this model, such as classifier\.high_classifier\.weight"),
        ("num_batches_tracked", None),  # which may be missing
    ],
)
def test_one_rule_for_what_a_file_lacks(state, part, message):
    file = without(state, part)
    is_of_head = "classifier" in str(message)
    for key in ("model.weights", "model.weights_backbone", "weights"):
        model = build()
        if message is None or (is_of_head and key == "model.weights_backbone"):
            load_weights(model, file, "a.pt", key)
            assert all("num_batches" in name for name in model.load_reports[0].keys.missing)
        else:
            with pytest.raises(CheckpointError, match=rf"^{key}: a\.pt {message}"):
                load_weights(model, file, "a.pt", key)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("backbone.1.block.0.0.weight", lambda value: (value * 99).to(torch.int8), "has torch.int8 as"),
        ("classifier.cbr.0.weight", lambda value: value.where(value != value[5, 0], torch.nan), "has NaN or infinite"),
        ("backbone.0.1.running_var", lambda value: value.double() + 1e300, "has NaN or infinite"),  # in float32
        ("backbone.0.0.weight", lambda value: value.to_sparse(), "has torch.sparse_coo as"),
        ("backbone.0.0.weight", lambda value: value.to(torch.complex64), "has torch.complex64 as"),
    ],
)
def test_values_that_cannot_be_trained_are_refused(state, name, change, message):
    for is_partial in (False, True):
        model = build()
        with pytest.raises(CheckpointError, match=rf"a\.pt {message}.* {re.escape(name)}"):
            load_weights(model, state | {name: change(state[name])}, "a.pt", "model.weights", is_partial=is_partial)
        assert model.load_reports == ()


def test_part_of_a_file_is_taken_if_it_is_wanted(tmp_path, state):
    part = without(without(without(state, ".5.block.1."), "scale."), "num_batches_tracked")
    torch.save(part, tmp_path / "weights.pt")
    model = build(weights=str(tmp_path / "weights.pt"), partial_weights=True)
    lost = {name for name in state if ".5.block.1." in name or "scale." in name}
    counters = {name for name in state if name.endswith("num_batches_tracked")}
    assert set(model.load_reports[0].keys.missing) == lost | counters
    assert set(model.load_reports[0].random) == lost - counters
    assert random_modules(model.load_reports) == ["backbone.5.block.1", "classifier.scale"]
    torch.save(without(state, "classifier"), tmp_path / "backbone.pt")
    both = build(
        weights_backbone=str(tmp_path / "backbone.pt"), weights=str(tmp_path / "weights.pt"), partial_weights=True
    )
    assert random_modules(both.load_reports) == ["classifier.scale"]
    assert all(value.equal(state[n]) for n, value in both.state_dict().items() if not re.search("scale.|_tracked", n))


def test_only_convolutions_of_the_backbone_are_adapted(tmp_path):
    """The weight of this head has three times the channels, as that of a convolution over RGB has for one band."""
    state = build(in_channels=1).state_dict()
    name = "classifier.high_classifier.weight"
    torch.save(state | {name: torch.randn(3, 3 * state[name].shape[1], 1, 1)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"classifier\.high_classifier\.weight"):
        build(in_channels=1, weights=str(tmp_path / "other.pt"))


def test_file_of_a_larger_head_is_refused(tmp_path):
    arguments = {"encoder": "tu-test_resnet", "options": {"encoder_depth": 3, "decoder_channels": [20, 18, 16]}}
    larger = {**arguments["options"], "decoder_attention_type": "scse"}
    torch.save(build_model("smp", "Unet", 3, **arguments | {"options": larger}).state_dict(), tmp_path / "scse.pt")
    arguments["weights"] = str(tmp_path / "scse.pt")
    with pytest.raises(CheckpointError, match=r"larger head, with further tensors: decoder\.blocks\.0\.attention1"):
        build_model("smp", "Unet", 3, **arguments)
    (report,) = build_model("smp", "Unet", 3, **arguments, partial_weights=True).load_reports
    assert report.random == ()


def test_auxiliary_head_may_be_missing(tmp_path, state):
    own = build(name="fcn", encoder="mobilenet_v3_small").state_dict()
    torch.save(without(own, "aux_classifier"), tmp_path / "fcn.pt")
    (report,) = build(name="fcn", weights=str(tmp_path / "fcn.pt")).load_reports
    assert {name.partition(".")[0] for name in report.keys.missing} == {"aux_classifier"}
    torch.save(own, tmp_path / "fcn.pt")
    (report,) = build(6, name="fcn", weights=str(tmp_path / "fcn.pt")).load_reports
    ends = {f"{head}classifier.4.{kind}" for head in ("", "aux_") for kind in ("weight", "bias")}
    assert report.keys.missing == dict.fromkeys(ends, "for 3 classes there, 6 here")


def test_backbone_weights_load_before_whole_weights(tmp_path, state):
    torch.save(torchvision.models.mobilenet_v3_small(weights=None).state_dict(), tmp_path / "m.pth")
    torch.save(state, tmp_path / "weights.pt")
    model = build(weights=str(tmp_path / "weights.pt"), weights_backbone=str(tmp_path / "m.pth"))
    assert [report.source for report in model.load_reports] == [str(tmp_path / f) for f in ("m.pth", "weights.pt")]
    assert model.load_reports[0].keys.missing == {}
    assert_same_tensors(model, state)


# Files that cannot be used


def test_missing_file_is_named(tmp_path):
    for path in (tmp_path / "nowhere.pt", tmp_path / "folder", tmp_path):
        with pytest.raises(CheckpointError, match=r"model\.weights: no file .*; give the path") as raised:
            build(weights=str(path))
        assert (raised.value.key, raised.value.path) == ("model.weights", str(path))


class Bomb:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


def test_pickle_with_code_is_refused_and_not_run(tmp_path):
    bomb = Bomb(str(tmp_path / "ran"))
    torch.save({"model": bomb}, tmp_path / "zip.pt")
    (tmp_path / "raw.pkl").write_bytes(pickle.dumps({"model": bomb}, protocol=2))
    with pytest.raises(CheckpointError, match=r"loading it would run code, so it was not loaded"):
        build(weights=str(tmp_path / "zip.pt"))
    with pytest.raises(CheckpointError, match=r"not loaded|not a weights file"):
        build(weights=str(tmp_path / "raw.pkl"))
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_refused(tmp_path, state):
    torch.save(state, tmp_path / "whole.pt")
    save_file(state, tmp_path / "whole.safetensors")
    for file in (tmp_path / "whole.pt", tmp_path / "whole.safetensors"):
        content = file.read_bytes()
        for length in (0, 1, 10, 500, len(content) // 2, len(content) - 1):
            damaged = file.with_stem(f"cut{length}")
            damaged.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match=r"is damaged or not a .*copy or download it again"):
                read_weights_file(damaged)
    (tmp_path / "text.pt").write_text("hello, this is not a weights file\n" * 50)
    with pytest.raises(CheckpointError, match="is damaged or not a weights file"):
        read_weights_file(tmp_path / "text.pt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_named(tmp_path, state):
    file = tmp_path / "weights.pt"
    torch.save(state, file)
    file.chmod(0)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_weights_file(file)


# Names of weights


def test_unknown_weights_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'COCO_WITH_VOC' is not .*did you mean COCO_WITH_VOC_LABELS_V1.*file"):
        build_model("torchvision", "lraspp_mobilenet_v3_large", 3, weights="COCO_WITH_VOC")
    with pytest.raises(ConfigError, match=r"weights_backbone: 'IMAGENET1K_V3' is not .*did you mean IMAGENET1K_V1"):
        build(weights_backbone="IMAGENET1K_V3")
    with pytest.raises(ConfigError, match=r"'MobileNet_V3_Small_Weights.IMAGENET1K_V3' is not .*IMAGENET1K_V1.*file"):
        build(weights_backbone="MobileNet_V3_Small_Weights.IMAGENET1K_V3")
    with pytest.raises(CheckpointError, match=r"model\.weights: no file 'DEFAULT', and there are no named weights of"):
        build(weights="DEFAULT")
    with pytest.raises(ConfigError, match=r"weights_backbone: 'imagenett' is not .*did you mean imagenet"):
        build_model("smp", "PSPNet", 3, encoder="mobilenet_v2", weights_backbone="imagenett")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of torch's, and no look at the network before a download."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("segapp.models.weights.check_reachable", lambda url: None)
    return tmp_path / "hub" / "checkpoints"


@pytest.mark.parametrize(
    "error",
    [
        urllib.error.URLError(OSError("Name or service not known")),
        urllib.error.HTTPError("https://host.example/x.pth", 403, "Forbidden", {}, None),
        RuntimeError('invalid hash value (expected "0676ba61", got "00")'),
    ],
)
@pytest.mark.parametrize("key", ["weights", "weights_backbone"])
def test_missing_network_is_one_clear_error(hub, monkeypatch, error, key):
    def offline(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(CheckpointError) as raised:
        build_model("torchvision", "lraspp_mobilenet_v3_large", 3, **{key: "DEFAULT"})
    message = str(raised.value)
    assert message.startswith(f"model.{key}=DEFAULT: ")
    assert f"put the file into {hub}" in message
    assert "from download.pytorch.org/models/" in message
    assert "mobilenet_v3_large-" in message
    assert "://" not in message
    assert "\n" not in message


def test_named_weights_are_downloaded_once_and_verified(hub, monkeypatch):
    published = torchvision.models.mobilenet_v3_small(weights=None).state_dict()
    torchvision_weights = torchvision.models.MobileNet_V3_Small_Weights.IMAGENET1K_V1
    calls = []

    def download(url, destination, hash_prefix, progress):
        calls.append((url, hash_prefix))
        torch.save(published, destination)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    model = build(weights_backbone="MobileNet_V3_Small_Weights.IMAGENET1K_V1")
    assert calls == [(torchvision_weights.url, "047dcff4")]
    assert model.load_reports[0].keys.missing == {}
    with pytest.raises(CheckpointError, match=r"is damaged \(its sha256 is not 047dcff4\.\.\.\); delete it"):
        build(weights_backbone="DEFAULT")  # the file made here has another hash
    file = hub / torchvision_weights.url.rsplit("/", 1)[-1]
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    renamed = torchvision_weights.url.replace("047dcff4", digest[:8])
    file.rename(hub / renamed.rsplit("/", 1)[-1])
    assert read_weights_file(fetch_url(renamed, "DEFAULT", "model.weights")).keys() == published.keys()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("encoder", "weights", "twin"),
    [
        ("tu-mobilevit_xs", "DEFAULT", "mobilevit_xs.cvnets_in1k"),
        ("tu-vit_small_patch16_clip_224.nothing", "net.pt", "resnet50.tv_in1k"),  # a tag that does not exist
        ("resnext101_32x8d", "swsl", "resnet50.tv_in1k"),
        ("dpn92", "imagenet+5k", "dpn92.mx_in1k"),
        ("xception", "net.pt", "legacy_xception.tf_in1k"),
        ("inceptionresnetv2", "imagenet+background", "inception_resnet_v2.tf_in1k"),
        ("efficientnet-b3", "advprop", "tf_efficientnet_b3.ap_in1k"),
        ("timm-efficientnet-b3", "noisy-student", "tf_efficientnet_b3.ns_jft_in1k"),
        ("timm-tf_efficientnet_lite2", "imagenet", "tf_efficientnet_lite2.in1k"),
        ("timm-mobilenetv3_large_100", "net.pt", "tf_mobilenetv3_large_100.in1k"),
    ],
)
def test_weights_expect_the_mean_and_std_that_timm_lists(encoder, weights, twin):
    listed = timm.get_pretrained_cfg(twin)
    assert expected_statistics("smp", "Unet", encoder, weights) == (listed.mean, listed.std)
    features = expected_statistics("smp", "Unet", "vgg16", "VGG16_Weights.IMAGENET1K_FEATURES")
    assert features == ((0.48235, 0.45882, 0.40784), (1 / 255,) * 3)  # torchvision's own, for values up to 255


def test_named_encoder_weights_of_smp_come_from_its_hub(tmp_path, monkeypatch):
    published = torchvision.models.mobilenet_v2(weights=None).state_dict()
    save_file(published, tmp_path / "model.safetensors")
    asked = []
    monkeypatch.setattr("segapp.models.weights.check_reachable", lambda url: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    def download(repo_id, filename, revision):
        asked.append((repo_id, filename))
        return str(tmp_path / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    model = build_model("smp", "Linknet", 3, encoder="mobilenet_v2", weights_backbone="imagenet")
    assert asked == [("smp-hub/mobilenet_v2.imagenet", "model.safetensors")]
    assert_same_tensors(model.backbone_module, published)


def test_weights_in_the_hub_cache_need_no_network(tmp_path, monkeypatch):
    """A file as huggingface_hub lays it out: a blob, a snapshot that links to it, and the branch's commit."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("segapp.models.weights.check_reachable", lambda url: pytest.fail("asked for the network"))
    published = timm.create_model("test_vit").state_dict()
    repo_id, commit = timm.get_pretrained_cfg("test_vit").hf_hub_id, "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / f"models--{repo_id.replace('/', '--')}"
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / name).mkdir(parents=True)
    save_file(published, folder / "blobs" / "content")
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit / "model.safetensors").symlink_to("../../blobs/content")
    assert hub_problem(repo_id, None) is None
    options = {"encoder": "tu-test_vit", "options": {"num_blocks": 2}}
    model = build_model("segapp", "eomt", 3, weights_backbone="DEFAULT", **options)
    own = {name: tensor for name, tensor in published.items() if not name.startswith(("head.", "fc_norm."))}
    assert_same_tensors(model.backbone_module, own)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [(200, None), (404, "404"), ("a page", "not from a hub"), ("slow", "no answer within 0.5 s")],
)
def test_hub_offers_weights_if_it_answers_for_the_file(tmp_path, monkeypatch, answer, problem):
    """The address alone, which accepts a connection, proves nothing; nor does a page that asks for a login."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            time.sleep(2 if answer == "slow" else 0)
            self.send_response(answer if isinstance(answer, int) else 200)
            if answer != "a page":
                self.send_header("ETag", '"abc"')
                self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
            self.send_header("Content-Length", "3")
            self.end_headers()

        def log_message(self, *args):
            pass

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        template = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        start = time.monotonic()
        said = hub_problem("timm/test_vit.r160_in1k", None, timeout_s=0.5 if answer == "slow" else 10)
        assert time.monotonic() - start < 8
        server.shutdown()
    assert asked == ["/timm/test_vit.r160_in1k/resolve/main/model.safetensors"]
    assert said is None if problem is None else problem in str(said)


@pytest.mark.parametrize("fault", ["no name server", "no route", "refused", "HF_HUB_OFFLINE"])
def test_missing_network_is_found_out_within_three_seconds(tmp_path, monkeypatch, fault):
    def hang(*args, **kwargs):
        time.sleep(10)
        raise OSError("too late")

    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("segapp.models.weights.check_reachable.__defaults__", (0.3,))
    if fault == "no name server":
        monkeypatch.setattr(socket, "getaddrinfo", hang)
    elif fault == "no route":
        monkeypatch.setattr(socket, "create_connection", hang)
    elif fault == "refused":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    else:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        fetch_hub_file("timm/test_vit.r160_in1k", None, "DEFAULT", "model.weights_backbone")
    assert time.monotonic() - start < 8
    assert hub_problem("timm/test_vit.r160_in1k", None) is not None
    message = str(raised.value)
    assert "/timm/test_vit.r160_in1k/resolve/main/model.safetensors" in message
    assert f"copy {tmp_path}/models--timm--test_vit.r160_in1k from a machine that has it" in message
    assert message.endswith("or give the path of a copy as model.weights_backbone")
    assert ("HF_HUB_OFFLINE is set" in message) == (fault == "HF_HUB_OFFLINE")


@pytest.mark.parametrize(
    ("url", "proxies", "server"),
    [
        ("https://host.example/file", {}, ("host.example", 443)),
        ("http://host.example/file", {"https": "http://proxy.example:3128"}, ("host.example", 80)),
        ("https://host.example:8443/file", {}, ("host.example", 8443)),
        ("https://host.example/file", {"https": "http://proxy.example:3128"}, ("proxy.example", 3128)),
        ("https://host.example/file", {"https": "proxy.example:3128"}, ("proxy.example", 3128)),
    ],
)
def test_address_that_must_be_reachable_follows_url_and_proxy(monkeypatch, url, proxies, server):
    asked = []

    def connect(address, timeout):
        asked.append(address)
        return socket.socket()

    monkeypatch.setattr("urllib.request.getproxies", lambda: proxies)
    monkeypatch.setattr("urllib.request.proxy_bypass", lambda host: False)
    monkeypatch.setattr(socket, "create_connection", connect)
    check_reachable(url)
    assert asked == [server]
