"""Rewards, in processes that are killed where they take too long: a failure is told and counted, and is never a 0."""

import ctypes
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from titanlite.config import Config
from titanlite.rl.tasks import Problem, build_task

START_S = 120


@dataclass(frozen=True)
class Reward:
    value: float | None
    failure: str = ""  # why there is no value: `reason: what happened`


@dataclass
class _Worker:
    process: subprocess.Popen
    pipe: Connection
    job: int = -1
    since: float = 0.0


class RewardPool:
    """Processes with the task that `spec`, the arguments of `build_task`, names."""

    def __init__(self, spec: tuple[str, tuple[str, ...], int], *, n_workers: int, timeout_s: float, memory_bytes: int = 0):
        self.spec, self.timeout_s, self.memory_bytes = spec, timeout_s, memory_bytes
        self.workers = [self._start() for _ in range(n_workers)]
        self.given, self.found, self.waiting = [], [], deque()

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        # A process of its own from the start: a fork of one with threads may hang.
        process = subprocess.Popen([sys.executable, "-m", "titanlite.rl.rewards", str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        pipe = Connection(ours.detach())
        pipe.send((self.spec, self.memory_bytes, os.getpid()))
        if not pipe.poll(START_S) or pipe.recv() != "ready":
            raise RuntimeError(f"a process for rewards did not start within {START_S} s")
        return _Worker(process, pipe)

    def submit(self, problem: Problem, answer: str) -> None:
        """Another sample's text, which is begun with as soon as a process is free: while others are still drawn."""
        self.waiting.append(len(self.given))
        self.given.append((problem, answer))
        self.found.append(None)
        self._go_on(0)

    def results(self) -> list[Reward]:
        """One for each that was submitted since the last call, in their order."""
        while self.waiting or any(worker.job >= 0 for worker in self.workers):
            self._go_on(self.timeout_s)
        found = self.found
        self.given, self.found = [], []
        return found

    def rewards(self, answers: Sequence[tuple[Problem, str]]) -> list[Reward]:
        """One for each (problem, sample's text), in their order."""
        for problem, answer in answers:
            self.submit(problem, answer)
        return self.results()

    def _go_on(self, wait_s: float) -> None:
        """Takes what is there, waiting for some, kills what is late and gives out what is waiting."""
        busy = [worker for worker in self.workers if worker.job >= 0]
        left = min((worker.since + self.timeout_s - time.monotonic() for worker in busy), default=0)
        ready = wait([worker.pipe for worker in busy], timeout=max(min(left, wait_s), 0)) if busy else []
        for worker in busy:
            job = worker.job
            if worker.pipe in ready:
                try:
                    self.found[job], worker.job = worker.pipe.recv(), -1
                except (EOFError, ConnectionResetError):
                    self.found[job] = Reward(None, f"died: its process ended with {self._replace(worker)}")
            elif time.monotonic() - worker.since >= self.timeout_s:
                worker.process.kill()
                self._replace(worker)
                self.found[job] = Reward(None, f"timeout: no answer within {self.timeout_s:g} s")
        for worker in self.workers:
            if worker.job < 0 and self.waiting:
                worker.job, worker.since = self.waiting.popleft(), time.monotonic()
                worker.pipe.send(self.given[worker.job])

    def _replace(self, worker: _Worker) -> int | None:
        code = worker.process.wait()
        worker.pipe.close()
        self.workers[self.workers.index(worker)] = self._start()
        return code

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
            worker.pipe.close()


def build_rewards(cfg: Config) -> RewardPool:
    spec = cfg.rl.task, cfg.rl.task_options, cfg.debug.seed
    return RewardPool(spec, n_workers=cfg.rl.reward_workers, timeout_s=cfg.rl.reward_timeout_s, memory_bytes=round(cfg.rl.reward_memory_gb * 1e9))


def _work(pipe: Connection) -> None:
    spec, memory_bytes, trainer = pipe.recv()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: whatever it is at, it ends with the trainer
    if os.getppid() != trainer:
        return
    task = build_task(*spec)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    pipe.send("ready")
    while True:
        try:
            problem, answer = pipe.recv()
        except (EOFError, ConnectionResetError):  # the trainer has ended
            return
        try:
            value = float(task.reward(problem, answer))
            pipe.send(Reward(value) if math.isfinite(value) else Reward(None, f"not finite: {value}"))
        except Exception as error:
            pipe.send(Reward(None, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    from titanlite.rl import rewards  # what is sent must be of the module, not of this script

    rewards._work(Connection(int(sys.argv[1])))
