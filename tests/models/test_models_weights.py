import hashlib
import os
import pickle
import socket
import time
import urllib.error

import pytest
import torch
from safetensors.torch import save_file

from segapp.errors import CheckpointError, ConfigError
from segapp.models import build_model
from segapp.models.keys import KeyMap
from segapp.models.weights import LoadReport, check_reachable, fetch_hub_file, fetch_url, read_weights_file

BACKBONE = "mobilenet_v3_small"


@pytest.fixture(autouse=True)
def no_look_at_the_network(monkeypatch):
    """Skip the inspection; these networks have no unused parts."""
    monkeypatch.setattr("segapp.models.by_name.inspect_model", lambda model: None)


def build(num_classes=3, name="lraspp", **kwargs):
    return build_model("torchvision", name, num_classes, encoder=kwargs.pop("encoder", BACKBONE), **kwargs)


@pytest.fixture(scope="module")
def source():
    torch.manual_seed(5)
    model = build()
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
    return model


@pytest.fixture(scope="module")
def state(source):
    return {name: value.clone() for name, value in source.state_dict().items()}


def assert_same_tensors(model, state, besides=()):
    for name, value in model.state_dict().items():
        assert value.equal(state[name]) != (name in besides), name


# Files that can be read


def wrapped(state, form):
    return {
        "plain": state,
        "checkpoint": {"model": state, "step": 7, "config": {"a": [1, 2]}},
        "state_dict": {"state_dict": state},
        "module": {f"module.{name}": value for name, value in state.items()},
        "module in checkpoint": {"model": {f"module.{name}": value for name, value in state.items()}},
        "compiled": {f"_orig_mod.{name}": value for name, value in state.items()},
        "compiled in module": {f"module._orig_mod.{name}": value for name, value in state.items()},
        "lightning": {"state_dict": {f"model.{name}": value for name, value in state.items()}},
        "half": {name: value.half() if value.is_floating_point() else value for name, value in state.items()},
    }[form]


@pytest.mark.parametrize(
    "form",
    [
        "plain",
        "checkpoint",
        "state_dict",
        "module",
        "module in checkpoint",
        "compiled",
        "compiled in module",
        "lightning",
    ],
)
def test_every_usual_form_of_a_file_loads(tmp_path, state, form):
    file = tmp_path / "weights.pt"
    torch.save(wrapped(state, form), file)
    model = build(weights=str(file))
    assert_same_tensors(model, state)
    (report,) = model.load_reports
    assert report.source == str(file)
    assert set(report.keys.taken) == set(state)
    assert report.keys.missing == report.keys.left_out == {}


