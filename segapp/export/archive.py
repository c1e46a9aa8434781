"""Reading a pt2 file so that nothing in it is run: checked, stripped and packed anew before torch sees it.

`torch.export.load` trusts its file: it unpickles tensors marked so, falls back to a full unpickling of sample inputs,
evaluates sizes as Python (sympy), looks operators up by any dotted name, and pastes names into generated code. So a
file is taken apart here first. What `segapp export` writes needs little of it: raw tensors, operators of ATen, names,
and sizes as sums and products. Nothing else is let through; pickles, guards and source positions are left out.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from segapp.datasets.files import shown
from segapp.errors import CheckpointError

INFO_FILE = "segapp.json"
"""Name of the metadata inside a pt2 file."""

_MAX_JSON_BYTES = 256 * 2**20
_MAX_EXPRESSION = 20_000
_MAX_EXPONENT = 8

_RAW = re.compile(r"data/(weights/weight|constants/tensor)_\d+")
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_MODEL, _SAMPLES, _INFO = "models/model.json", "data/sample_inputs/model.pt", f"extra/{INFO_FILE}"
_MARKS = ("archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id", "version")

_NAME = re.compile(r"[\w.+\-]*", re.ASCII)
_WORDS = re.compile(r"[\w.,+\-> ]*", re.ASCII)  # a padding mode, an equation of einsum; quoted where it is used
_SYMBOL = re.compile(r"[a-z]+\d+")
_TARGET = re.compile(r"torch\.ops\.(aten|prims|torchvision)\.\w+\.\w+|math\.\w+|torch\.sym_\w+|_operator\.(\w+)")
_OPERATORS = {
    "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "invert", "le", "lshift", "lt", "mod", "mul", "ne",
    "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "xor",
}  # fmt: skip
FILE_OPERATORS = frozenset({"from_file", "save", "load"})
"""Operators of ATen that take the name of a file."""

_FUNCTIONS = {
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Mod", "Max", "Min", "And", "Or", "Not", "Eq", "Ne",
    "Lt", "Le", "Gt", "Ge", "Equality", "Unequality", "LessThan", "StrictLessThan", "GreaterThan", "StrictGreaterThan",
    "Abs", "floor", "ceiling", "FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt",
    "FloorToInt", "CeilDiv", "LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "ToFloat",
    "TruncToInt", "TruncToFloat", "RoundToInt", "RoundDecimal", "Identity",
}  # fmt: skip
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift"})
_CONSTANTS = frozenset({"true", "false", "True", "False", "oo", "int_oo"})
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_TREES = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict"})


class _RefusedError(Exception):
    """Something that no file of segapp holds."""


def open_archive(path: Path) -> tuple[io.BytesIO, dict[str, Any]]:
    """A pt2 file as `torch.export.load` may have it, and the metadata of segapp in it.

    Args:
        path: the file.

    Raises:
        CheckpointError: it cannot be read, is damaged, or holds what `segapp export` does not write.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _repacked(archive, path.stat().st_size)
    except _RefusedError as error:
        raise CheckpointError(
            f"{shown(path)} is refused, it could run code ({error}): use a file that segapp export wrote"
        ) from None
    except Exception as error:  # damage shows as any of a dozen exception types
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(
            f"{shown(path)} cannot be read ({reason}): the file is damaged or not an exported network; write it again"
        ) from None


def _repacked(archive: zipfile.ZipFile, size_bytes: int) -> tuple[io.BytesIO, dict[str, Any]]:
    files: dict[str, zipfile.ZipInfo] = {}
    room = size_bytes
    for info in archive.infolist():
        name = info.filename.partition("/")[2]
        room -= info.file_size
        if room < 0:
            raise _RefusedError("it unpacks to more than it weighs")
        if info.compress_type != zipfile.ZIP_STORED or name in files:
            raise _RefusedError(f"{name[:80]!r} is compressed, or there twice")
        files[name] = info
    if _MODEL not in files:
        raise ValueError("no network in it")
    for name in files:
        if not (_RAW.fullmatch(name) or name in (*_CONFIGS, *_MARKS, _MODEL, _SAMPLES, _INFO)):
            raise _RefusedError(f"a file {name[:80]!r}")
    packed = io.BytesIO()
    properties: dict[str, Any] = {}
    with zipfile.ZipFile(packed, "w") as target:
        for name, info in files.items():
            if name == _INFO:
                properties = _json(archive, info)
                continue
            if name == _MODEL:
                data = json.dumps(_model(_json(archive, info))).encode()
            elif name in _CONFIGS:
                data = json.dumps(_payloads(_json(archive, info))).encode()
            elif name == _SAMPLES:
                data = b""  # a pickle; nobody needs the picture that was traced with
            else:
                data = archive.read(info)
            target.writestr(f"archive/{name}", data)
    packed.seek(0)
    return packed, properties


