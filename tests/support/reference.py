"""The generated pages of `segapp/docs/reference`: each is made from the code that it describes.

python -m tests.support.reference           names the pages that differ from what the code says
python -m tests.support.reference --write   writes them
"""

from __future__ import annotations

import ast
import html
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
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
from segapp.run import folder as folder_module
from segapp.run.events import types as event_types
from segapp.run.folder import RunFolder
from tests.support import ROOT, mono_font

FOLDER = ROOT / "segapp" / "docs" / "reference"
PLAN_PICTURE = ROOT / "segapp" / "docs" / "pictures" / "plan.svg"
TUI_PICTURE = ROOT / "segapp" / "docs" / "pictures" / "tui.svg"
SCREEN = ROOT / "tests" / "tui" / "snapshots" / "live-120x36.svg"
_NOTE = "<!-- generated: python -m tests.support.reference --write -->\n"


def cli_page() -> str:
    """Return the page of all commands with their arguments and options."""
    root = typer.main.get_command(app)
    parts = [
        "# Commands and options\n",
        "```sh\nsegapp --help\n```\n",
        "Every command has `--help`. With any command, `--debug` prints the traceback of an error, and `--trust-parts` "
        "runs the custom components that a config names ([own-parts](../tasks/own-parts.md#which-code-runs)).\n",
    ]
    parts += [_command(f"segapp {name}", command) for name, command in _commands(root)]
    return "\n".join(parts)


