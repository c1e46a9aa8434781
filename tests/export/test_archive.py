"""pt2 files that would run code: torch's own reader runs it, ours refuses the file."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export.pt2_archive import constants

from segapp.errors import CheckpointError
from segapp.export.archive import FILE_OPERATORS, INFO_FILE, open_archive

Files = dict[str, bytes]


class Canary:
    """Unpickled by Python's own pickle, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        height = images.shape[2] + -images.shape[2] % 8
        padded = nn.functional.pad(images, (0, 0, 0, height - images.shape[2]))
        return torch.einsum("nchw,c->nhw", self.conv(padded) * self.scale, torch.ones(2))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "whole.pt2"
    shapes = ({2: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Net().eval(), (torch.zeros(1, 3, 13, 8),), dynamic_shapes=shapes)
    torch.export.save(program, path, extra_files={INFO_FILE: '{"run": "1"}'})
    return path


def changed(whole: Path, path: Path, change: Callable[[Files], None]) -> Path:
    """The file with other content, packed as torch packs."""
    with zipfile.ZipFile(whole) as archive:
        files = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
    change(files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(f"x/{name}", data)
    return path


def edit(name: str, key: str, value: Any) -> Callable[[Files], None]:
    """Sets a key everywhere in a JSON file."""

    def put(node: Any) -> Any:
        if isinstance(node, list):
            return [put(each) for each in node]
        if isinstance(node, dict):
            return {each: value if each == key else put(part) for each, part in node.items()}
        return node

    def change(files: Files) -> None:
        files[name] = json.dumps(put(json.loads(files[name]))).encode()

    return change


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


MODEL, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
CODE = "__import__('os').system('touch {canary}')"


def attacks(canary: Path) -> dict[str, tuple[bool, Callable[[Files], None]]]:
    """Changes of a file, and whether torch's own reader runs them at once (others run with the network)."""
    payload, code = pickled({"x": Canary(canary)}), CODE.format(canary=canary)

    def as_weights(files: Files) -> None:
        edit(WEIGHTS, "use_pickle", True)(files)
        files.update({name: payload for name in files if name.startswith("data/weights/weight_")})

    def as_constant(files: Files) -> None:
        name = f"{constants.OPAQUE_OBJ_FILENAME_PREFIX}0"
        config = json.loads(files[WEIGHTS])["config"]
        entry = {**next(iter(config.values())), "path_name": name, "use_pickle": True}
        files["data/constants/model_constants_config.json"] = json.dumps({"config": {"c": entry}}).encode()
        files[f"data/constants/{name}"] = pickle.dumps(Canary(canary))

    def as_old_weights(files: Files) -> None:
        files["data/weights/model.pt"] = payload

    def as_old_file(files: Files) -> None:
        files.clear()
        parts = ("state_dict", "constants", "example_inputs")
        files.update({f"serialized_{part}.pt": payload for part in parts}, version=b"8.20")
        files["serialized_exported_program.json"] = b"{}"

    def as_name(files: Files) -> None:
        text = files[MODEL].decode().replace('"images"', json.dumps(f"images={code}"))
        files[MODEL] = text.encode()

    def as_tree(files: Files) -> None:
        context = {"default_factory_module": "this", "default_factory_name": "s", "dict_context": []}
        tree = {"type": "collections.defaultdict", "context": json.dumps(context), "children_spec": []}
        edit(MODEL, "out_spec", json.dumps([1, tree]))(files)

    def add(name: str, data: bytes) -> Callable[[Files], None]:
        return lambda files: files.update({name: data})

    return {
        "weights": (True, as_weights),
        "constants": (True, as_constant),
        "old weights": (True, as_old_weights),
        "sample inputs": (True, add("data/sample_inputs/model.pt", payload)),
        "sizes": (True, edit(MODEL, "expr_str", code)),
        "old file": (False, as_old_file),
        "operators": (False, edit(MODEL, "target", "torch.os.system")),
        "caller": (False, edit(MODEL, "target", "_operator.methodcaller")),
        "files": (False, edit(MODEL, "target", "torch.ops.aten.from_file.default")),
        "names": (False, as_name),
        "trees": (False, as_tree),
        "towers": (False, edit(MODEL, "expr_str", "Pow(Integer(9), Pow(Integer(9), Integer(9)))")),
        "attributes": (False, edit(MODEL, "expr_str", "Symbol.__class__")),
        "strings": (False, edit(MODEL, "expr_str", "Symbol('os.system')")),
        "library": (False, add("data/aotinductor/model/x.so", b"\x7fELF")),
        "second network": (False, add("models/other.json", b"{}")),
    }


@pytest.mark.parametrize("attack", attacks(Path("/nonexistent")))
def test_a_file_that_would_run_code_is_refused_and_runs_none(whole: Path, tmp_path: Path, attack: str) -> None:
    canary = tmp_path / "canary"
    runs_at_once, change = attacks(canary)[attack]
    path = changed(whole, tmp_path / "evil.pt2", change)
    if attack == "sample inputs":
        packed, _ = open_archive(path)  # they are left out
        torch.export.load(packed)
    else:
        with pytest.raises(CheckpointError, match=r"refused, it could run code|cannot be read"):
            open_archive(path)
    assert not canary.exists()
    if runs_at_once:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.export.log.warning", lambda *_, **__: None)
            try:
                torch.export.load(path)
            except Exception as error:
                assert error  # noqa: PT017
        assert canary.exists(), "torch itself has become careful: this attack shows nothing any more"


def test_a_whole_file_runs_as_torch_runs_it(whole: Path, tmp_path: Path) -> None:
    for path in (whole, changed(whole, tmp_path / "again.pt2", lambda files: None)):
        packed, properties = open_archive(path)
        assert properties == {"run": "1"}
        images = torch.rand(1, 3, 21, 8)
        found = torch.export.load(packed).module(check_guards=False)(images)
        torch.testing.assert_close(found, torch.export.load(whole).module()(images))


def test_no_operator_of_aten_takes_the_name_of_a_file_but_those_that_are_refused() -> None:
    taking = {
        schema.name.partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any("file" in argument.name for argument in schema.arguments)
    }
    assert "from_file" in taking
    assert taking <= FILE_OPERATORS


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_is_refused_or_packed_anew(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(content)))
    path = tmp_path_factory.getbasetemp() / "damaged.pt2"
    path.write_bytes(content[:cut])
    try:
        packed, _ = open_archive(path)
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017
        return
    with zipfile.ZipFile(packed) as archive:
        assert archive.testzip() is None


def test_entries_that_share_their_bytes_are_refused(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "shared.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/models/model.json", b"0" * 100_000)
        (info,) = archive.infolist()
        for i in range(5):
            again = zipfile.ZipInfo(f"x/data/weights/weight_{i}")
            for name in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(again, name, getattr(info, name))
            archive.filelist.append(again)
    with pytest.raises(CheckpointError, match="more than it weighs"):
        open_archive(path)
