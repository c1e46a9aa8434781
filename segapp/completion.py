"""Shell completion for bash, zsh and fish: the scripts, and the candidates that they ask for.

A script passes the words of the line and reads one candidate per line, `value<TAB>help`. Typer's own scripts are not
used: zsh evaluates the candidates and bash expands patterns in them, which is unsafe because a run may have any name.
In bash they also lose the value of KEY=VALUE, which the shell splits at `=`, and put a blank after `KEY=`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from segapp.docs.pages import pages
from segapp.errors import ConfigError, accepted_words

SCRIPTS = {
    "bash": r"""# segapp completion for bash: source <(segapp completion bash)
_segapp() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("${line%%$'\t'*}")
    done < <("$1" __complete line "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o bashdefault -o default -F _segapp segapp
""",
    "zsh": r"""#compdef segapp
# segapp completion for zsh: source <(segapp completion zsh), behind compinit
_segapp() {
    local line
    local -a values keys shown_values shown_keys
    for line in "${(@f)$("$words[1]" __complete words "${(@Q)words[1,CURRENT]}" 2>/dev/null)}"; do
        case "${line%%$'\t'*}" in
            '') ;;
            *=) keys+=("${line%%$'\t'*}"); shown_keys+=("${line/$'\t'/  -- }") ;;
            *) values+=("${line%%$'\t'*}"); shown_values+=("${line/$'\t'/  -- }") ;;
        esac
    done
    (( $#keys )) && compadd -l -S '' -d shown_keys -- "${keys[@]}"
    (( $#values )) && compadd -l -d shown_values -- "${values[@]}"
    (( $#keys + $#values )) || _files
}
compdef _segapp segapp
""",
    "fish": r"""# segapp completion for fish: segapp completion fish | source
function __segapp_ask
    set -l words (commandline -opc) (commandline -ct)
    set -g __segapp_found ($words[1] __complete words $words 2>/dev/null)
    test (count $__segapp_found) -gt 0
end
complete -c segapp -n __segapp_ask -f -a '$__segapp_found'
""",
}


class Candidate(NamedTuple):
    """A possible word at the cursor."""

    value: str
    help: str = ""


def completion_script(shell: str) -> str:
    """Return the script that a shell sources."""
    if shell not in SCRIPTS:
        raise ConfigError(f"no completion for {shell!r}: {accepted_words(shell, SCRIPTS)}")
    return SCRIPTS[shell]


def answer(app: Any, asked: Sequence[str]) -> list[str]:
    """Return the candidates as lines for a script.

    Args:
        app: the command line's root command.
        asked: `words` and the words up to the cursor; or `line`, the line up to the cursor, and bash's word breaks.
    """
    kind, *rest = asked
    if kind == "words":
        words, breaks = list(rest), ""
    else:
        words, breaks = split_line(rest[0]), rest[1]
    *before, incomplete = words[1:] or [""]
    found = [c for c in candidates(app, before, incomplete) if c.value.startswith(incomplete)]
    # bash replaces only the part of the word after its last word break.
    cut = max((incomplete.rfind(mark) + 1 for mark in "=:" if mark in breaks), default=0)
    return [f"{c.value[cut:]}\t{' '.join(c.help.split())}".rstrip("\t") for c in found if c.value.isprintable()]


def split_line(line: str) -> list[str]:
    """Return the words of a line that may end within quotes; the last word is at the cursor.

    >>> split_line("segapp eval demo"), split_line("segapp eval "), split_line('segapp eval "my ru')
    (['segapp', 'eval', 'demo'], ['segapp', 'eval', ''], ['segapp', 'eval', 'my ru'])
    """
    for closing in ("", '"', "'", "\\"):
        try:
            words = shlex.split(line + closing)
        except ValueError:
            continue
        return [*words, ""] if not words or (line[-1:].isspace() and not closing) else words
    return [""]


def candidates(app: Any, before: Sequence[str], incomplete: str) -> Iterator[Candidate]:
    """Yield the candidates at the cursor, including candidates that do not start with the incomplete word."""
    command, arguments = _descend(app, before)
    options = {spelling: option for option in command.params for spelling in option.opts if spelling.startswith("-")}
    option, equals, _ = incomplete.partition("=")
    if equals and option in options:
        yield from (Candidate(f"{option}={c.value}", c.help) for c in _values(options[option].name))
    elif before and _takes_value(options.get(before[-1])):
        yield from _values(options[before[-1]].name)
    elif incomplete.startswith("-"):
        used = {id(options[word]) for word in before if word in options}
        for spelling, known in options.items():
            if known.multiple or id(known) not in used:
                yield Candidate(spelling, known.help or "")
    elif hasattr(command, "commands"):
        for name, inner in command.commands.items():
            if not inner.hidden:
                yield Candidate(name, inner.get_short_help_str(limit=70))
    else:
        yield from _of_argument(command, arguments, options, incomplete)


def _descend(app: Any, words: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the command that the words name, and the words after its name."""
    command, rest = app, list(words)
    while hasattr(command, "commands"):
        at = next((i for i, word in enumerate(rest) if word in command.commands), None)
        if at is None:
            return command, []
        command, rest = command.commands[rest[at]], rest[at + 1 :]
    return command, rest


def _takes_value(option: Any) -> bool:
    return option is not None and not option.is_flag


def _of_argument(
    command: Any, words: Sequence[str], options: Mapping[str, Any], incomplete: str
) -> Iterator[Candidate]:
    """Yield the values of the positional argument at the cursor."""
    is_value = False
    num_before = 0
    for word in words:
        if not is_value and not word.startswith("-"):
            num_before += 1
        is_value = not is_value and _takes_value(options.get(word))
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    if arguments:
        argument = arguments[min(num_before, len(arguments) - 1)]
        if num_before < len(arguments) or argument.nargs != 1:
            yield from _keys(incomplete) if argument.name == "overrides" else _values(argument.name)


def _values(name: str) -> Iterator[Candidate]:
    """Yield the values of an option or argument; none for files, which the shell completes on its own."""
    if name == "config":
        yield from (Candidate(config, "config") for config in _config_names())
    elif name in ("run", "runs", "target", "targets", "resume"):
        yield from ([Candidate("auto", "the newest run of this config")] if name == "resume" else [])
        yield from (Candidate(run, "run") for run in _run_names())
    elif name == "topic":
        yield from (Candidate(page.topic, page.about) for page in pages())
    elif name == "words":
        settings = ("gpu0_bsz=", "shares=", "lr_factor=", "recompute=")
        yield from map(Candidate, ("set", "pause", "resume", "checkpoint", "stop", "cancel", *settings))
    else:
        known: dict[str, tuple[str, ...]] = {
            "shell": tuple(SCRIPTS),
            "format": ("onnx", "pt2", "safetensors"),
            "split": ("train", "val", "test"),
            "save": ("labels", "color", "overlay", "probabilities"),
            "gpus": ("here",),
            "batch": ("auto",),
        }
        yield from (Candidate(value) for value in known.get(name, ()))


def _config_names() -> list[str]:
    from segapp.config.load import config_places

    folders = dict.fromkeys(place.parent for place in config_places("any.yaml"))
    return sorted({path.name for folder in folders for path in folder.glob("*.yaml") if path.is_file()})


def _run_names() -> list[str]:
    from segapp.run.folder import run_folders

    return [folder.name for folder in run_folders(Path("runs"), with_sweeps=True)]


def _keys(incomplete: str) -> Iterator[Candidate]:
    """Yield `KEY=` for each key of the config and, after `=`, the words that the key accepts."""
    from segapp.config.words import description_of, known_keys, words_of

    name, equals, _ = incomplete.partition("=")
    if equals:
        yield from (Candidate(f"{name}={word}") for word in words_of(name.split(".")))
        return
    keys = list(known_keys())
    sections = {key[:-1] for key in keys}
    for key in keys:
        if key not in sections:
            yield Candidate(f"{'.'.join(key)}=", description_of(key).removeprefix(": "))
