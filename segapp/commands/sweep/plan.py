"""The runs of a sweep: configs and grid become a validated list, which is joined with the sweep's existing runs."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from segapp.commands.sweep.grid import combinations, parse_axes
from segapp.config import RunConfig, changed_keys, check_code, dump_config, find_config, load_config
from segapp.config.trackers import TRACKERS, name_trackers
from segapp.errors import ConfigError, RunBusyError, did_you_mean, storage_errors
from segapp.run.files import make_durable_directory, write_atomic
from segapp.run.folder import is_sweep
from segapp.run.sweep import SweepFolder, SweepInfo, SweepRun, find_sweep, new_info, sweep_folders
from segapp.run.words import printable

_MAX_NAME_CHARS = 80
_MAX_SHOWN = 20
_BEGUN = re.compile(r"lock|configs|sweep\.json|\.tmp-.*")
"""Names in the folder of a sweep that another command has just created."""


@dataclass(frozen=True)
class SweepPlan:
    """A sweep to run.

    Attributes:
        info: all its runs: first those that this command names, then earlier ones.
        names: the runs that this command names.
        configs: complete configs of the new runs, by name.
        is_known: the sweep already existed when it was planned.
        given: for each new run, the given config and the `KEY=VALUE` words.
    """

    folder: SweepFolder
    info: SweepInfo
    names: frozenset[str]
    configs: Mapping[str, RunConfig]
    given: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_known: bool = True

    def train_words(self, name: str) -> list[str]:
        """Return the arguments of `segapp train` for a run's config."""
        config, *words = self.given.get(name, [str(self.folder.config_of(name))])
        return ["--config", config, *words]

    def check_parts(self) -> None:
        """Check that the code in the configs of the runs may run; `plan_sweep` has checked the user's configs."""
        for name in sorted(self.names):
            check_code(self.config_of(name), self.folder.path)

    def config_of(self, name: str) -> RunConfig:
        """Return the complete config of a run."""
        return self.configs.get(name) or load_config(self.folder.config_of(name))

    @property
    def runs(self) -> list[SweepRun]:
        """The runs that this command names, in the order of its settings."""
        return [run for run in self.info.runs if run.name in self.names]

    def save(self) -> None:
        """Write the configs of the new runs, then `sweep.json`, and remove the configs of dropped runs."""
        if not self.is_known and is_sweep(self.folder.path):
            raise RunBusyError(
                f"{self.folder.path} was just created by another command: try again", path=self.folder.path
            )
        with storage_errors(self.folder.path, "free space or choose another folder"):
            for name, config in self.configs.items():
                path = self.folder.config_of(name)
                make_durable_directory(path.parent)
                write_atomic(path, dump_config(config))
            self.folder.write(self.info)
            names = {run.name for run in self.info.runs}
            for path in self.folder.config_of("any").parent.glob("*.yaml"):
                if path.stem not in names:
                    path.unlink()


@dataclass(frozen=True)
class _Candidate:
    label: str
    given: list[str]
    """The given config, and the `KEY=VALUE` words."""
    settings: dict[str, str]
    config: RunConfig


def plan_sweep(words: Sequence[str], configs: Sequence[str]) -> SweepPlan:
    """Return the plan of a `segapp sweep` command; nothing is written.

    Raises:
        ConfigError: lists every problem of every run, or says that the sweep began with another config.
    """
    name, files, axis_words = _sorted_words(words)
    files = [file for pattern in [*configs, *files] for file in _expanded(pattern)]
    axes = given = parse_axes(axis_words)
    existing = find_sweep(name) if name is not None else None
    if not files:
        if existing is None:
            if name is None:
                raise ConfigError("--config FILE is missing: name a config, or a sweep to resume")
            hint = did_you_mean(name, [sweep.path.name for sweep in sweep_folders()])
            advice = f"{hint} `segapp ls` lists them; a new one needs --config FILE".strip()
            raise ConfigError(f"{name}: no such sweep: {advice}")
        info = existing.read()
        if not axes:
            return SweepPlan(existing, info, frozenset(run.name for run in info.runs), {})
        labels = list(dict.fromkeys(run.config for run in info.runs))
        first = {label: next(run.name for run in info.runs if run.config == label) for label in labels}
        bases = {label: str(existing.config_of(run)) for label, run in first.items()}
        axes = {**info.axes, **axes}
    else:
        bases = _labelled(files)
        existing = existing if name is not None else find_sweep(_default_name(bases))
    candidates = _validated(bases, axes)
    folder = existing or SweepFolder(_new_path(name or _default_name(bases)))
    info = existing.read() if existing is not None else new_info()
    typed = [f"{key}={value}" for key, values in given.items() for value in values]
    for each in candidates:
        check_code(each.config, find_config(each.given[0]), typed, is_stored=not files)
        name_trackers(each.config.log, [key for key in TRACKERS if files or f"log.{key}" in given])
    return replace(_joined(folder, info, axes, candidates), is_known=existing is not None)


