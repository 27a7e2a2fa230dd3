"""Runs a function on N gloo ranks forked from this process, which has only imported torch (0.2 to 3 s a call)."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(fn: Callable, world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """[fn(*args) of rank 0, rank 1, ...], which must be plain data or numpy (a tensor's memory dies with its sender).

    Raises AssertionError with the traceback of the first rank that fails.
    """
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank_main, args=(results, fn, rank, world_size, folder, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            done: dict[int, Any] = {}
            while len(done) < world_size:
                rank, failure, value = results.get(timeout=timeout_s)
                assert failure is None, f"rank {rank} of {world_size}:\n{failure}"
                done[rank] = value
        finally:
            for process in ranks:
                process.join(0 if len(done) < world_size else 10)
                if process.is_alive():
                    process.kill()
    return [done[rank] for rank in range(world_size)]


def _rank_main(results: Any, fn: Callable, rank: int, world_size: int, folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        value, failure = fn(*args), None
    except BaseException:
        value, failure = None, traceback.format_exc()
    results.put((rank, failure, value))
    results.close()
    results.join_thread()
    os._exit(0)  # no teardown: a rank that failed leaves the others inside a collective

