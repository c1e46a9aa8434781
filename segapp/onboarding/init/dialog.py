"""`segapp init` on a terminal: the questions that a folder leaves open, and what is printed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from segapp.onboarding.init import InitRequest, InitResult, propose_config
from segapp.onboarding.survey.questions import OpenQuestionError
from segapp.run.words import printable


def init_folder(request: InitRequest) -> None:
    """Write the configs of a request; print what is believed, and the next commands."""
    result = asked(request)
    print(*map(printable, result.lines), sep="\n")
    first = result.configs[0]
    print(f"written: {', '.join(map(str, result.configs))}")
    train = f"segapp train --config {first}"
    if len(result.configs) > 1:
        train = f"segapp sweep {' '.join(map(str, result.configs))}"
    print(f"next: segapp check --config {first}; {train}")


def asked(request: InitRequest) -> InitResult:
    """Return the result of a request; each question that the folder leaves open is asked in a terminal.

    Raises:
        OpenQuestionError: there is no terminal, or no answer.
    """
    while True:
        try:
            return propose_config(request)
        except OpenQuestionError as question:
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise
            chosen: dict[str, Any] = {question.attribute: _answer(question)}
            request = replace(request, **chosen)


def _answer(question: OpenQuestionError) -> str:
    """Return the value that the person at the terminal chooses.

    Raises:
        OpenQuestionError: the answer is empty or no number of an answer.
    """
    print(f"{printable(question.question)}:", file=sys.stderr)
    for number, answer in enumerate(question.answers, start=1):
        print(f"  {number}  {printable(answer.value)}: {printable(answer.words)}", file=sys.stderr)
    print(f"number for {question.option} (none: stop): ", end="", file=sys.stderr, flush=True)
    said = sys.stdin.readline().strip()
    if not said.isdigit() or not 1 <= int(said) <= len(question.answers):
        raise question
    return question.answers[int(said) - 1].value