def test_half_precision_weights_become_the_models_type(tmp_path, state):
    torch.save(wrapped(state, "half"), tmp_path / "half.pt")
    model = build(weights=str(tmp_path / "half.pt"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model.state_dict(), state, rtol=1e-3, atol=1e-3)


def test_safetensors_load(tmp_path, state):
    save_file(state, tmp_path / "weights.safetensors")
    assert_same_tensors(build(weights=str(tmp_path / "weights.safetensors")), state)


def test_weights_round_trip_through_torchvision(tmp_path):
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    original = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    torch.save(original.state_dict(), tmp_path / "original.pth")
    model = build_model("torchvision", "lraspp_mobilenet_v3_large", 3, weights=str(tmp_path / "original.pth"))
    assert_same_tensors(model, original.state_dict())


def test_network_does_not_share_memory_with_the_file(tmp_path, state):
    torch.save(state, tmp_path / "weights.pt")
    first, second = (build(weights=str(tmp_path / "weights.pt")) for _ in range(2))
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert_same_tensors(second, state)


# Tensors that do not fit


def test_head_of_other_classes_stays_initialised_and_is_named(tmp_path, state):
    torch.save(state, tmp_path / "weights.pt")
    head = {f"classifier.{part}_classifier.{kind}" for part in ("low", "high") for kind in ("weight", "bias")}
    torch.manual_seed(0)
    fresh = build(7).state_dict()
    torch.manual_seed(0)
    model = build(7, weights=str(tmp_path / "weights.pt"))
    (report,) = model.load_reports
    assert report.keys.missing == report.keys.left_out == dict.fromkeys(head, "for 3 classes there, 7 here")
    assert set(report.keys.taken) == set(state) - head
    assert all(model.state_dict()[name].equal(fresh[name]) for name in head)
    assert "left at initialization classifier.low_classifier.weight, classifier" in report.lines()[1]
    assert "and 2 more (for 3 classes there, 7 here)" in report.lines()[1]


def test_missing_and_unexpected_tensors_are_named(tmp_path, state):
    changed = {name: value for name, value in state.items() if name != "classifier.low_classifier.bias"}
    changed |= {"ema.decay": torch.tensor(0.9)}
    torch.save(changed, tmp_path / "weights.pt")
    (report,) = build(weights=str(tmp_path / "weights.pt")).load_reports
    assert report.keys.missing == {"classifier.low_classifier.bias": "not in the file"}
    assert report.keys.left_out == {"ema.decay": "this model has no such tensor"}
    assert "classifier.low_classifier.bias (not in the file)" in report.lines()[1]
    assert "left out ema.decay (this model has no such tensor)" in report.lines()[1]


def test_summary_of_many_names_is_short():
    missing = {f"m{i}": f"reason {i // 60}" for i in range(300)}
    report = LoadReport("f", KeyMap("its own names", {"a": "a"}, {}, missing))
    assert "m0, m1 and 58 more (reason 0)" in report.lines()[1]
    assert report.lines()[1].endswith("and 2 more reasons")
    assert all(len(line) < 300 for line in report.lines())
    event = report.as_event()
    assert (event.num_taken, event.num_tensors, len(event.missing)) == (1, 301, 100)


def test_encoder_only_file_loads_into_whole_network(tmp_path, state):
    torch.save({n: v for n, v in state.items() if n.startswith("backbone.")}, tmp_path / "weights.pt")
    (report,) = build(weights=str(tmp_path / "weights.pt")).load_reports
    assert all(name.startswith("classifier.") for name in report.keys.missing)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"a": torch.zeros(2), "b": torch.zeros(2)},
            r"holds no tensor of this model \(it has a, b, the model backbone",
        ),
        ({"backbone.0.0.weight": torch.zeros(4, 4)}, r"holds no tensor of this model"),
        ({}, r"holds no state dict; save one with torch\.save"),
        ({"step": 3, "model": None}, r"holds no state dict"),
        ([torch.zeros(2)], r"holds no state dict"),
        (torch.zeros(2), r"holds no state dict"),
    ],
)
def test_file_without_tensors_of_the_model_is_refused(tmp_path, tensors, message):
    torch.save(tensors, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=message):
        build(weights=str(tmp_path / "weights.pt"))


def test_incomplete_backbone_is_refused_by_name(tmp_path, state):
    torch.save({n: v for n, v in state.items() if not n.startswith("backbone.5.")}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"is of another backbone: \d+ of \d+ tensors .* backbone\.5\.block"):
        build(weights=str(tmp_path / "weights.pt"))


# Backbones


@pytest.mark.parametrize("library", ["torchvision", "smp"])
def test_published_torchvision_backbone_file_loads(tmp_path, library):
    import torchvision

    torch.manual_seed(1)
    published = torchvision.models.resnet18(weights=None).state_dict()
    torch.save(published, tmp_path / "resnet18.pth")
    name = "lraspp" if library == "torchvision" else "FPN"
    model = build_model(library, name, 3, encoder="resnet18", weights_backbone=str(tmp_path / "resnet18.pth"))
    (report,) = model.load_reports
    assert report.keys.missing == {}
    assert report.keys.left_out == dict.fromkeys(["fc.weight", "fc.bias"], "the backbone's own classifier")
    assert_same_tensors(model.backbone_module, published)


def test_mobilenet_backbone_file_with_features_prefix_loads(tmp_path):
    import torchvision

    torch.save(torchvision.models.mobilenet_v3_small(weights=None).state_dict(), tmp_path / "m.pth")
    (report,) = build(weights_backbone=str(tmp_path / "m.pth")).load_reports
    assert report.keys.missing == {}


@pytest.mark.parametrize("encoder", ["tu-resnet18", "tu-convnext_atto"])
def test_timm_backbone_file_with_deeper_names_loads(tmp_path, encoder):
    import timm

    torch.manual_seed(1)
    published = timm.create_model(encoder.removeprefix("tu-"), pretrained=False).state_dict()
    torch.save(published, tmp_path / "timm.pth")
    model = build_model("smp", "FPN", 3, encoder=encoder, weights_backbone=str(tmp_path / "timm.pth"))
    (report,) = model.load_reports
    assert report.keys.missing == {}
    first = next(model.backbone_module.parameters())
    assert any(first.equal(value) for value in published.values())