def _sorted_words(words: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Return the sweep's name, the config files and the KEY=VALUES words of a command line."""
    plain = [word for word in words if "=" not in word]
    files = [word for word in plain if word.endswith((".yaml", ".yml"))]
    names = [word for word in plain if word not in files]
    if len(names) > 1:
        raise ConfigError(f"{', '.join(names)}: only one sweep can be named; values are KEY=A,B")
    return (names[0] if names else None), files, [word for word in words if "=" in word]


def _expanded(pattern: str) -> list[str]:
    """Return the files that match a glob, in their order; a name or path is returned as it is."""
    if not glob.has_magic(pattern) or os.path.isfile(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern) or glob.glob(os.path.join("configs", pattern)))
    if not found:
        raise ConfigError(f"--config {pattern} matches no file: check the pattern")
    return found


def _labelled(files: Sequence[str]) -> dict[str, str]:
    """Return the config files by their names without folder and suffix."""
    labels = [find_config(file).stem for file in files]
    repeated = [label for label, count in Counter(labels).items() if count > 1]
    if repeated:
        raise ConfigError(f"two configs are named {repeated[0]}: rename one of them")
    return dict(zip(labels, files, strict=True))


def _default_name(bases: Mapping[str, str]) -> str:
    """Return the default name of a sweep: its config's name, or the common part of several, and `-sweep`."""
    common = "".join(chars[0] for chars in itertools.takewhile(lambda c: len(set(c)) == 1, zip(*bases, strict=False)))
    if len(bases) > 1:
        common = re.sub(r"[-_.]*(fold)?[-_.]*\d*$", "", common)
    return f"{common or 'configs'}-sweep"


def _new_path(name: str) -> Path:
    if re.fullmatch(r"[^/\\\x00-\x1f.-][^/\\\x00-\x1f]*", name) is None and os.sep not in name:
        raise ConfigError(
            f"{name!r} is not a valid name for a sweep: use letters, digits, dots and hyphens, or a folder"
        )
    path = Path(name) if os.sep in name else Path("runs") / name
    if path.exists() and (not path.is_dir() or any(not _BEGUN.fullmatch(each.name) for each in path.iterdir())):
        raise ConfigError(
            f"{path} exists and is not a sweep: choose another name, e.g. segapp sweep NAME --config FILE", path=path
        )
    return path


def _validated(bases: Mapping[str, str], axes: Mapping[str, Sequence[str]]) -> list[_Candidate]:
    """Return the runs of the grid with their configs; the ConfigError lists each problem once, for all runs."""
    found: list[_Candidate] = []
    problems: dict[str, list[str]] = {}
    for label, base in bases.items():
        for settings in combinations(axes, len(bases)):
            words = [f"{key}={text}" for key, text in settings.items()]
            try:
                found.append(_Candidate(label, [base, *words], settings, load_config(base, words)))
            except ConfigError as error:
                where = " ".join([label, *words] if len(bases) > 1 else words)
                first, *rest = str(error).splitlines()
                for line in rest or [first]:
                    problems.setdefault(line.strip(), []).append(where)
    if problems:
        raise ConfigError(_problem_text(problems, len(bases) * len(combinations(axes))))
    return found


def _problem_text(problems: Mapping[str, Sequence[str]], num_runs: int) -> str:
    lines = []
    for line, where in list(problems.items())[:_MAX_SHOWN]:
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        lines.append(f"  {line}" if len(where) == num_runs else f"  {line} (run {where[0]}{more})")
    if len(problems) > _MAX_SHOWN:
        lines.append(f"  and {len(problems) - _MAX_SHOWN} more")
    count = len({each for where in problems.values() for each in where})
    return f"{count} of the {num_runs} runs have a problem, and none was started:\n" + "\n".join(lines)


