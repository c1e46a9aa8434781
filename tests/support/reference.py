"""The generated parts of the pages: each is made from the code that it describes, and is between two comments.

python -m tests.support.reference           names the pages that differ from what the code says
python -m tests.support.reference --write   writes them
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from segapp import errors
from segapp.cli import app
from segapp.config.options import BUILT_INS
from segapp.config.sections import LossTerm, ParamGroupConfig, RunConfig
from segapp.config.values import section_of
from segapp.custom.names import COMPONENT_PATTERN
from segapp.docs.pages import FOLDER, find_page
from segapp.run import folder as folder_module
from segapp.run.events import types as event_types
from segapp.run.folder import RunFolder
from segapp.scores import CLASS_SCORE_PATTERN, CLASS_SCORES
from tests.support import ROOT
from tests.support.pictures import PICTURES

_PART = re.compile(r"(<!-- generated ([a-z-]+): [^>]+ -->\n).*?(?=<!-- end of generated -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a cell becomes one line."""
    lines = [" | ".join(head), *(" | ".join(map(_cell, row)) for row in rows)]
    return f"| {lines[0]} |\n|{'---|' * len(head)}\n" + "".join(f"| {line} |\n" for line in lines[1:])


def cli_page() -> str:
    """Return all commands with their arguments and options."""
    return "\n".join(_command(f"segapp {name}", command) for name, command in _commands(typer.main.get_command(app)))


