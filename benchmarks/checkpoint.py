"""Speed of titanlite's checkpoints over that of plain DCP, and how long an asynchronous save blocks, on one rank.

    python benchmarks/checkpoint.py

Plain and titanlite's take turns on the same state; `speed` is the median over the rounds of plain's time over titanlite's. Both saves
wait until the disk has every byte. Files are read from the page cache, where titanlite's own work shows most. A blocking save is held
against a copy of the state: into new memory the first time (`clone`), later into memory that is there already (`copy_`).
"""

import argparse
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[1]))

from titanlite.checkpoint.asynchronous import ProcessSaver, ThreadSaver
from titanlite.checkpoint.store import load, save

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPEED_TARGET, BLOCKING_TARGET_MS = 0.8, 50


def build_state(n_bytes: int, dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """About `n_bytes` as AdamW leaves them: per layer a weight [dim, dim] and a norm [dim], their two moments and steps."""
    n_layers = max(1, n_bytes // (3 * dim * dim * dtype.itemsize))
    state = {}
    for layer in range(n_layers):
        for name, shape in ((f"{layer}.w", (dim, dim)), (f"{layer}.norm", (dim,))):
            state[f"model.{name}"] = torch.randn(shape).to(dtype)
            state[f"optimizer.{name}.exp_avg"] = torch.randn(shape).to(dtype)
            state[f"optimizer.{name}.exp_avg_sq"] = torch.randn(shape).square().to(dtype)
            state[f"optimizer.{name}.step"] = torch.tensor(1.0)
    return state


def save_plain(folder: Path, state: dict[str, Tensor]) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "plain"), no_dist=True)


def load_plain(folder: Path, state: dict[str, Tensor]) -> None:
    dcp.load(dict(state), storage_reader=dcp.FileSystemReader(folder / "plain"), no_dist=True)


def save_ours(folder: Path, state: dict[str, Tensor]) -> None:
    save(folder, 1, state, extra={}, keep_latest_k=0)


def load_ours(folder: Path, state: dict[str, Tensor]) -> None:
    load(folder, 1, state)


def seconds(fn: Callable, *args, **options) -> float:
    began = time.perf_counter()
    fn(*args, **options)
    return time.perf_counter() - began


def measure_speed(folder: Path, state: dict[str, Tensor], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Name -> (plain, titanlite) seconds of every round."""
    times: dict[str, list[tuple[float, float]]] = {"save": [], "load": []}
    other = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    for i in range(rounds):
        order = slice(None, None, -1 if i % 2 else 1)  # each goes first in turn
        for name, pair in (("save", (save_plain, save_ours)), ("load", (load_plain, load_ours))):
            found = {fn: seconds(fn, folder, state if name == "save" else other) for fn in pair[order]}
            times[name].append((found[pair[0]], found[pair[1]]))
        assert all(torch.equal(other[key], state[key]) for key in state)
        for path in (folder / "plain", folder / "step-1"):
            shutil.rmtree(path)
    return times


def measure_blocking(folder: Path, state: dict[str, Tensor], saver: ThreadSaver | ProcessSaver, rounds: int) -> list[tuple[float, float]]:
    """(copy, blocked) seconds of every save; the first of each goes into new memory."""
    copy: dict[str, Tensor] = {}

    def copy_state() -> None:
        for key, tensor in state.items():
            if key in copy:
                copy[key].copy_(tensor)
            else:
                copy[key] = tensor.clone()

    options = {"extra": {}, "keep_latest_k": 1}
    saver.start(folder, 1, {"x": torch.zeros(1)}, **options)  # a new process takes seconds to come up
    saver.wait()
    times = []
    for step in range(2, rounds + 3):
        times.append((seconds(copy_state), seconds(saver.start, folder, step, state, **options)))
        saver.wait()
    shutil.rmtree(folder / f"step-{step}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--dim", type=int, default=2048, help="rows and columns of a weight")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write, and delete again (default: a temporary folder)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    state = build_state(int(args.gib * 2**30), args.dim, DTYPES[args.dtype])
    n_bytes = sum(tensor.nbytes for tensor in state.values())
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        print(f"{len(state)} tensors, {n_bytes / 2**30:.2f} GiB, best of {args.rounds}")
        print(f"{'':<8}{'plain GB/s':>12}{'titanlite GB/s':>16}{'speed':>8}{'target':>8}")
        for name, pairs in measure_speed(folder, state, args.rounds).items():
            plain, ours = (n_bytes / min(times) / 1e9 for times in zip(*pairs))
            speed = statistics.median(plain / ours for plain, ours in pairs)
            print(f"{name:<8}{plain:>12.2f}{ours:>16.2f}{speed:>8.2f}{SPEED_TARGET:>8}", flush=True)
        print(f"{'blocks':<24}{'copy ms':>10}{'save ms':>10}{'more':>8}{'target':>8}")
        for kind in (ThreadSaver, ProcessSaver):
            saver = kind(None)
            saver.reserve(state)  # as a run does at its start
            (first, *later) = measure_blocking(folder, state, saver, args.rounds)
            saver.close()
            for when, pairs in (("first", [first]), ("later", later)):
                copy, blocked = (1000 * min(times) for times in zip(*pairs))
                print(f"{kind.__name__ + ', ' + when:<24}{copy:>10.0f}{blocked:>10.0f}{blocked - copy:>8.0f}{BLOCKING_TARGET_MS:>8}", flush=True)


if __name__ == "__main__":
    main()
