"""The one function that makes a plain model parallel, and the start of its weights."""

import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titanlite.config import Config
from titanlite.parallel.compile import apply_recompute_and_compile
from titanlite.parallel.context import apply_cp
from titanlite.parallel.data_parallel import apply_data_parallel
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.pipeline import apply_pp, copies
from titanlite.parallel.plan import ParallelPlan, check_plan, is_tied, tie
from titanlite.parallel.tensor import apply_tp


def parallelize(model: nn.Module, mesh: Mesh, plan: ParallelPlan, config: Config) -> list[nn.Module]:
    """Applies every pass to a model on meta, in the one order that composes.

    Returns this rank's pipeline stages (one without pipeline parallel), still on meta: `materialize` gives them storage.
    """
    check_plan(model, plan)
    parts = apply_pp(model, mesh, plan, config.parallelism, config.training)
    for part in parts:
        apply_tp(part, mesh, plan, config.parallelism)
        apply_cp(part, mesh, plan, config.parallelism)
        apply_recompute_and_compile(part, plan, config.activation_checkpoint, config.compile)
        apply_data_parallel(part, mesh, plan, config.parallelism, config.training)
    return parts


def materialize(parts: list[nn.Module], mesh: Mesh, plan: ParallelPlan, config: Config) -> None:
    """Gives the parts storage and their initial weights, which depend on (seed, parameter name) only.

    Each parameter is made whole in fp32 and cut to this rank's shard, so every layout starts bit-equal on one kind of
    device and the largest temporary is one parameter.
    """
    canonical = copies(parts)
    for part in parts:
        allocate(part, plan, torch.device("cpu") if config.training.enable_cpu_offload else mesh.device)
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                full = torch.empty(parameter.shape, dtype=torch.float32, device=mesh.device)
                origin = canonical.get(name, name)  # a tied parameter's copy in another stage starts as it does
                part.init_parameter(origin, full, _generator(config.debug.seed, origin, mesh.device))
                if isinstance(parameter, DTensor):
                    # Every rank holds the same `full`: cut, don't communicate (DTensor's own random draws repeat on CPU).
                    full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
                    parameter.to_local().copy_(full.to_local())
                else:
                    parameter.copy_(full)
                del full  # before the next one is made


def allocate(part: nn.Module, plan: ParallelPlan, device: torch.device) -> None:
    """Storage for a part on meta: buffers with their values, parameters without, tied ones still one."""
    tied = [pair for pair in plan.tied if is_tied(part, *pair)]
    part.to_empty(device=device)
    for pair in tied:  # to_empty made two of one
        tie(part, *pair)
    for module in part.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers(device)


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
