"""Builds single ranks of a large run in one CPU process, and takes them through a forward and backward pass with fake tensors.

    python benchmarks/scale.py train_configs/llama3_405b.toml --world 16384 --ranks 0 8191 16383 \\
        --parallelism.pipeline_parallel_degree 16 ...

The process group is PyTorch's fake one, whose collectives return at once; tensors have shapes and no data. A line a rank: its stage,
seconds to build (validate, mesh, model, parallelize) and for the pass, what its parameters hold, and the local shapes of some.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.batch import Batch
from titanlite.config import Config, load_config, override
from titanlite.losses import cross_entropy
from titanlite.models import get_model, get_plan
from titanlite.parallel import expert
from titanlite.parallel.context import local_batch
from titanlite.parallel.forward_backward import build_forward_backward
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.parallelize import allocate, parallelize
from titanlite.validate import global_batch_size, validate


@contextlib.contextmanager
def fake_rank(cfg: Config, world_size: int, rank: int) -> Iterator[tuple[list[nn.Module], Mesh]]:
    """This rank's parts, on meta, and its mesh, in a world of which nothing else exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        mesh = build_mesh(validate(cfg, world_size), torch.device("cpu"), experts=bool(get_plan(cfg.model).experts))
        model = get_model(cfg.model, getattr(torch, cfg.training.dtype))
        yield parallelize(model, mesh, get_plan(cfg.model), cfg), mesh
    finally:
        dist.destroy_process_group()


def fake_step(parts: list[nn.Module], mesh: Mesh, cfg: Config) -> None:
    """Forward and backward of a step's microbatches; every parameter has a gradient afterwards."""
    with FakeTensorMode(allow_non_fake_inputs=True), _without_a_vote(), _with_even_loads():
        for part in parts:
            allocate(part, get_plan(cfg.model), mesh.device)
        shape = (cfg.training.local_batch_size, cfg.training.seq_len)
        ids = torch.zeros(shape, dtype=torch.int64)
        batch = local_batch(Batch(ids, ids, ids, None), mesh, cfg.parallelism)
        microbatches = [batch] * (global_batch_size(cfg, mesh.degrees) // (mesh.degrees.batch * shape[0]))
        step = build_forward_backward(parts, mesh, cfg.parallelism)
        step(microbatches, cross_entropy, torch.ones((), dtype=torch.float64))
    assert all(p.grad is not None for part in parts for p in part.parameters())


def _without_a_vote() -> contextlib.AbstractContextManager:
    """Pipeline ranks vote on whether shapes are given, by a message with data in it; here they are."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import InferenceMode

    def warm_up(self: object, stages: list, *_: object) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    return mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", warm_up)


def _with_even_loads() -> contextlib.AbstractContextManager:
    """How many rows go to each rank of ep is in the data, and a fake rank has none."""

    def splits(counts_RX: torch.Tensor, n_rows: int) -> list[int]:
        ranks = len(counts_RX)
        return [n_rows // ranks + (i < n_rows % ranks) for i in range(ranks)]

    return mock.patch.object(expert, "_splits", splits)


def measure(cfg: Config, world_size: int, rank: int, with_step: bool = True) -> dict[str, Any]:
    """What one rank of the run is, holds and takes to build and to step."""
    began = time.perf_counter()
    with fake_rank(cfg, world_size, rank) as (parts, mesh):
        build_s = time.perf_counter() - began
        shapes = {
            name: list((p.to_local() if isinstance(p, DTensor) else p).shape) for part in parts for name, p in part.named_parameters()
        }
        if with_step:
            fake_step(parts, mesh, cfg)
        return {
            "rank": rank,
            "stages": [part.pipeline_stage.index for part in parts] if mesh.degrees.pp > 1 else [0],
            "build_s": round(build_s, 2),
            "step_s": round(time.perf_counter() - began - build_s, 2) if with_step else None,
            "parameters": sum(torch.Size(shape).numel() for shape in shapes.values()),
            "shapes": shapes,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0])
    args, overrides = parser.parse_known_args()
    cfg = override(load_config(args.config, overrides)[0], {"compile.enable": False})  # fake tensors cannot be compiled
    # A process a rank: DTensor remembers the meshes of a world that is gone.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for record in pool.imap(functools.partial(measure, cfg, args.world), args.ranks, chunksize=1):
            shapes = record.pop("shapes")
            print(json.dumps(record), flush=True)
            for name in [*list(shapes)[:4], *list(shapes)[-2:]]:
                print(f"  {name} {shapes[name]}")


if __name__ == "__main__":
    main()