def _joined(
    folder: SweepFolder, info: SweepInfo, axes: Mapping[str, list[str]], candidates: Sequence[_Candidate]
) -> SweepPlan:
    """Return the plan of the new and the earlier runs; runs with equal settings are one run."""
    keys = list(dict.fromkeys([*info.axes, *axes]))
    earlier = {run.name: load_config(folder.config_of(run.name)) for run in info.runs}
    _check_base(info, earlier, candidates, keys)
    known: dict[str, SweepRun] = {}
    for run in info.runs:
        settings = _settings(earlier[run.name], keys)
        known[_identity(run.config, settings)] = run.model_copy(update={"settings": settings})
    wanted: dict[str, tuple[_Candidate, dict[str, Any]]] = {}
    for candidate in candidates:
        settings = _settings(candidate.config, keys)
        wanted.setdefault(_identity(candidate.label, settings), (candidate, settings))
    all_settings = [*(run.settings for run in known.values()), *(settings for _, settings in wanted.values())]
    varying = [key for key in keys if len({json.dumps(each[key]) for each in all_settings}) > 1]
    labels = {*(run.config for run in info.runs), *(candidate.label for candidate in candidates)}
    taken = {run.name for run in info.runs}
    configs: dict[str, RunConfig] = {}
    given: dict[str, Sequence[str]] = {}
    runs: list[SweepRun] = []
    for identity, (candidate, settings) in wanted.items():
        if identity in known:
            runs.append(known[identity])
            continue
        label = candidate.label if len(labels) > 1 else ""
        name = run_name(label, {key: candidate.settings.get(key, settings[key]) for key in varying}, taken)
        taken.add(name)
        runs.append(SweepRun(name=name, config=candidate.label, settings=settings))
        configs[name], given[name] = candidate.config, candidate.given
    # A run of an earlier command that never began is dropped: its values may have been a mistake.
    kept = [run for at, run in known.items() if at not in wanted and folder.folder_of(run.name).path.exists()]
    merged = {key: list(dict.fromkeys([*info.axes.get(key, []), *axes.get(key, [])])) for key in keys}
    info = info.model_copy(update={"axes": merged, "runs": [*runs, *kept]})
    return SweepPlan(folder, info, frozenset(run.name for run in runs), configs, given=given)


def _check_base(
    info: SweepInfo, earlier: Mapping[str, RunConfig], candidates: Sequence[_Candidate], keys: Sequence[str]
) -> None:
    """Check that keys outside the grid have the values that the sweep began with."""
    changed: dict[str, None] = {}
    for label in dict.fromkeys(candidate.label for candidate in candidates):
        before = next((earlier[run.name] for run in info.runs if run.config == label), None)
        if before is not None:
            now = next(each.config for each in candidates if each.label == label)
            for line in changed_keys(before, now):
                key = line.partition(":")[0]
                if not any(f"{key}.".startswith(f"{axis}.") for axis in keys):
                    changed[line] = None
    if changed:
        lines = "\n".join(f"  {line}" for line in changed)
        raise ConfigError(
            f"the config has changed since the sweep began, and its runs could not be compared:\n{lines}\n"
            "name a new sweep (segapp sweep NAME --config FILE ...), put these keys into the grid, or resume this one "
            "with the config that it began with (segapp sweep NAME)"
        )


def _settings(config: RunConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of keys in a complete config."""
    plain, found = config.model_dump(mode="json"), {}
    for key in keys:
        value: Any = plain
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found[key] = value
    return found


def _identity(label: str, settings: Mapping[str, Any]) -> str:
    return json.dumps([label, settings], sort_keys=True)


def run_name(label: str, settings: Mapping[str, Any], taken: set[str]) -> str:
    """Return a run's folder name, made from the values that vary in its sweep.

    Args:
        label: the config's name; empty if there is only one config.
        settings: the varying keys with their values, or with the texts of the values.
        taken: names in use.

    >>> run_name("", {"optim.lr": "0.001", "data.crop_px": [96, 192], "seed": 0}, set())
    'lr0.001-crop_px_96_192-seed0'
    """
    last = Counter(key.rpartition(".")[2] for key in settings)
    short = {key: key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in settings}
    words = [label] if label else []
    for key, value in settings.items():
        text = value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else json.dumps(value)
        words.append(f"{short[key]}{'_' if text[:1].isalpha() else ''}{text}")
    cleaned = [re.sub(r"[^A-Za-z0-9.+-]+", "_", word).strip("_") for word in words]
    name = "-".join(cleaned) or "run"
    if name in taken or len(name) > _MAX_NAME_CHARS or not name[0].isalnum() or name == "configs":
        digest = hashlib.sha256(_identity(label, settings).encode()).hexdigest()[:8]
        name = f"{name[:_MAX_NAME_CHARS].lstrip('.-+_') or 'run'}-{digest}"
    return printable(name)
