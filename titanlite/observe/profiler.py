"""Traces of steps by torch.profiler, and snapshots of CUDA memory: for ui.perfetto.dev and pytorch.org/memory_viz."""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from titanlite.config import Profiling
from titanlite.utils import logger

MOST_EVENTS = 100_000  # allocations that a snapshot of memory knows of


@contextlib.contextmanager
def profiling(cfg: Profiling, folder: Path, *, rank: int, step: int) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each step from `step` on; files are iteration_N/rankR_... in the folders that `cfg` names.

    A file that cannot be written is told and left out: training goes on.
    """
    with contextlib.ExitStack() as stack:
        after = []
        if cfg.enable_profiling:
            after.append(stack.enter_context(_traced(cfg, folder / cfg.save_traces_folder, rank, step)))
        if cfg.enable_memory_snapshot:
            after.append(stack.enter_context(_remembered(cfg, folder / cfg.save_memory_snapshot_folder, rank, step)))
        yield lambda: [fn() for fn in after]


@contextlib.contextmanager
def _traced(cfg: Profiling, folder: Path, rank: int, step: int) -> Iterator[Callable[[], None]]:
    wait = cfg.profile_freq - cfg.profiler_warmup - cfg.profiler_active

    def keep(profiler: profile) -> None:
        def write(file: Path) -> None:
            profiler.export_chrome_trace(str(file))
            if not file.read_bytes().rstrip().endswith(b"}"):  # the profiler does not say so
                raise OSError("it could not be written whole")

        _write(folder / f"iteration_{step + profiler.step_num}" / f"rank{rank}_trace.json", write)

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    when = schedule(wait=wait, warmup=cfg.profiler_warmup, active=cfg.profiler_active)
    with profile(activities=activities, schedule=when, on_trace_ready=keep, record_shapes=True) as profiler:
        yield profiler.step


@contextlib.contextmanager
def _remembered(cfg: Profiling, folder: Path, rank: int, step: int) -> Iterator[Callable[[], None]]:
    def keep(name: str) -> None:
        snapshot = torch.cuda.memory._snapshot()
        _write(folder / name / f"rank{rank}_memory_snapshot.pickle", lambda file: file.write_bytes(pickle.dumps(snapshot)))

    def after_step() -> None:
        nonlocal step
        step += 1
        if step % cfg.profile_freq == 0:
            keep(f"iteration_{step}")

    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
    try:
        yield after_step
    except torch.OutOfMemoryError:
        keep(f"iteration_{step}_exit")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _write(file: Path, write: Callable[[Path], object]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file)
    except OSError as e:
        logger.warning(f"profiling_failed file={file} {e}: training goes on without it")
    else:
        logger.info(f"profile={file}")
