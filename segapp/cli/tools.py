"""Commands before a training and around it: schema, completion, plan, profile, check-part, docs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segapp.cli.options import ConfigOption, JsonFlag, Overrides, app, option
from segapp.errors import ConfigError, cannot_be_written


@app.command()
def schema(out: Annotated[Path | None, option("--out", "Write it to this file instead.")] = None) -> None:
    """Print the JSON schema of a config file, for editors."""
    import json

    from segapp.config import config_schema

    text = json.dumps(config_schema(), indent=2) + "\n"
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(cannot_be_written(out, error)) from None


@app.command()
def completion(shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print the script that completes commands, options, config keys, runs and configs in a shell."""
    from segapp.completion import completion_script

    print(completion_script(shell), end="")


@app.command()
def plan(
    overrides: Overrides = None,
    config: ConfigOption = None,
    gpus: Annotated[
        str | None, option("--gpus", "3x24220MiB, or 24GiB,24GiB,11GiB, or here (this machine's).", "LIST")
    ] = None,
    run: Annotated[str | None, option("--run", "Calibrate with the memory that this run has measured.", "RUN")] = None,
    json_out: JsonFlag = False,
) -> None:
    """Predict each GPU's peak memory for every split of the batch, without a GPU."""
    from segapp.commands.plan import print_plan

    print_plan(config, overrides or [], gpus, run, as_json=json_out)


@app.command()
def models(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="A part of a name or a glob, e.g. 'smp/Unet/*convnext*'.")
    ] = None,
    size: Annotated[str, option("--size", "Size of the images, HEIGHTxWIDTH in pixels.", "HxW")] = "512x512",
    memory: Annotated[bool, typer.Option("--memory", help="Simulate training steps: memory per image.")] = False,
    json_out: JsonFlag = False,
) -> None:
    """List the networks that a config can name: parameters, GFLOPs, stride, memory, weights in the local caches."""
    from segapp.commands.models import print_models

    print_models(pattern, size, with_memory=memory, as_json=json_out)


@app.command()
def profile(
    overrides: Overrides = None,
    config: ConfigOption = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps to time.")] = 3,
    json_out: JsonFlag = False,
) -> None:
    """Run a few real steps and show where their time and memory go."""
    from segapp.commands.profile import print_profile

    print_profile(config, overrides or [], steps, as_json=json_out)


@app.command("check-part")
def check_part(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODULE:FACTORY] [KEY=VALUE]...", help="An own part; dotted config keys."),
    ] = None,
    kind: Annotated[str | None, option("--as", "What it is.", "model|loss|data|optim|schedule|transform")] = None,
    config: ConfigOption = None,
) -> None:
    """Try own parts as a training uses them: all those of a config, or the one named. Exit code 2 if a check fails."""
    from segapp.commands.check_part import check_part as run_checks
    from segapp.commands.check_part import sorted_words
    from segapp.config import load_config, named_config
    from segapp.config.load import is_config_name

    name, overrides = sorted_words(words or [])
    is_needed = config is not None or overrides or (name is not None and is_config_name(name))
    loaded = load_config(named_config(config, words or []), overrides) if is_needed else None
    raise typer.Exit(run_checks(name, kind, loaded))


@app.command()
def docs(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="A page; by default their list.")] = None,
    search: Annotated[str | None, option("--search", "Find the pages with these words.", "WORDS")] = None,
) -> None:
    """Show the documentation: the list of pages, one page, or the pages with some words."""
    from segapp.commands.docs import show_docs

    show_docs(topic, search)
