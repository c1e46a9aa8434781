"""`segapp doctor`: what this machine offers for training, what is missing, and the command that gets it.

`facts` reads the system, `findings` evaluates the facts. Only the standard library is needed, so that it works in a
broken installation as long as typer starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from segapp.commands.doctor.facts import collect_facts
from segapp.commands.doctor.findings import Finding, can_train, evaluate_machine
from segapp.run.starting import announce_on_terminal
from segapp.run.words import printable

CANNOT_TRAIN = 1
JSON_VERSION = 1


def print_doctor(*, as_json: bool) -> int:
    """Print what this machine offers.

    Returns:
        The exit code: 0 if training can run here, 1 if something that it requires is missing.
    """
    announce_on_terminal("looking at this machine")
    facts = collect_facts()
    findings = evaluate_machine(facts)
    trains = can_train(findings)
    if as_json:
        plain = [finding._asdict() for finding in findings]
        print(json.dumps({"v": JSON_VERSION, "can_train": trains, "findings": plain, "facts": facts}, indent=2))
    else:
        print("\n".join(report_lines(findings)))
    return 0 if trains else CANNOT_TRAIN


def report_lines(findings: Sequence[Finding]) -> list[str]:
    """The report for a person: a line for each finding, then what to do, then the result."""
    width = max(len(finding.name) for finding in findings)
    lines, to_do = [], []
    for name, state, found, is_required, needed_for, fix in findings:
        affected = f" (affects {needed_for})" if needed_for and not fix else ""
        lines.append(printable(f"{name:<{width}}  {state:<7}  {found}{affected}"))
        if fix:
            label = "required" if is_required and state == "missing" else f"for {needed_for}"
            to_do += [printable(f"  {name} ({label}):"), printable(f"    {fix}")]
    if to_do:
        lines += ["", "to do:", *to_do]
    missing = [finding.name for finding in findings if finding.is_required and finding.state == "missing"]
    gpus = sum(finding.name.startswith("cuda:") and finding.state == "ok" for finding in findings)
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "the CPU"
    result = f"cannot run here: {', '.join(missing)} missing" if missing else f"can run here, on {where}"
    return [*lines, "", f"training {result}"]
