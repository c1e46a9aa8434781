"""Questions that a folder leaves open; each names the option of `segapp init` that answers it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from segapp.errors import DataError

SURE = 0.6  # confidence below which the user is asked about an interpretation, even if there is no other


@dataclass(frozen=True)
class Answer:
    """One possible answer: the value of the option, and its meaning in words."""

    value: str
    words: str


class OpenQuestionError(DataError):
    """A folder has several plausible interpretations, or an unlikely one, and no option chooses one.

    In a terminal the question is asked; in a pipe, the message names the option and its possible values.

    Attributes:
        question: the sentence without the answers.
        option: the option that answers it, such as `--layout`.
        answers: the possible values, most likely first.
    """

    question: str = ""
    option: str = ""
    answers: tuple[Answer, ...] = ()

    @property
    def attribute(self) -> str:
        """Name of the attribute of `InitRequest` that holds the answer."""
        return self.option.lstrip("-").replace("-", "_")


def open_question(question: str, option: str, answers: Sequence[Answer], advice: str = "") -> OpenQuestionError:
    """Return the error for a question, a sentence without an end mark; the first answer is the most likely one."""
    listed = "; ".join(f"{option} {shlex.quote(answer.value)} ({answer.words})" for answer in answers)
    error = OpenQuestionError(f"{question}: answer with {listed}" + (f"; {advice}" if advice else ""))
    error.question, error.option, error.answers = question, option, tuple(answers)
    return error
