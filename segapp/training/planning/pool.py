"""Pool of processes that simulate one config. No torch here."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any

from pydantic import TypeAdapter

from segapp.config import RunConfig
from segapp.errors import ConfigError, RunError
from segapp.memory.peaks import SimulationJob, SimulationResult
from segapp.training.telemetry.console import progress_bar

NUM_PROCESSES = 2

_TIMEOUT_S = 600.0

_ERROR_OF_CODE = {2: ConfigError}


class SimulationPool:
    """Processes that simulate one config; each runs `python -m segapp.training.planning.simulate`."""

    def __init__(self, config: RunConfig, num_processes: int = NUM_PROCESSES) -> None:
        self._config = json.dumps(config.model_dump(mode="json"))
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "segapp.training.planning.simulate"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environ,
            )
            for _ in range(num_processes)
        ]

    def __enter__(self) -> SimulationPool:
        for process in self._processes:
            self._send(process, self._config)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def ask(self, requests: Sequence[Mapping[str, Any]], label: str = "memory plan: simulated steps") -> list[Any]:
        """Send requests to the processes and return the answers in the same order.

        Args:
            requests: what to do.
            label: of the progress bar that a terminal shows.

        Raises:
            ConfigError: the config cannot be built.
            RunError: a simulation failed or exceeded the timeout.
        """
        jobs: queue.SimpleQueue[tuple[int, Mapping[str, Any]]] = queue.SimpleQueue()
        for item in enumerate(requests):
            jobs.put(item)
        replies: dict[int, Any] = {}

        def work(process: subprocess.Popen[str], progress: Callable[[int], None]) -> None:
            while True:
                try:
                    number, request = jobs.get_nowait()
                except queue.Empty:
                    return
                replies[number] = self._exchange(process, request)
                progress(len(replies))

        with progress_bar(len(requests), label, unit="job") as progress:
            threads = [threading.Thread(target=work, args=(each, progress), daemon=True) for each in self._processes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(_TIMEOUT_S)
                if thread.is_alive():
                    raise RunError(f"a memory simulation did not answer within {_TIMEOUT_S:.0f} s: try a smaller model")
        return [_checked(replies[number]) for number in range(len(requests))]

    def simulate(self, jobs: Sequence[SimulationJob]) -> list[SimulationResult]:
        """Run jobs and return the results in the same order."""
        answers = self.ask([{"ask": "job", "job": asdict(job)} for job in jobs])
        return TypeAdapter(list[SimulationResult]).validate_python(answers)

    def _exchange(self, process: subprocess.Popen[str], request: Mapping[str, Any]) -> Any:
        self._send(process, json.dumps(request))
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if not line:
            last = (process.stderr.read().strip().splitlines() or ["no reason given"])[-1]
            return {"error": f"the memory simulation ended: {last}", "code": 1}
        return json.loads(line)

    @staticmethod
    def _send(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # `_exchange` reports why the process ended
            process.stdin.write(line + "\n")
            process.stdin.flush()


def _checked(reply: Mapping[str, Any]) -> Any:
    if "ok" in reply:
        return reply["ok"]
    raise _ERROR_OF_CODE.get(reply["code"], RunError)(reply["error"])
