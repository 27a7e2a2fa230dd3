"""Runs of a tiny model whose ranks are forked for each leg and end as a gang under torchrun does: one dies, all are killed."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

import titanlite.train
from tests.faults import points
from titanlite.config import Comm
from titanlite.parallel.mesh import init_distributed

STEPS, INTERVAL, KEPT = 40, 5, 3
CONFIG = """
[model]
name = "tests.faults.model"
flavor = "tiny"
[training]
dataset = "text"
local_batch_size = 2
seq_len = 32
steps = {steps}
dataset_path = "{folder}/text.txt"
mixed_precision_param = "float32"
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
[job]
name = "run"
dump_folder = "{folder}"
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
interval = {interval}
keep_latest_k = {kept}
async_mode = "{mode}"
[metrics]
log_freq = 1
enable_tensorboard = false
[parallelism]
{layout}
"""
LAYOUTS = {  # ranks, and what [parallelism] says
    "fsdp=2": (2, ""),
    "fsdp=3": (3, ""),
    "tp=2": (2, "tensor_parallel_degree = 2"),
    "cp=2": (2, "context_parallel_degree = 2"),
    "pp=2": (2, "pipeline_parallel_degree = 2"),
    "hsdp=2x2": (4, "data_parallel_replicate_degree = 2"),
}
MODES = ("disabled", "async", "async_with_pinned_mem")


def kill_rank() -> None:
    """Also out of a process that the rank has started: its group is the rank's."""
    os.kill(os.getpgrp(), signal.SIGKILL)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Fault:
    """What befalls a rank when it comes by a point for the nth time in a leg."""

    point: str
    rank: int
    nth: int
    act: Callable[[], None] = kill_rank


class Run:
    """A run's folder, what is recorded of it, and the legs that train it."""

    def __init__(self, folder: Path, layout: str = "fsdp=2", mode: str = MODES[0]):
        self.base, self.layout, self.mode = folder, layout, mode
        self.folder = folder / "run"
        self.checkpoints = self.folder / "checkpoint"
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {"steps": STEPS, "interval": INTERVAL, "kept": KEPT}
        (folder / "config.toml").write_text(CONFIG.format(folder=folder, layout=LAYOUTS[layout][1], mode=mode, **sizes))
        (folder / "text.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(4000)))

    def copy(self, folder: Path) -> "Run":
        other = Run(folder, self.layout, self.mode)
        shutil.copytree(self.folder, other.folder)
        shutil.copy(self.base / "records.jsonl", other.base)
        return other

    def start(self, *words: object, faults: Sequence[Fault] = ()) -> "Leg":
        argv = [str(word) for word in (self.base / "config.toml", *words)]
        self.last = Leg(self.base, LAYOUTS[self.layout][0], argv, faults)
        return self.last

    def leg(self, *words: object, faults: Sequence[Fault] = ()) -> int:
        return self.start(*words, faults=faults).wait()

    def killed(self, fault: Fault, *words: object) -> bool:
        """Whether `fault` came about in a leg, and ended it."""
        return self.leg(*words, faults=[fault]) != 0 and all(self.last.struck)

    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.base / "records.jsonl").read_text().splitlines()]

    def metrics(self) -> list[dict]:
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "event" not in line]

    def log(self) -> str:
        return (self.folder / "logs" / "rank_0.log").read_text()

    def draw(self, point: str, seed: object, *, part: int = 1, **options) -> Fault:
        """A fault at one of the times, in the first 1/part of them, that a rank came by `point` in the last leg."""
        generator = random.Random(f"{point} {seed}")
        times = self.last.times[point]
        rank = generator.choice([rank for rank, n in enumerate(times) if n])
        return Fault(point, rank, generator.randint(1, max(1, times[rank] // part)), **options)


class Leg:
    """A gang at work. `times`: point -> how often each rank, and what it started, came by; `struck`: which faults came about."""

    def __init__(self, folder: Path, ranks: int, argv: list[str], faults: Sequence[Fault]):
        context = multiprocessing.get_context("fork")
        self.times = {point: context.RawArray("l", ranks) for point in points.POINTS}
        self.struck = context.RawArray("b", len(faults))
        passes = (faults, self.times, self.struck)
        store = os.path.join(tempfile.mkdtemp(dir=folder), "store")
        self.ranks = [
            context.Process(target=_rank_main, args=(rank, ranks, argv, folder, store, passes)) for rank in range(ranks)
        ]
        for process in self.ranks:
            process.start()

    def wait(self, timeout_s: float = 300) -> int:
        """The exit code: of the first rank that failed, which ends the others; its own children it leaves alone."""
        end = time.monotonic() + timeout_s
        try:
            while (running := [p for p in self.ranks if p.exitcode is None]) and not any(p.exitcode for p in self.ranks):
                assert wait([p.sentinel for p in running], end - time.monotonic()), f"no end after {timeout_s} s"
            return next((p.exitcode for p in self.ranks if p.exitcode), 0)
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.ranks:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):  # it has not come to make its group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            process.join()

    def outlived(self, timeout_s: float = 30) -> bool:
        """Whether a process that a rank has started goes on without it; such a process gets a moment to notice."""
        end = time.monotonic() + timeout_s
        while any(_runs(process.pid) for process in self.ranks):
            if time.monotonic() > end:
                return True
            time.sleep(0.05)
        return False


def _rank_main(rank: int, ranks: int, argv: list[str], folder: Path, store: str, passes: tuple) -> None:
    os.setsid()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)

    points.watch(_Passes(rank, *passes), partial(_record, folder / "records.jsonl"))
    init_distributed(Comm(), store=dist.FileStore(store, ranks))
    sys.argv = ["titanlite.train", *argv]
    sys.exit(titanlite.train.main())


@dataclass
class _Passes:
    rank: int
    faults: Sequence[Fault]
    times: dict  # this and the next in memory that the processes a rank starts share
    struck: Sequence[int]

    def __call__(self, point: str) -> None:
        self.times[point][self.rank] += 1
        for i, fault in enumerate(self.faults):
            if (fault.point, fault.rank, fault.nth) == (point, self.rank, self.times[point][self.rank]):
                self.struck[i] = True
                fault.act()


def _record(path: Path, step: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(step) + "\n")


def _runs(group: int) -> bool:
    """Whether the process group has a process that is not a zombie."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, its_group, *_ = path.read_text().rsplit(")", 1)[1].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def differences(run: Run, golden: Run) -> list[str]:
    """In what the last record of each step differs from the golden run's; nothing where one history explains all."""
    last, wanted = ({record["step"]: record for record in r.records()} for r in (run, golden))
    found = [f"step {step} was never recorded" for step in wanted.keys() - last.keys()]
    found += [f"step {step} is beyond the end" for step in last.keys() - wanted.keys()]
    for step in sorted(wanted.keys() & last.keys()):
        found += [f"step {step}: {key} is another" for key in wanted[step] if last[step].get(key) != wanted[step][key]]
    samples = Counter(sample for record in last.values() for sample in record["samples"])
    found += [f"sample {sample} was trained on {n} times" for sample, n in samples.items() if n > 1]
    logged = {line["step"]: line["loss"].hex() for line in run.metrics()}
    found += [f"step {step}: metrics.jsonl has another loss" for step in last if logged.get(step) != last[step]["loss"]]
    return found