def _commands(root: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _command(name: str, command: Any) -> str:
    lines = [f"## {name}", "", " ".join((command.help or "").split()), ""]
    rows = [(f"`{_usage(each)}`", each.help or "") for each in command.params if each.name != "help"]
    if rows:
        lines += ["| argument or option | meaning |", "|---|---|"]
        lines += [f"| {_cell(usage)} | {_cell(text)} |" for usage, text in rows]
    return "\n".join(lines) + "\n"


def _usage(parameter: Any) -> str:
    metavar = parameter.metavar or (parameter.name or "").upper()
    if parameter.param_type_name == "argument":
        return metavar
    options = ", ".join(parameter.opts)
    return options if getattr(parameter, "is_flag", False) else f"{options} {metavar}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def config_page() -> str:
    """Return the page of all keys of a config."""
    return "\n".join(
        [
            "# Config reference\n",
            "```sh\nsegapp train --config demo.yaml --print-config\nsegapp schema --out segapp.schema.json\n```\n",
            "The first command prints a config with all its defaults. The second command writes the JSON schema for "
            "editors ([train](../tasks/train.md#editor-and-shell-completion)). On the command line, write a key as "
            "`KEY=VALUE` with dots: `train.batch_size=4`.\n",
            "Each entry has the allowed values, the unit, the default, the meaning, and when to change the key. A "
            "dagger (†) marks a key that you may change when you resume a run.\n",
            config_reference(),
            "",
        ]
    )


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
    """Return the page of the files of a run."""
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
            rows.append(f"| `{path}` | {_cell(ast.literal_eval(after.value))} |")
    assert rows
    return "\n".join(
        [
            "# The run folder\n",
            "A run writes all its files into `runs/NAME`, or into the folder given with `--run`. Any program may read "
            "them. Commands to the trainer are files in `commands/`. After a hang, `stacks.log` has the stacks of all "
            "processes.\n",
            "| path | content |",
            "|---|---|",
            *rows,
            "",
            "A checkpoint is one file of tensors and plain values. Without segapp, "
            '`torch.load("runs/demo/checkpoints/best.pt", weights_only=True)["model"]` is the state dict. '
            "`segapp ckpt list RUN` lists the checkpoints from which a run can resume ([train](../tasks/train.md)). "
            "`segapp status RUN` summarizes the folder.\n",
            "## Files of other users\n",
            "`RUN` itself may be a link. Everything in it must be a plain file or folder of its owner or of root: a "
            "symbolic link, a pipe, a device, or a file of another user is refused by name, and the exit code is 10. "
            "Only the content of `wandb/` is left to Weights & Biases. If you keep `tensorboard/` on another disk, "
            "move the whole run there and link the run. `events.jsonl` may have at most 4 GiB, other files that are "
            "read completely 16 MiB. `segapp ls` lists the other runs, and gives the reason next to the refused "
            "one.\n",
            "Every user who may read a run can use it in `status`, `report`, `compare`, `eval`, `predict` and "
            "`export`. Only its owner can train in it: a training takes the permission to write from everyone else, "
            "for a group too, and gives `lock` the mode 0600. To continue another user's run, train in a copy "
            "(`cp -r`). Another user sees a run whose trainer died as `lost` instead of `crashed`, because only the "
            "owner can ask for the lock.\n",
        ]
    )


def events_page() -> str:
    """Return the page of the lines of events.jsonl."""
    tree = ast.parse(Path(event_types.__file__).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    shared = [name for name in classes if name not in {model.__name__ for model in event_types.EVENT_TYPES.values()}]
    parts = [
        "# Events: the lines of events.jsonl\n",
        "`events.jsonl` has one JSON object per line. The trainer appends lines and never changes one. A resume "
        "removes the lines that its checkpoint does not contain: a program that follows the file must start again when "
        "the file becomes shorter. Readers must ignore an incomplete last line, and skip types and fields that they do "
        "not know. Numbers that are not finite are null. A thread of the trainer writes a `memory` event every 2 s and "
        "a `heartbeat` every 5 s, or every 2 s while steps have no events. Fields without *required* may be "
        "missing.\n",
        "From Python, use `segapp.run.events.EventReader`, or `on_event` ([python](../tasks/python.md)). "
        "`segapp status RUN --json` prints the state that follows from the events.\n",
        "Every line has:\n",
        _fields(classes["_Event"]),
    ]
    for kind, model in event_types.EVENT_TYPES.items():
        parts += [
            f"## {kind}\n",
            (ast.get_docstring(classes[model.__name__]) or "") + "\n",
            _fields(classes[model.__name__]),
        ]
    parts.append("## Objects within events\n")
    for name in shared:
        if not name.startswith("_"):
            parts += [f"### {name}\n", (ast.get_docstring(classes[name]) or "") + "\n", _fields(classes[name])]
    return "\n".join(parts)


def _fields(node: ast.ClassDef) -> str:
    rows = ["| field | type | meaning |", "|---|---|---|"]
    for at, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign) or ast.unparse(statement.target) in ("type", "model_config"):
            continue
        after = node.body[at + 1] if at + 1 < len(node.body) else None
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        required = "*required.* " if statement.value is None else ""
        kind = re.sub(r"Annotated\[(.+), AsNull\]", r"\1", ast.unparse(statement.annotation))
        kind = re.sub(r"Annotated\[(\w+), .*?\)\]", r"\1", kind).replace("Text", "str")
        rows.append(f"| `{ast.unparse(statement.target)}` | `{_cell(kind)}` | {required}{_cell(text)} |")
    return "\n".join(rows) + "\n"


def exit_codes_page() -> str:
    """Return the page of the exit codes."""
    rows = {0: "Done.", 75: "Stopped by a signal or a command, and saved: `--resume` continues.",
            130: "Stopped by Ctrl-C without saving.", 143: "Stopped by SIGTERM without saving."}  # fmt: skip
    for kind in _error_classes():
        rows.setdefault(kind.exit_code, (kind.__doc__ or "").splitlines()[0])
    rows[1] = "The run failed, and no other code says why. The commands below use it for other failures."
    rows[2] = "A config, an option, a command or a name that cannot be used."
    topics = {kind.exit_code: kind.topic for kind in _error_classes() if kind.topic}
    lines = [f"| {code} | {text} | {_link(topics.get(code))} |" for code, text in sorted(rows.items())]
    return "\n".join(
        [
            "# Exit codes\n",
            "Every command ends with one of these codes. An error is printed to stderr as one line that begins with "
            "`error:` and names the problem, the value, and the fix. `--debug` adds the traceback. If a page says "
            'more, the last line names it. With `--json`, stdout has the same for programs: `{"error": {...}}` with '
            "`type`, `message`, `exit_code`, `topic`, and, if they are known, `key`, `path`, `value` and `problems`.\n",
            "| code | meaning | page |",
            "|---|---|---|",
            *lines,
            "\n## By command\n",
            "These commands also use a code for a result. All others end with 0 or with the code of their error.\n",
            "| command | exit codes |",
            "|---|---|",
            *(f"| `{name}` | {_cell(text)} |" for name, text in stated_exit_codes().items()),
            "",
        ]
    )


def stated_exit_codes() -> dict[str, str]:
    """Return the sentences on exit codes in the help of each command that has some."""
    found = {}
    for name, command in _commands(typer.main.get_command(app)):
        sentences = re.split(r"(?<=[.])\s+(?=[A-Z-])", " ".join((command.help or "").split()))
        if stated := [each for each in sentences if re.search(r"exit code|exits with", each)]:
            found[name] = " ".join(stated)
    return found


def _error_classes() -> list[type[errors.SegappError]]:
    def below(kind: type[errors.SegappError]) -> Iterator[type[errors.SegappError]]:
        yield kind
        for each in kind.__subclasses__():
            yield from below(each)

    return [kind for kind in below(errors.SegappError) if kind.__module__ == errors.__name__]


def _link(topic: str | None) -> str:
    return f"[{topic}](../troubleshooting/{topic}.md)" if topic else ""


ENVIRONMENT = {
    "SEGAPP_FAILPOINTS": "For tests: faults to inject at named places (`segapp/failpoints.py`).",
    "SEGAPP_FAILPOINT_MARKS": "For tests: a folder; each armed fault writes a line whenever it acts.",
    "SEGAPP_TRUST_PARTS": "`1`: run the custom components that a config names, as with `--trust-parts`. segapp passes "
    "the components that it has accepted to its own processes here.",
    "SEGAPP_PEER_TIMEOUT_S": "Seconds without a sign of life after which another machine counts as lost, and "
    "the ranks of this one end with 8; the same on all machines. Default: 30; 0: never. `segapp launch` waits as long "
    "for a rendezvous that does not answer.",
    "SEGAPP_LAUNCH_SECRET": "The secret that the machines of `segapp launch` share, at least 16 characters. Default: a "
    "file next to the run folder.",
    "XDG_CACHE_HOME": "Decoded images and class weights are cached in `$XDG_CACHE_HOME/segapp`. Default: `~/.cache`.",
    "XDG_STATE_HOME": "Trusted custom components, named trackers and seen alerts are noted in "
    "`$XDG_STATE_HOME/segapp`. Default: `~/.local/state`.",
    "LC_ALL": "If it, LC_CTYPE or LANG names a locale without UTF-8, the TUI draws in ASCII (`--no-ascii`).",
    "LC_CTYPE": "See LC_ALL.",
    "NO_COLOR": "Set to any value: the TUI uses only the colors of the terminal.",
    "TERM": "`dumb` or empty: no TUI; `train` prints lines.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that segapp may use; numbers in `parallel.devices` count within it.",
    "CUDA_DEVICE_ORDER": "`PCI_BUS_ID`: CUDA counts GPUs as nvidia-smi does. Default: the fastest GPU may be first.",
    "NVIDIA_VISIBLE_DEVICES": "The GPUs of a container; `doctor` reports it if there are none.",
    "CC": "C compiler for Triton; `doctor` reports it.",
    "RANK": "With `WORLD_SIZE`: set by torchrun; `train` is then one rank and shows no TUI.",
    "WORLD_SIZE": "Set by torchrun: the number of ranks.",
    "LOCAL_RANK": "Set by torchrun: the rank within its machine, which selects the GPU.",
    "LOCAL_WORLD_SIZE": "Set by torchrun: the ranks of a machine, which share its processors for `data.workers: auto`; "
    "more ranks than GPUs exchange through gloo.",
    "MASTER_ADDR": "Set by torchrun: the machine of rank 0.",
    "MASTER_PORT": "Set by torchrun: its port.",
    "SLURM_STEP_ID": "Set by srun: the number of the step; `train` takes its rank from srun's variables unless "
    "`RANK` is set.",
    "SLURM_PROCID": "Set by srun: the rank.",
    "SLURM_STEP_NUM_TASKS": "Set by srun: the number of ranks.",
    "SLURM_NTASKS": "Set by SLURM: the number of ranks, if `SLURM_STEP_NUM_TASKS` is not set.",
    "SLURM_LOCALID": "Set by srun: the rank within its machine.",
    "SLURM_STEP_TASKS_PER_NODE": "Set by srun: the ranks of each machine.",
    "SLURM_STEP_NODELIST": "Set by srun: the machines; rank 0 is on the first, unless `MASTER_ADDR` is set.",
    "SLURM_JOB_NODELIST": "Set by SLURM: the machines of the job, if the machines of the step are not known.",
    "SLURM_JOB_ID": "Set by SLURM: the port of rank 0 follows from it, unless `MASTER_PORT` is set.",
    "SLURM_RESTART_COUNT": "Set by SLURM: above 0, `train` waits for the process that still holds the run.",
    "TORCHELASTIC_RESTART_COUNT": "Set by torchrun: the round of the job; above 0 as `SLURM_RESTART_COUNT`.",
    "TORCHELASTIC_MAX_RESTARTS": "Set by torchrun: if it is above 0, a stopped rank ends with 0 instead of 75, which "
    "torchrun would take for a failure and start again.",
    "TORCHELASTIC_RUN_ID": "Set by torchrun: the job; `train` waits for a holder of the run that is of the same one.",
    "OMPI_COMM_WORLD_SIZE": "Set by Open MPI: the number of tasks; `train` refuses several, unless `RANK` is set.",
    "PMI_SIZE": "Set by MPICH and Intel MPI: the number of tasks, as with Open MPI.",
    "OMP_NUM_THREADS": "CPU threads of each rank; `train` divides the processors among the ranks unless it is set.",
    "GLOO_SOCKET_IFNAME": "Network interface of gloo on several machines; ranks of one machine use `lo`.",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "`train` takes 1 in ddp unless it is set: SyncBatchNorm has its own NCCL group.",
    "NCCL_SOCKET_IFNAME": "Network interface of NCCL on several machines; ranks of one machine use `lo`.",
    "PYTORCH_CUDA_ALLOC_CONF": "Options of torch's CUDA allocator; if set, segapp adds no expandable segments.",
    "PYTORCH_ALLOC_CONF": "The newer name of `PYTORCH_CUDA_ALLOC_CONF`.",
    "CUBLAS_WORKSPACE_CONFIG": "Set to `:4096:8` by `train.deterministic`, unless it is set.",
    "WANDB_MODE": "`offline`: `log.wandb` writes to this machine only (read by wandb).",
    "WANDB_PROJECT": "Names the project of `log.wandb` for a resume.",
    "WANDB_BASE_URL": "The server of W&B (read by wandb); needed if `wandb/settings` in the current folder names one.",
    "WANDB_ERROR_REPORTING": "Set to `false` unless it is set: wandb sends no tracebacks to its makers.",
    "MLFLOW_TRACKING_URI": "Names the address of `log.mlflow` for a resume; the same address with a password is used.",
    "MLFLOW_DISABLE_TELEMETRY": "Set to `true` unless it is set: MLflow sends no statistics to its makers.",
}  # fmt: skip
"""Each variable that the program or a library that it configures reads, and its effect."""

INTERNAL = {
    "SEGAPP_TRACKERS": "set for children: the trackers that the user has named",
    "SEGAPP_PARENT_PID": "set for ranks by their parent",
    "SEGAPP_RANK_DEVICES": "set for ranks by their parent",
    "SEGAPP_RANK_STORE": "set for ranks by their parent",
    "NCCL_RAS_ENABLE": "set for ranks by their parent",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "set for torch's agent",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "set for torch's agent",
    "TORCH_CPP_LOG_LEVEL": "set if the user has not, for torch",
    "NO_ALBUMENTATIONS_UPDATE": "set, never read",
    "PYTHONUNBUFFERED": "set for child processes",
    "PYTHONWARNINGS": "set for child processes",
}
"""Variables in the code that are not for users, and why."""


def environment_page() -> str:
    """Return the page of the environment variables."""
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in ENVIRONMENT.items()]
    return "\n".join(
        [
            "# Environment variables\n",
            "You do not have to set any of them. segapp, or a library that it configures, reads:\n",
            "| variable | effect |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def variables_in_code() -> set[str]:
    """Return the environment variables named in modules that use the environment: constants like `A_B`, known ones."""
    found: set[str] = set()
    for path in (ROOT / "segapp").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "environ" in text or "SpawnOptions" in text else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_known = node.value in ENVIRONMENT or node.value in INTERNAL
                if is_known or re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", node.value):
                    found.add(node.value)
            elif isinstance(node, ast.keyword) and node.arg in INTERNAL:
                found.add(node.arg)
    return found


PAGES: dict[str, Callable[[], str]] = {
    "cli": cli_page,
    "config": config_page,
    "run-folder": run_folder_page,
    "events": events_page,
    "exit-codes": exit_codes_page,
    "environment": environment_page,
}


_PLAN_STYLE = """
text { font: 13px "segapp mono", monospace; fill: #1f2328; white-space: pre } rect { fill: #f6f8fa; stroke: #d1d9e0 }
.strong { font-weight: bold } .good { fill: #1a7f37; font-weight: bold } .bad { fill: #c2272d } .quiet { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } rect { fill: #161b22; stroke: #3d444d }
  .good { fill: #4cc365 } .bad { fill: #ff8a80 } .quiet { fill: #9198a1 }
}"""
_PLAN_CHARS, _LINE_PX, _CHAR_PX, _EDGE_PX = 100, 18, 7.83, 16
"""Columns of the terminal in the picture, and sizes: a character of DejaVu Sans Mono is 0.602 times as wide as high."""


def plan_picture() -> str:
    """Return the table of plan on the page `plan`, and the lines below it, as an SVG for a light and a dark theme."""
    command, _, output = (ROOT / "segapp/docs/tasks/plan.md").read_text().partition("```sh\n")[2].partition("```text\n")
    lines = [("$ " + command.partition("\n")[0], "strong"), ("", "")]
    for line in output.partition("\n\n...")[0].splitlines():
        is_bad, is_best = "won't fit" in line, line.endswith("<- best")
        kind = "good" if is_best else "bad" if is_bad else "strong" if line.startswith("gpu0_bsz") else ""
        lines += [(part, kind) for part in textwrap.wrap(line, _PLAN_CHARS, drop_whitespace=False) or [""]]
    width, height = round(_PLAN_CHARS * _CHAR_PX) + 2 * _EDGE_PX, len(lines) * _LINE_PX + 2 * _EDGE_PX
    texts = [
        f'<text x="{_EDGE_PX}" y="{_EDGE_PX + 13 + i * _LINE_PX}" class="{kind}">{html.escape(text.rstrip())}</text>'
        for i, (text, kind) in enumerate(lines)
        if text
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" xml:space="preserve">',
            f"<style>{mono_font.style()}{_PLAN_STYLE}</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *texts,
            "</svg>\n",
        ]
    )


def tui_picture() -> str:
    """Return the stored screen of a live run with simulated GPUs, which the tests of the TUI compare."""
    svg = re.sub(r"\s*@font-face \{.*?\}", "", SCREEN.read_text(encoding="utf-8"), flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;]*;", f'font-family: "{mono_font.FAMILY}", monospace;', svg)
    return svg.replace("<style>", f"<style>\n{mono_font.style()}", 1)


PICTURES: dict[Path, Callable[[], str]] = {PLAN_PICTURE: plan_picture, TUI_PICTURE: tui_picture}


def files() -> dict[Path, str]:
    """Return each generated file with its content."""
    pages = {FOLDER / f"{topic}.md": _NOTE + make().rstrip("\n") + "\n" for topic, make in PAGES.items()}
    return {**pages, **{path: make() for path, make in PICTURES.items()}}


def differing() -> list[str]:
    """Return the generated files that are not what the code says."""
    return [
        str(path.relative_to(ROOT))
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main() -> None:
    """Name the files that differ, or write them."""
    for name in differing():
        print(name)
        if "--write" in sys.argv[1:]:
            (ROOT / name).write_text(files()[ROOT / name], encoding="utf-8")


if __name__ == "__main__":
    main()
