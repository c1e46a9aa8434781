"""`segapp sweep`: train every combination of settings, each as a run of its own in runs/SWEEP/RUN.

`plan_sweep` makes the runs from the words of the command, so the same words always mean the same runs. A run that has
begun is resumed, and a run that has finished is kept.
"""

import itertools
import json
import math
import os
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from segapp.assembly.pairs import check_monitor
from segapp.commands.spawn import TrainerProcess, spawn_trainer
from segapp.config import RunConfig, changed_keys, dump_config, find_config, load_config, load_runnable
from segapp.config.load import parse_overrides
from segapp.config.trust import name_trackers
from segapp.errors import ConfigError, RunError, SegappError, some_names, storage_errors
from segapp.memory.gpus import visible_gpus
from segapp.run.files import check_tree, make_durable_directory, write_atomic
from segapp.run.folder import RunFolder, is_run, is_sweep, runs_of
from segapp.run.lock import check_locks
from segapp.run.words import aligned, first_line, printable
from segapp.scores import SCORES
from segapp.session.request import plan_request
from segapp.training.signals import EXIT_STOPPED_AND_SAVED, StopSignals
from segapp.view.runs import Ranking, differing_settings, read_settings, run_state, summarize
from segapp.waiting import lines_while

MAX_RUNS = 10_000
FOLD_KEYS = ("data.train_split", "data.val_split", "data.list_dir")
"""Keys that divide the data; configs that differ in nothing else except the name are folds."""
REPETITIONS = ("seed", "fold", *FOLD_KEYS)
"""Settings that differ between repetitions of one setting."""
_MAX_NAME_CHARS = 80
_POLL_S = 0.1
_RANGE = re.compile(r"([-+]?\d+)\.\.([-+]?\d+)")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    folder: RunFolder
    settings: dict[str, Any]
    """Value of each key of the sweep, and `config` or `fold`, the name of its config file, if there are several."""
    config: RunConfig
    words: list[str]
    """Arguments of `segapp train` for its config."""

    @property
    def state(self) -> str:
        return run_state(self.folder.path) if is_run(self.folder.path) else "waiting"

    @property
    def stored_config(self) -> Path:
        return self.folder.path.parent / "configs" / f"{self.name}.yaml"


def run_sweep(words: Sequence[str], configs: Sequence[str], jobs: int) -> int:
    """Train the runs of a sweep that have not finished, and print the mean of each setting.

    Returns:
        The exit code: 0: every run has finished; 1: some have failed; 75: runs were stopped, and the same command
        continues them.

    Raises:
        ConfigError: the runs cannot be planned, or earlier runs had another config; nothing is written then.
    """
    path, runs = plan_sweep(words, configs)
    save_sweep(path, runs)
    waiting = [run for run in runs if run.state != "finished"]
    print(f"sweep {printable(path.name)}: {len(runs)} runs, {len(waiting)} to train; folder {printable(str(path))}")
    codes = train_runs(waiting, job_environments(jobs))
    print("\n".join(setting_lines(runs)))
    if any(code not in (0, EXIT_STOPPED_AND_SAVED) for code in codes):
        return RunError.exit_code
    return 0 if all(run.state == "finished" for run in runs) else EXIT_STOPPED_AND_SAVED


def print_runs(words: Sequence[str], configs: Sequence[str], only: int | None, *, as_json: bool) -> None:
    """Print the runs of a sweep, or the folder of one of them; nothing is written.

    In JSON, `arguments` are the arguments of the `segapp` command that trains only this run, on one machine or several.
    """
    path, runs = plan_sweep(words, configs)
    if only is not None and not as_json:
        print(printable(str(_chosen(runs, only).folder.path)))
        return
    facts = [
        {
            "index": index,
            "name": run.name,
            "folder": str(run.folder.path),
            "state": run.state,
            "settings": run.settings,
            "arguments": ["train", *run.words, "--run", str(run.folder.path), "--resume", "auto"],
        }
        for index, run in enumerate(runs)
        if only in (None, index)
    ]
    if as_json:
        print(json.dumps({"name": path.name, "path": str(path), "runs": facts}, indent=2))
        return
    rows = [(str(each["index"]), str(each["folder"]), str(each["state"])) for each in facts]
    print("\n".join(aligned([("INDEX", "RUN", "STATE"), *rows])))


