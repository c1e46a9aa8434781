"""Commands about the data and this machine: check, doctor, init."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from segapp.cli import init_options
from segapp.cli.options import ConfigOption, JsonFlag, Overrides, app, option


@app.command()
def check(
    overrides: Overrides = None,
    config: ConfigOption = None,
    json_out: JsonFlag = False,
    html_file: Annotated[Path | None, option("--html", "Write a page with pictures of what was found.")] = None,
    sums_file: Annotated[Path | None, option("--sums", "Compare every file with this list of sha256 sums.")] = None,
    new_sums_file: Annotated[Path | None, option("--write-sums", "Write that list, as sha256sum does.")] = None,
) -> None:
    """Examine the data: every file, every id, duplicate images. Exit code 3 if something is wrong."""
    from segapp.config import load_config, named_config

    loaded = load_config(named_config(config, overrides or []), overrides or [])
    from segapp.commands.check import check_data

    sys.exit(
        check_data(loaded, as_json=json_out, html_file=html_file, sums_file=sums_file, new_sums_file=new_sums_file)
    )


@app.command()
def doctor(json_out: JsonFlag = False) -> None:
    """Show what this machine offers for training, what is missing, and the command that installs it.

    Exit code 1 if something is missing without which training with default settings fails.
    """
    from segapp.commands.doctor import print_doctor

    sys.exit(print_doctor(as_json=json_out))


@app.command()
def init(
    root: init_options.Root,
    out: init_options.Out = None,
    layout: init_options.Layout = None,
    val_share: init_options.ValShare = None,
    group: init_options.Group = None,
    folds: init_options.Folds = None,
    blocks: init_options.Blocks = None,
    seed: init_options.Seed = 0,
    html_file: init_options.Page = None,
    clean_masks: init_options.CleanMasks = False,
    masks: init_options.Masks = None,
    unlabelled: init_options.Unlabelled = None,
    palette: init_options.Palette = None,
    force: init_options.Force = False,
) -> None:
    """Write a config for a data folder, each choice with its reason; the folder itself stays as it is."""
    from segapp.onboarding.init import InitRequest
    from segapp.onboarding.init.dialog import init_folder

    init_folder(
        InitRequest(
            root,
            out,
            force,
            layout,
            val_share,
            group,
            folds,
            seed,
            html_file,
            clean_masks,
            blocks,
            masks,
            unlabelled,
            palette,
        )
    )