def test_backbone_of_a_segmentation_checkpoint_loads(tmp_path, state):
    torch.save({"model": state}, tmp_path / "best.pt")
    model = build(9, weights_backbone=str(tmp_path / "best.pt"))
    assert all(v.equal(state[n]) for n, v in model.state_dict().items() if n.startswith("backbone."))


def test_backbone_file_of_another_depth_is_refused(tmp_path):
    import torchvision

    torch.save(torchvision.models.resnet18(weights=None).state_dict(), tmp_path / "resnet18.pth")
    message = r"model\.weights_backbone: .*resnet18\.pth is of another backbone"
    with pytest.raises(CheckpointError, match=message):
        build_model("smp", "PSPNet", 3, encoder="resnet34", weights_backbone=str(tmp_path / "resnet18.pth"))


def test_backbone_weights_load_before_whole_weights(tmp_path, state):
    import torchvision

    torch.save(torchvision.models.mobilenet_v3_small(weights=None).state_dict(), tmp_path / "m.pth")
    torch.save(state, tmp_path / "weights.pt")
    model = build(weights=str(tmp_path / "weights.pt"), weights_backbone=str(tmp_path / "m.pth"))
    assert [report.source for report in model.load_reports] == [str(tmp_path / f) for f in ("m.pth", "weights.pt")]
    assert_same_tensors(model, state)


# Files that cannot be used


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.weights: no file .*nowhere\.pt; give the path") as raised:
        build(weights=str(tmp_path / "nowhere.pt"))
    assert (raised.value.key, raised.value.path) == ("model.weights", str(tmp_path / "nowhere.pt"))
    with pytest.raises(CheckpointError, match=r"model\.weights: no file"):
        build(weights=f"{tmp_path}{os.sep}folder")
    with pytest.raises(CheckpointError, match=r"model\.weights: no file"):
        build(weights=str(tmp_path))


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


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr("segapp.models.weights.check_reachable", lambda url: None)
    return tmp_path / "hub" / "checkpoints"


def test_unknown_weights_name_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"'COCO_WITH_VOC_LABELS' is not .*did you mean COCO_WITH_VOC_LABELS_V1.*file"
    ):
        build_model("torchvision", "lraspp_mobilenet_v3_large", 3, weights="COCO_WITH_VOC_LABELS")
    with pytest.raises(ConfigError, match=r"weights_backbone: 'IMAGENET1K_V3' is not .*did you mean IMAGENET1K_V1"):
        build(weights_backbone="IMAGENET1K_V3")
    with pytest.raises(CheckpointError, match=r"model\.weights: no file 'DEFAULT', and there are no named weights of"):
        build(weights="DEFAULT")
    with pytest.raises(ConfigError, match=r"weights_backbone: 'imagenett' is not .*did you mean imagenet"):
        build_model("smp", "FPN", 3, encoder="mobilenet_v2", weights_backbone="imagenett")