def train_one(words: Sequence[str], configs: Sequence[str], only: int) -> int:
    """Train a run of a sweep in this process, new or resumed, and return its exit code.

    Raises:
        ConfigError: the sweep cannot be planned, has no such run, or this process is one of several ranks.
        RunBusyError: another trainer holds the run.
    """
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ConfigError(
            "--only trains a run in one process, and this is one of several ranks: start segapp launch with the "
            "arguments that segapp sweep --dry-run --json prints for the run"
        )
    path, runs = plan_sweep(words, configs)
    run = _chosen(runs, only)
    save_sweep(path, runs)
    if run.state == "finished":
        print(f"{printable(run.name)} has finished")
        return 0
    from segapp.session.session import run_session

    config, folder = str(run.stored_config), run.folder.path
    arguments = ["train", "--plain", "--config", config, "--run", str(folder), "--resume", "auto"]
    return run_session(plan_request(config, [], folder, "auto"), arguments)


def _chosen(runs: Sequence[SweepRun], only: int) -> SweepRun:
    if not 0 <= only < len(runs):
        raise ConfigError(f"--only {only}: the sweep has the runs 0 to {len(runs) - 1}: see --dry-run")
    return runs[only]


def plan_sweep(words: Sequence[str], configs: Sequence[str]) -> tuple[Path, list[SweepRun]]:
    """Return the folder and the runs of a sweep; nothing is written.

    Args:
        words: config files, `KEY=VALUES`, and at most one name of the sweep.
        configs: further config files, or names of configs.

    Raises:
        ConfigError: lists every problem of every run.
    """
    plain = [word for word in words if "=" not in word]
    files = [word for word in plain if word.endswith((".yaml", ".yml"))]
    names = [word for word in plain if word not in files]
    if len(names) > 1:
        raise ConfigError(f"{', '.join(names)}: only one sweep can be named; values are KEY=A,B")
    files = [*configs, *files]
    if not files:
        raise ConfigError("--config FILE is missing: name a config; the same command continues a sweep")
    # The runs of a config have its name in their folders.
    bases = {find_config(file).stem: file for file in files}
    if len(bases) < len(files):
        raise ConfigError("two configs have the same name: rename one of them")
    axes = parse_axes([word for word in words if "=" in word])
    path = _folder_of(names[0] if names else _default_name(list(bases)))
    grid = [(label, settings) for label in bases for settings in combinations(axes, len(bases))]
    loaded = _loaded(bases, grid)
    common = _common_momentum(loaded)
    first = [next(config for (label, _), config in zip(grid, loaded, strict=True) if label == each) for each in bases]
    differing = {line.partition(":")[0] for config in first[1:] for line in changed_keys(first[0], config)}
    # Folds are repetitions of a setting, over which the table takes the mean; other configs are settings.
    kind = "fold" if differing <= {"name", *FOLD_KEYS} else "config"
    varying = {key for key, values in axes.items() if len(values) > 1}
    runs: dict[str, SweepRun] = {}
    for (label, settings), config in zip(grid, loaded, strict=True):
        own = {kind: label} if len(bases) > 1 else {}
        name = run_name([*own.values()], {key: value for key, value in settings.items() if key in varying}, runs)
        overrides = [f"{key}={text}" for key, text in settings.items()]
        values = dict(zip(settings, parse_overrides(overrides).values(), strict=True))
        # With auto, runs of different lengths would also differ in their momentum, which the table does not show.
        if common and config.train.bn_momentum == "auto":
            overrides, config = [*overrides, common], load_config(bases[label], [*overrides, common])
        given = ["--config", bases[label], *overrides]
        runs[name] = SweepRun(name, RunFolder(path / name), {**own, **values}, config, given)
    return path, list(runs.values())


def _common_momentum(configs: Sequence[RunConfig]) -> str | None:
    """Return the override with one `train.bn_momentum` for the runs that leave it to their length; None: no need."""
    different = {
        tuple(each.model_dump_json() for each in (config.data, config.model, config.train)): config
        for config in configs
        if config.train.bn_momentum == "auto" and config.train.batch_size
    }
    if len(different) < 2:
        return None
    from segapp.session.build import common_momentum

    return f"train.bn_momentum={json.dumps(common_momentum(list(different.values())))}"