def _commands(root: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _command(name: str, command: Any) -> str:
    rows = [(f"`{_usage(each)}`", each.help or "") for each in command.params if each.name != "help"]
    text = f"## {name}\n\n{_cell(command.help or '')}\n"
    return f"{text}\n{table(('argument or option', 'meaning'), rows)}" if rows else text


def _usage(parameter: Any) -> str:
    metavar = parameter.metavar or (parameter.name or "").upper()
    if parameter.param_type_name == "argument":
        return metavar
    options = ", ".join(parameter.opts)
    return options if getattr(parameter, "is_flag", False) else f"{options} {metavar}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def config_reference() -> str:
    """Return every key with its allowed values, unit, default, meaning and when to change it, a heading per section."""
    parts = [_config_keys("", RunConfig), *_sections("", RunConfig)]
    for section, table in BUILT_INS.items():
        for name, built_in in table.items():
            if built_in.options.model_fields:
                parts += [f"## {section}.options of {name}", _config_keys(f"{section}.options.", built_in.options)]
    return "\n\n".join(parts)


ENTRIES = {
    "loss": (
        f"## loss.plus\n\nEach entry of `loss.plus` has the keys of `loss` down to `{list(LossTerm.model_fields)[-1]}`."
    ),
    "optim": "## optim.groups",
}
"""Section -> what follows it about the entries of its list."""


def _sections(prefix: str, model: type[BaseModel], *, may_change: bool = False) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = section_of(model, name)
        if section is None:
            continue
        is_changeable = may_change or _may_change(field)
        text = " ".join((section.__doc__ or "").split()).partition(":` ")[2]
        yield f"## {prefix}{name}\n\n{text[0].upper()}{text[1:]}"
        yield _config_keys(f"{prefix}{name}.", section, may_change=is_changeable)
        yield from _sections(f"{prefix}{name}.", section, may_change=is_changeable)
        if not prefix and name in ENTRIES:
            yield ENTRIES[name]
        if not prefix and name == "optim":
            yield _config_keys("", ParamGroupConfig)


def _may_change(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and "may_change_on_resume" in field.json_schema_extra


def _config_keys(prefix: str, model: type[BaseModel], *, may_change: bool = False) -> str:
    """Return a list with an entry per key of a section; sections within it have a heading of their own."""
    schema, entries = model.model_json_schema(), []
    for name, field in model.model_fields.items():
        if section_of(model, name) is not None and field.default is not None:
            continue
        default = "required" if field.is_required() else f"default `{_shown(field.default)}`"
        values = values_of(schema["properties"][name], schema.get("$defs", {}))
        unit = unit_of(f"{prefix}{name}")
        facts = "; ".join(filter(None, (values, unit, default)))
        meaning, change, when = " ".join((field.description or "").split()).partition(" Change it ")
        mark = "†" if may_change or _may_change(field) else ""
        entries.append(f"- `{prefix}{name}`{mark} ({facts}): {meaning}" + (f" **Change it** {when}" if change else ""))
    return "\n".join(entries)


def values_of(node: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return the values that a JSON schema accepts, in words: "integer ≥ 1 or `null`"."""
    if "$ref" in node:
        return values_of(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(values_of(each, definitions) for each in node["anyOf"]))
    if words := node.get("enum", [node["const"]] if "const" in node else []):
        return ", ".join(f"`{word}`" for word in words)
    kind = node.get("type", "")
    if kind == "array":
        if "prefixItems" in node:
            items = [values_of(each, definitions) for each in node["prefixItems"]]
            return f"{len(items)} × {items[0]}" if len(set(items)) == 1 else f"[{', '.join(items)}]"
        return f"list of {_in_brackets(values_of(node['items'], definitions))}"
    if kind == "object":
        inner = node.get("additionalProperties")
        is_plain = "properties" in node or not isinstance(inner, dict)
        return "mapping" if is_plain else f"mapping to {_in_brackets(values_of(inner, definitions))}"
    if kind == "string":
        if node.get("pattern") == CLASS_SCORE_PATTERN:
            return " or ".join(f"`{kind}:CLASS`" for kind in CLASS_SCORES)
        return "custom component" if node.get("pattern") == COMPONENT_PATTERN else "text"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[key]}" for key, sign in signs.items() if key in node]
    if "minimum" in node and "maximum" in node:
        bounds = [f"from {node['minimum']} to {node['maximum']}"]
    return {"null": "`null`", "boolean": "`true`, `false`"}.get(kind, " ".join([kind, " and ".join(bounds)]).strip())


def _in_brackets(text: str) -> str:
    return f"({text})" if " or " in text else text


UNITS = {
    "batch_size": "images", "gpu0_bsz": "images", "shares": "images",
    "accumulate": "micro-batches", "workers": "processes", "early_stop": "evaluations",
    "patience": "evaluations", "keep": "files", "min_kept": "pixels", "critic_width": "channels",
}  # fmt: skip
"""Last word of a key -> unit of its numbers, if the word does not end with one."""
UNITS_BY_ENDING = {"px": "pixels", "s": "seconds", "mib": "MiB", "epochs": "epochs", "steps": "steps",
                   "minutes": "minutes"}  # fmt: skip


def unit_of(key: str) -> str:
    """Return the unit of the numbers of a key; "" for words, factors, shares and probabilities."""
    name = key.rpartition(".")[2]
    return UNITS.get(name) or UNITS_BY_ENDING.get(name.rpartition("_")[2], "")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1 else f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def run_folder_page() -> str:
    """Return the files of a run: the attributes of `RunFolder` with the sentences below them."""
    tree = ast.parse(Path(folder_module.__file__).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    (init,) = (each for each in classes["RunFolder"].body if getattr(each, "name", "") == "__init__")
    assert isinstance(init, ast.FunctionDef)
    folder, rows = RunFolder("RUN"), []
    for statement, after in itertools.pairwise(init.body):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        value = getattr(folder, target.attr) if isinstance(target, ast.Attribute) else None
        if isinstance(value, Path) and value.parts[:1] == ("RUN",) and len(value.parts) > 1:
            is_folder = "." not in value.name and value != folder.lock
            path = "/".join(value.parts[1:]) + ("/" if is_folder else "")
            assert isinstance(after, ast.Expr), f"{path} has no sentence"
            rows.append((f"`{path}`", ast.literal_eval(after.value)))
    return table(("path", "content"), rows)


def events_page() -> str:
    """Return the lines of events.jsonl, and the objects in them."""
    tree = ast.parse(Path(event_types.__file__).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    events = {model.__name__: kind for kind, model in event_types.EVENT_TYPES.items()}

    def part(title: str, name: str) -> str:
        return f"{title}\n\n{ast.get_docstring(classes[name]) or ''}\n\n{_fields(classes[name])}"

    shared = [name for name in classes if name not in events and not name.startswith("_")]
    parts = [_fields(classes["_Event"]), *(part(f"## {kind}", name) for name, kind in events.items())]
    return "\n".join([*parts, "## Objects within events\n", *(part(f"### {name}", name) for name in shared)])


def _fields(node: ast.ClassDef) -> str:
    rows = []
    for statement, after in itertools.zip_longest(node.body, node.body[1:]):
        if not isinstance(statement, ast.AnnAssign) or ast.unparse(statement.target) in ("type", "model_config"):
            continue
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = ("" if statement.value is not None else "*required.* ") + (str(after.value.value) if is_text else "")
        kind = re.sub(r"Annotated\[(.+), AsNull\]", r"\1", ast.unparse(statement.annotation))
        kind = re.sub(r"Annotated\[(\w+), .*?\)\]", r"\1", kind).replace("Text", "str").replace("Message", "str")
        rows.append((f"`{ast.unparse(statement.target)}`", f"`{kind}`", text))
    return table(("field", "type", "meaning"), rows)


def _link(topic: str) -> str:
    """Return the link of a page of the reference to a topic, or to a section of one."""
    page, anchor = find_page(topic)
    return f"[{topic}](../{page.path.relative_to(FOLDER)}{'#' * bool(anchor)}{anchor})"


def exit_codes_page() -> str:
    """Return the exit codes with their meanings and pages."""
    rows = {0: "Done.", 75: "Stopped by a signal or a command, and saved: `--resume` continues.",
            130: "Stopped by Ctrl-C without saving.", 143: "Stopped by SIGTERM without saving."}  # fmt: skip
    for kind in _error_classes(errors.SegappError):
        rows.setdefault(kind.exit_code, (kind.__doc__ or "").splitlines()[0])
    rows[1] = "The run failed, and no other code says why. The commands below use it for other failures."
    rows[2] = "A config, an option, a command or a name that cannot be used."
    topics = {kind.exit_code: kind.topic for kind in _error_classes(errors.SegappError) if kind.topic}
    links = {code: _link(topic) for code, topic in topics.items()}
    return table(("code", "meaning", "page"), [(str(code), rows[code], links.get(code, "")) for code in sorted(rows)])


def stated_exit_codes() -> dict[str, str]:
    """Return the sentences on exit codes in the help of each command that has some."""
    found = {}
    for name, command in _commands(typer.main.get_command(app)):
        sentences = re.split(r"(?<=[.])\s+(?=[A-Z-])", " ".join((command.help or "").split()))
        if stated := [each for each in sentences if re.search(r"exit code|exits with", each)]:
            found[name] = " ".join(stated)
    return found


def _error_classes(kind: type[errors.SegappError]) -> Iterator[type[errors.SegappError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _error_classes(each)


PARTS: dict[str, Callable[[], str]] = {
    "commands": cli_page,
    "keys": lambda: config_reference() + "\n",
    "files": run_folder_page,
    "events": events_page,
    "codes": exit_codes_page,
    "command-codes": lambda: table(
        ("command", "exit codes"), [(f"`{name}`", text) for name, text in stated_exit_codes().items()]
    ),
}
"""Name of a generated part -> its text. Pages of any name may have it."""


def files() -> dict[Path, str]:
    """Return each page with its generated parts as the code says, and each picture that is made."""
    pages = {path: path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.md")}
    made = {path: _PART.sub(lambda part: part[1] + PARTS[part[2]](), text) for path, text in pages.items()}
    return {**made, **{path: make() for path, make in PICTURES.items()}}


def differing() -> dict[Path, str]:
    """Return the files that are not what the code says, with what they should be."""
    return {path: text for path, text in files().items() if not path.exists() or path.read_text() != text}


def main() -> None:
    """Name the files that differ, or write them."""
    for path, text in differing().items():
        print(path.relative_to(ROOT))
        if "--write" in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