def _json(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    if info.file_size > _MAX_JSON_BYTES:
        raise _RefusedError(f"{info.filename[:80]!r} of {info.file_size} bytes")
    return json.loads(archive.read(info))


def _payloads(config: Any) -> Any:
    """The list of tensors: raw ones only."""
    for name, entry in config["config"].items():
        if entry["use_pickle"] is not False or not re.fullmatch(r"(weight|tensor)_\d+", entry["path_name"]):
            raise _RefusedError(f"the tensor {name[:80]!r} is a pickle")
    return _cleaned(config)


def _model(model: Any) -> Any:
    """The program without what is not needed to run it, and checked."""
    model["guards_code"] = []
    graph_module = model["graph_module"]
    graph_module["module_call_graph"] = graph_module["module_call_graph"][:1]  # the program itself
    return _cleaned(model)


def _check_spec(text: str) -> None:
    """How arguments and results are nested: in tuples, lists and dicts alone."""
    _check_tree(json.loads(text)[1])


def _check_tree(tree: Any) -> None:
    if tree["type"] not in _TREES or tree["context"] not in (None, "null", "[]"):
        raise _RefusedError(f"a value of type {str(tree['type'])[:80]!r}")
    for child in tree["children_spec"]:
        _check_tree(child)


def _cleaned(value: Any, key: str = "") -> Any:
    """A part of the program with every text in it checked."""
    if isinstance(value, dict):
        for name in value:
            _check(_NAME.fullmatch(name), "a name", name)
        return {name: {} if name == "metadata" else _cleaned(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_cleaned(part, key) for part in value]
    if isinstance(value, str):
        _CHECKS.get(key, _check_name)(value)
    return value


def _check(holds: object, what: str, text: str) -> None:
    if not holds:
        raise _RefusedError(f"{what} {text[:80]!r}")


def _check_name(text: str) -> None:
    _check(_NAME.fullmatch(text), "a name", text)


def _check_target(text: str) -> None:
    match = _TARGET.fullmatch(text)
    is_known = match is not None and (match[2] is None or match[2] in _OPERATORS)
    _check(is_known and text.split(".")[-2] not in FILE_OPERATORS, "an operator", text)


def _check_expression(text: str) -> None:
    """A size as torch writes it: `Add(Symbol('s3', integer=True), Integer(1))`, or `s3 + 1`."""
    try:
        tree = ast.parse(text[: _MAX_EXPRESSION + 1], mode="eval").body
    except (SyntaxError, MemoryError):
        tree = ast.expr()
    _check(len(text) <= _MAX_EXPRESSION and _is_size(tree), "an expression", text)


def _is_size(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
            return False
        if node.func.id in _POWERS and not (len(node.args) == 2 and _is_small(node.args[1])):
            return False
        keywords = [each.arg is not None and isinstance(each.value, ast.Constant) for each in node.keywords]
        return all(keywords) and all(map(_is_size, (*node.args, *(each.value for each in node.keywords))))
    if isinstance(node, ast.BinOp):
        is_bounded = not isinstance(node.op, ast.Pow) or _is_small(node.right)
        return isinstance(node.op, _ARITHMETIC) and is_bounded and _is_size(node.left) and _is_size(node.right)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, (ast.USub, ast.Not)) and _is_size(node.operand)
    if isinstance(node, ast.Compare):
        return all(map(_is_size, (node.left, *node.comparators)))
    if isinstance(node, ast.Constant):
        value = node.value
        is_number = isinstance(value, (bool, int, float)) and abs(value) < 2**63
        return is_number or (isinstance(value, str) and _SYMBOL.fullmatch(value) is not None)
    return isinstance(node, ast.Name) and (node.id in _CONSTANTS or _SYMBOL.fullmatch(node.id) is not None)


def _is_small(node: ast.expr) -> bool:
    """Whether an exponent is a small number: a tower of them would never end."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Integer", "Float"):
        return len(node.args) == 1 and _is_small(node.args[0])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_small(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and node.value <= _MAX_EXPONENT


_CHECKS: dict[str, Callable[[str], None]] = {
    "target": _check_target,
    "expr_str": _check_expression,
    "in_spec": _check_spec,
    "out_spec": _check_spec,
    "as_string": lambda text: _check(_WORDS.fullmatch(text), "a text", text),
    "as_strings": lambda text: _check(_WORDS.fullmatch(text), "a text", text),
}