@pytest.mark.parametrize(
    "error",
    [
        urllib.error.URLError(OSError("Name or service not known")),
        urllib.error.HTTPError("https://host.example/x.pth", 403, "Forbidden", {}, None),
        RuntimeError('invalid hash value (expected "0676ba61", got "00")'),
        TimeoutError("timed out"),
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
    import torchvision

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
    monkeypatch.setattr("segapp.models.weights.sha256_of", lambda path, key: digest.replace(digest[:8], "047dcff4", 1))
    model = build(weights_backbone="DEFAULT")
    assert_same_tensors(model.backbone_module, {n.removeprefix("features."): v for n, v in published.items()})
    assert len(calls) == 1


def test_named_encoder_weights_of_smp_come_from_its_hub(tmp_path, monkeypatch):
    import torchvision

    published = torchvision.models.resnet18(weights=None).state_dict()
    save_file(published, tmp_path / "model.safetensors")
    asked = []
    monkeypatch.setattr("segapp.models.weights.check_reachable", lambda url: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    def download(repo_id, filename, revision):
        asked.append((repo_id, filename))
        return str(tmp_path / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    model = build_model("smp", "Linknet", 3, encoder="resnet18", weights_backbone="imagenet")
    assert asked == [("smp-hub/resnet18.imagenet", "model.safetensors")]
    assert_same_tensors(model.backbone_module, published)

    def offline(*args, **kwargs):
        raise ConnectionError("https://host.example/ is not reachable")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    for encoder, name in [("resnet18", "imagenet"), ("tu-resnet18", "DEFAULT")]:
        with pytest.raises(CheckpointError) as raised:
            build_model("smp", "Linknet", 3, encoder=encoder, weights_backbone=name)
        assert f"model.weights_backbone={name}: model.safetensors of " in str(raised.value)
        assert "give the path of a copy as model.weights_backbone" in str(raised.value)
        assert "://" not in str(raised.value)
        assert f"copy {tmp_path / 'cache'}/models--" in str(raised.value)
        assert "/resolve/" in str(raised.value)


def write_to_hub_cache(cache, repo_id, state):
    """Lay out a file as huggingface_hub does: a blob, a snapshot that links to it, and the branch's commit."""
    folder, commit = cache / f"models--{repo_id.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / name).mkdir(parents=True)
    save_file(state, folder / "blobs" / "content")
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit / "model.safetensors").symlink_to("../../blobs/content")


def test_weights_in_the_hub_cache_need_no_network(tmp_path, monkeypatch):
    import timm

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("segapp.models.weights.check_reachable", lambda url: pytest.fail("asked for the network"))
    published = timm.create_model("test_vit").state_dict()
    encoder, options = "tu-test_vit", {"num_blocks": 2}
    write_to_hub_cache(tmp_path, timm.get_pretrained_cfg("test_vit").hf_hub_id, published)
    model = build_model("segapp", "eomt", 3, encoder=encoder, weights_backbone="DEFAULT", options=options)
    own = {name: tensor for name, tensor in published.items() if not name.startswith(("head.", "fc_norm."))}
    assert_same_tensors(model.backbone_module, own)
    model = build_model("smp", "DPT", 3, encoder=encoder, weights_backbone="imagenet")
    assert model.load_reports[0].keys.taken


@pytest.mark.parametrize("fault", ["no name server", "no route", "refused", "HF_HUB_OFFLINE"])
def test_missing_network_is_found_out_within_three_seconds(tmp_path, monkeypatch, fault):
    def hang(*args, **kwargs):
        time.sleep(4)
        raise OSError("too late")

    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
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
    assert time.monotonic() - start < 3
    message = str(raised.value)
    assert "/timm/test_vit.r160_in1k/resolve/main/model.safetensors" in message
    assert f"copy {tmp_path}/models--timm--test_vit.r160_in1k from a machine that has it" in message
    assert ("HF_HUB_OFFLINE is set" in message) == (fault == "HF_HUB_OFFLINE")


def test_no_download_begins_from_an_absent_server(tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *_, **__: pytest.fail("a download without a limit"))
    with pytest.raises(CheckpointError, match=r"net-0123abcd\.pth is not on this machine .*refused"):
        fetch_url("http://127.0.0.1:9/net-0123abcd.pth", "DEFAULT", "model.weights")


@pytest.mark.parametrize(
    ("url", "proxies", "server"),
    [
        ("https://host.example/file", {}, ("host.example", 443)),
        ("http://host.example/file", {}, ("host.example", 80)),
        ("https://host.example:8443/file", {}, ("host.example", 8443)),
        ("https://host.example/file", {"https": "http://proxy.example:3128"}, ("proxy.example", 3128)),
        ("https://host.example/file", {"https": "proxy.example:3128"}, ("proxy.example", 3128)),
        ("https://host.example/file", {"http": "http://proxy.example:3128"}, ("host.example", 443)),
    ],
)
def test_address_that_must_be_reachable_follows_url_and_proxy(monkeypatch, url, proxies, server):
    asked = []
    monkeypatch.setattr("urllib.request.getproxies", lambda: proxies)
    monkeypatch.setattr("urllib.request.proxy_bypass", lambda host: False)
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: asked.append(address) or Connection())
    check_reachable(url)
    assert asked == [server]


class Connection:
    def close(self):
        pass


def test_reachable_server_or_proxy_is_accepted(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("urllib.request.getproxies", dict)
        check_reachable(f"{address}/file")
        monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": address})
        check_reachable("https://host.example/file")
    with pytest.raises(OSError, match="refused"):
        check_reachable("https://host.example/file")
