"""The command line: one function a command, one parameter an option.

Functions here take as many parameters as their command has options; what they call gets a dataclass or few arguments.
Heavy imports are inside the functions, so that `segapp --help` answers at once. The modules are imported in the order
in which the help lists their commands.
"""

# isort: off
from segapp.cli import training, networks, data, runs, tools
from segapp.cli.options import app
from segapp.cli.training import with_resume_value

# isort: on

__all__ = ["app", "data", "networks", "runs", "tools", "training", "with_resume_value"]