def _default_name(labels: Sequence[str]) -> str:
    """Return the name of a config, or the common part of the names of several, and `-sweep`."""
    alike = itertools.takewhile(lambda chars: len(set(chars)) == 1, zip(*labels, strict=False))
    common = "".join(chars[0] for chars in alike)
    if len(labels) > 1:
        common = re.sub(r"[-_.]*(fold)?[-_.]*\d*$", "", common)
    return f"{common or 'configs'}-sweep"


def _folder_of(name: str) -> Path:
    path = Path(name) if os.sep in name else Path("runs") / name
    if not path.name[:1].isalnum() or printable(name) != name:
        raise ConfigError(f"{name!r} is not a valid name for a sweep: use letters, digits, dots and hyphens")
    if path.is_dir() and not is_sweep(path) and any(path.iterdir()):
        raise ConfigError(f"{path} exists and is not a sweep: choose another name, e.g. segapp sweep NAME", path=path)
    return path


def parse_axes(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key as YAML texts, in the order given.

    Raises:
        ConfigError: lists every word that is not KEY=VALUES.

    >>> parse_axes(["optim.lr=0.001,0.003", "seed=0..2"])
    {'optim.lr': ['0.001', '0.003'], 'seed': ['0', '1', '2']}
    """
    axes: dict[str, list[str]] = {}
    problems: list[SegappError] = []
    for word in words:
        key, _, text = word.partition("=")
        key = ".".join(part.strip() for part in key.split("."))  # as `parse_overrides` reads it
        try:
            if key == "name" or key in axes:
                why = "is given twice: write all of its values into one word, KEY=A,B"
                raise ConfigError(f"{key} {why if key in axes else 'is set by the sweep: leave it out'}")
            axes[key] = parse_values(text, key)
        except ConfigError as error:
            error.key, error.value = key, text
            problems.append(error)
    if problems:
        raise ConfigError.together(problems, f"{len(problems)} words of the grid cannot be used:")
    return axes


def parse_values(text: str, key: str) -> list[str]:
    """Return the values of one key as YAML texts, without repetitions.

    Commas separate values, but not within brackets, braces or quotes; `a..b` is a range of whole numbers.

    Raises:
        ConfigError: a value is missing, a bracket or quote is not closed, or a range goes down.

    >>> parse_values("[96, 192],[128, 256]", "data.crop_px")
    ['[96, 192]', '[128, 256]']
    """
    source = f"[{text}]"  # the entries of a YAML list that is written without its brackets
    try:
        node = yaml.compose(source, yaml.SafeLoader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", error)
        raise ConfigError(f"{key}={text}: not values between commas ({problem}): close brackets and quotes") from None
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise ConfigError(f"{key}={text}: a value is missing; write null for none, '' for an empty text")
    values: list[str] = []
    for entry in node.value:
        piece = source[entry.start_mark.index : entry.end_mark.index]
        if (found := _RANGE.fullmatch(piece)) is None:
            values.append(piece)
            continue
        first, last = int(found[1]), int(found[2])
        if not 0 <= last - first < MAX_RUNS:
            raise ConfigError(f"{key}={piece}: a range must go up from a to b, with at most {MAX_RUNS} values")
        values += map(str, range(first, last + 1))
    return list(dict.fromkeys(values))


def combinations(axes: Mapping[str, Sequence[str]], num_configs: int = 1) -> list[dict[str, str]]:
    """Return the combinations of the values; the last key changes fastest; ConfigError if there are too many."""
    num_runs = num_configs * math.prod(len(values) for values in axes.values())
    if num_runs > MAX_RUNS:
        raise ConfigError(f"the grid has {num_runs} runs, and at most {MAX_RUNS} are possible: name fewer values")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _loaded(bases: Mapping[str, str], grid: Sequence[tuple[str, Mapping[str, str]]]) -> list[RunConfig]:
    """Return the config of each run; the ConfigError lists each problem once, with the first run that has it."""
    found: list[RunConfig] = []
    problems: dict[str, str] = {}
    for label, settings in grid:
        words = [f"{key}={text}" for key, text in settings.items()]
        try:
            config = load_runnable(bases[label], words)
            name_trackers(config.log)
            check_monitor(config)
            found.append(config)
        except ConfigError as error:
            first, *rest = str(error).splitlines()
            for line in rest or [first]:
                shown = (word for word in words if not word.startswith(("log.", "log=")))  # may hold a password
                problems.setdefault(line.strip(), " ".join([label, *shown]))
    if problems:
        lines = "\n".join(f"  {line} (run {where})" for line, where in problems.items())
        num_bad = len(grid) - len(found)
        raise ConfigError(f"{num_bad} of the {len(grid)} runs have a problem, and none was started:\n{lines}")
    return found


def run_name(labels: Sequence[str], settings: Mapping[str, str], taken: Mapping[str, object]) -> str:
    """Return the name of a run's folder, from the name of its config if there are several, and the varying values.

    >>> run_name([], {"optim.lr": "0.001", "data.crop_px": "[96, 192]", "seed": "0"}, {})
    'lr0.001-crop_px_96_192-seed0'
    """
    count = Counter(key.rpartition(".")[2] for key in settings)
    words = list(labels)
    for key, text in settings.items():
        short = key.rpartition(".")[2]
        value = text.rstrip("/").rpartition("/")[2]
        words.append(f"{key if count[short] > 1 else short}{'_' if value[:1].isalpha() else ''}{value}")
    name = "-".join(re.sub(r"[^A-Za-z0-9.+-]+", "_", word).strip("_") for word in words) or "run"
    if name in taken or len(name) > _MAX_NAME_CHARS or not name[0].isalnum() or name == "configs":
        # Names that are cut or equal would otherwise share a folder.
        digest = sha256(json.dumps([labels, settings]).encode()).hexdigest()[:8]
        name = f"{name[:_MAX_NAME_CHARS].lstrip('.-+_') or 'run'}-{digest}"
    return name


def save_sweep(path: Path, runs: Sequence[SweepRun]) -> None:
    """Write the complete config of each run, from which it trains even if the given file changes, and `sweep.json`.

    Raises:
        ConfigError: a run has begun with another config.
    """
    for run in runs:
        if run.stored_config.is_file() and is_run(run.folder.path):
            lines = changed_keys(load_config(run.stored_config), run.config)
            if lines:
                raise ConfigError(
                    f"{run.folder.path} began with another config ({', '.join(lines)}), and the runs could not be "
                    "compared: name a new sweep, segapp sweep NAME --config FILE ..."
                )
    with storage_errors(path, "choose another folder"):
        check_locks(path)
        make_durable_directory(path)
        check_tree(path, is_writer=True, max_depth=0)
        write_atomic(path / "sweep.json", json.dumps({run.name: run.settings for run in runs}, indent=1) + "\n")
        for run in runs:
            make_durable_directory(run.stored_config.parent)
            write_atomic(run.stored_config, dump_config(run.config))


def repeated_runs(target: str) -> list[str]:
    """Return the runs of a sweep of folds or seeds, which together are one model; of anything else, the word itself.

    Raises:
        ConfigError: the runs differ in more than that, or some have not finished.
    """
    if (runs := runs_of(target)) == [target]:
        return runs
    differing = differing_settings([read_settings(RunFolder(Path(run))) for run in runs]).keys() - set(REPETITIONS)
    if differing:
        some = some_names(sorted(differing), 3)
        raise ConfigError(f"{target}: the runs of this sweep differ in {some}: name the runs to average")
    if open_runs := [Path(run).name for run in runs if run_state(Path(run)) != "finished"]:
        raise ConfigError(
            f"{target}: {some_names(open_runs, 3)} of this sweep has not finished: repeat the command of the sweep, or "
            "name the runs to average"
        )
    return runs


def job_environments(jobs: int) -> list[dict[str, str]]:
    """Return the environment variables of each of several trainings at a time: its share of GPUs, or of CPU threads.

    GPUs that the jobs cannot divide evenly stay idle; with fewer GPUs than jobs, some jobs share one.
    """
    if jobs == 1:
        return [{}]
    gpus = visible_gpus().words
    if not gpus:  # without nvidia-smi
        import torch

        count = torch.cuda.device_count()  # makes no CUDA context
        named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        gpus = named.split(",")[:count]
    share = len(gpus) // jobs
    # Without a limit, each training would use one thread per core.
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    each_job = [gpus[job * share : (job + 1) * share] or gpus[job % len(gpus) :][:1] for job in range(jobs) if gpus]
    return [
        {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ",".join(each_job[job] if gpus else [])}
        for job in range(jobs)
    ]


def train_runs(runs: Sequence[SweepRun], environments: Sequence[Mapping[str, str]]) -> list[int]:
    """Train runs in their order, one at a time for each environment; return the exit codes.

    SIGINT and SIGTERM stop the trainings with a checkpoint, and no further one begins.
    """
    waiting, free, codes = list(runs), list(environments), list[int]()
    running: list[tuple[SweepRun, Mapping[str, str], TrainerProcess]] = []
    is_told = False

    def shown() -> str:
        at = (f"{run.name} is in epoch {summarize(run.folder.path).progress}" for run, _, _ in running)
        return f"{len(codes)} of {len(runs)} runs have ended; {', '.join(at)}"

    with StopSignals() as signals, lines_while(shown):
        while running or (waiting and not signals.is_set):
            while waiting and free and not signals.is_set:
                run = waiting.pop(0)
                try:
                    running.append((run, free[0], _started(run, free[0])))
                    free.pop(0)
                except SegappError as error:
                    print(f"{run.name}: exit code {error.exit_code}: {printable(first_line(error))}", flush=True)
                    codes.append(error.exit_code)
            if signals.is_set and not is_told:
                is_told = True
                for _, _, trainer in running:
                    trainer.process.send_signal(signal.SIGINT)
            for each in list(running):
                run, environment, trainer = each
                if trainer.exit_code is not None:
                    running.remove(each)
                    free.append(environment)
                    print(f"{run.name}: ended with exit code {trainer.exit_code}", flush=True)
                    # A trainer that had not begun to train has nothing to save when it is stopped.
                    code = trainer.print_end()
                    codes.append(EXIT_STOPPED_AND_SAVED if is_told and code == 128 + signal.SIGINT else code)
            time.sleep(_POLL_S)
    return codes


def _started(run: SweepRun, environment: Mapping[str, str]) -> TrainerProcess:
    config = str(run.stored_config)
    request = plan_request(config, [], run.folder.path, "auto")
    resume = None if request.folder is None else str(run.folder.path)
    trainer = spawn_trainer(request, config=config, resume=resume, environ=environment)
    print(f"{run.name}: {'started' if resume is None else 'resumed'}", flush=True)
    return trainer


def setting_lines(runs: Sequence[SweepRun]) -> list[str]:
    """Return a table of the settings, the best first: mean ± deviation of the ranking score over seeds and folds."""
    keys = [key for key in runs[0].settings if len({json.dumps(run.settings[key]) for run in runs}) > 1]
    keys = [key for key in keys if key not in REPETITIONS]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for run in runs:
        setting = tuple(_shown(run.settings[key]) for key in keys)
        facts = summarize(run.folder.path).shown if run.state == "finished" else {"best_epoch": None}
        groups.setdefault(setting, []).extend([] if facts["best_epoch"] is None else [facts])
    ranking = Ranking(facts for group in groups.values() for facts in group)
    found = [(setting, group, [ranking.value(facts) or 0.0 for facts in group]) for setting, group in groups.items()]
    found.sort(key=lambda each: ranking.order(statistics.fmean(each[2])) if each[2] else math.inf)
    num_runs = len(runs) // len(groups)
    rows = [
        (
            *(setting or ("all runs",)),
            f"{len(group)} of {num_runs}",
            ranking.text(group[0], _mean(values)) if group else "-",
        )
        for setting, group, values in found
    ]
    title = ranking.score.title
    heading = title.upper() if ranking.score.name in SCORES else printable(title)  # the name of a class stays as it is
    lines = aligned([(*(keys or ["setting"]), "RUNS", f"BEST {heading}"), *rows])
    return [*lines, *([printable(ranking.note)] if ranking.note else [])]


def _mean(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{deviation}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
