"""A job on the machines of `machines`: one rank on each, a tiny network in float64, and what is done to it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.fault_runs import TAG, FaultRun
from tests.support.machines import NETWORK, Machines, Process

PORT = 29500
SECTIONS: dict[str, Any] = {
    "model": {"library": "python", "name": "tests.support.double_net:DoubleNet", "encoder": None, "options": {}},
    "train": {"precision": "fp32", "batch_size": 4, "epochs": 40},
    "optim": {"name": "sgd", "lr": 0.05},  # AdamW amplifies the rounding of gradients that are 0
    "parallel": {"mode": "ddp", "devices": ["cpu"]},
}
"""Keys of the config of such a job, beside those of `tiny_config`."""


def sections_of(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the config of a job, with some replaced."""
    names = {**SECTIONS, **sections}
    return {name: {**SECTIONS.get(name, {}), **dict(sections.get(name, {}))} for name in names}


@dataclass
class Job:
    """A run that several machines train.

    Args:
        run: its folder and config.
        machines: which may train it.
        nnodes: how many take part, `2` or `1:4`.
        env: environment variables of agents and ranks.
        options: further options of `segapp launch`.
        agents: the newest of each machine, by its number.
        ended_s: when an agent was seen to have ended, by the clock of this process.
    """

    run: FaultRun
    machines: Machines
    nnodes: str
    env: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    agents: dict[int, Process] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)

    def start(self, *numbers: int, words: Sequence[str] = ()) -> None:
        """Start the agent of some machines, of all without numbers."""
        for number in numbers or [machine.number for machine in self.machines]:
            self.ended_s.pop(number, None)
            self.agents[number] = self.machines[number].start(
                *self.launcher(), *words, log=self.log(number), cwd=self.run.work, env=self._environment()
            )

    def _environment(self) -> dict[str, str]:
        return {TAG: self.run.tag, "PYTHONPATH": str(ROOT), "SEGAPP_TRUST_PARTS": "1", **self.env}

    def launcher(self) -> list[str]:
        """Return the command of each machine."""
        endpoint = f"{NETWORK}.1:{PORT}"
        options = ["--nnodes", self.nnodes, "--nproc-per-node", "1", "--rdzv-endpoint", endpoint, *self.options]
        return [
            sys.executable, "-m", "segapp", "launch", *options, "--",
            "train", "--plain", "--config", "config.yaml", "--run", "run",
        ]  # fmt: skip

    def log(self, number: int) -> Path:
        """Return the file with the output of a machine's agent and ranks."""
        return self.run.work / f"machine{number}.txt"

    def text(self) -> str:
        """Return the output of all machines, for a failed test."""
        return "\n".join(f"--- machine {n}\n{self.log(n).read_text(errors='replace')[-3000:]}" for n in self.agents)

    def step(self) -> int:
        """Return the newest step in the events."""
        path = self.run.folder / "events.jsonl"
        found = re.findall(rb'"type":"step".*?"step":(\d+)', path.read_bytes()[-20000:]) if path.exists() else []
        return int(found[-1]) if found else 0

    def wait_for(self, what: Callable[[], Any], timeout_s: float = 120) -> Any:
        """Wait until `what()` is true and return it; notes when agents end meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := what()):
            self.note_ends()
            assert time.monotonic() < deadline_s, f"the condition did not hold in {timeout_s:g} s\n{self.text()}"
            time.sleep(0.05)
        return found

    def wait_for_step(self, step: int, timeout_s: float = 120) -> None:
        """Wait until the event of a step is written, or a later one."""
        self.wait_for(lambda: self.step() >= step, timeout_s)

    def note_ends(self) -> None:
        """Note the agents that have ended."""
        for number, agent in self.agents.items():
            if agent.returncode is not None:
                self.ended_s.setdefault(number, time.monotonic())

    def codes(self, *numbers: int, timeout_s: float = 120) -> dict[int, int | None]:
        """Wait until the agents of some machines, or of all, have ended, and return their exit codes."""
        chosen = numbers or tuple(self.agents)
        self.wait_for(lambda: all(self.agents[number].returncode is not None for number in chosen), timeout_s)
        self.note_ends()
        return {number: self.agents[number].returncode for number in chosen}

    def kill_all(self) -> None:
        """End what is left: the machines, or their processes, are about to go."""
        for machine in self.machines:
            if machine.is_up:
                for pid in machine.pids():
                    try:
                        os.kill(pid, 9)
                    except ProcessLookupError:
                        continue
