"""The command line: one function a command, one parameter an option.

Functions here take as many parameters as their command has options; what they call gets a dataclass or few arguments.
Heavy imports are inside the functions, so that `segapp --help` answers at once.
"""

from segapp.cli.commands import with_resume_value
from segapp.cli.options import app

__all__ = ["app", "with_resume_value"]
