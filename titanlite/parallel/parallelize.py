"""The one function that makes a plain model parallel, and the start of its weights."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanlite.config import Config
from titanlite.parallel.compile import apply_recompute_and_compile
from titanlite.parallel.context import apply_cp
from titanlite.parallel.data_parallel import apply_data_parallel
from titanlite.parallel.expert import apply_ep
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.pipeline import apply_pp, copies
from titanlite.parallel.plan import ParallelPlan, check_plan, is_tied, matching, tie
from titanlite.parallel.tensor import apply_tp


def parallelize(model: nn.Module, mesh: Mesh, plan: ParallelPlan, config: Config) -> list[nn.Module]:
    """Applies every pass to a model on meta, in the one order that composes.

    Returns this rank's pipeline stages (one without pipeline parallel), still on meta: `materialize` gives them storage.
    """
    check_plan(model, plan)
    parts = apply_pp(model, mesh, plan, config.parallelism, config.training)
    for part in parts:
        apply_tp(part, mesh, plan, config.parallelism)
        apply_ep(part, mesh, plan, config.parallelism)
        apply_cp(part, mesh, plan, config.parallelism)
        apply_recompute_and_compile(part, plan, config.activation_checkpoint, config.compile)
        apply_data_parallel(part, mesh, plan, config.parallelism, config.training)
    return parts


def materialize(parts: list[nn.Module], mesh: Mesh, plan: ParallelPlan, config: Config) -> None:
    """Gives the parts storage and their initial weights, which depend on (seed, parameter name) only.

    Each parameter, of experts each one's, is made whole in fp32 and cut to this rank's shard, so every layout starts bit-equal
    on one kind of device and the largest temporary is one parameter.
    """
    canonical = copies(parts)
    for part in parts:
        allocate(part, plan, torch.device("cpu") if config.training.enable_cpu_offload else mesh.device)
        experts = {f"{module}.{name}" for module, m in matching(part, plan.experts).items() for name, _ in m.named_parameters()}
        for name, parameter in part.named_parameters():
            origin = canonical.get(name, name)  # a tied parameter's copy in another stage starts as it does

            def fill(full: Tensor, label: str = origin, part: nn.Module = part, name: str = origin) -> Tensor:
                part.init_parameter(name, full, _generator(config.debug.seed, label, mesh.device))
                return full

            with torch.no_grad():
                if name in experts:
                    _fill_experts(parameter, fill, origin, mesh.device)
                else:
                    _fill(parameter, fill(torch.empty(parameter.shape, dtype=torch.float32, device=mesh.device)))


def _fill(parameter: Tensor, full: Tensor) -> None:
    if isinstance(parameter, DTensor):
        # Every rank holds the same `full`: cut, don't communicate (DTensor's own random draws repeat on CPU).
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(full.to_local())
    else:
        parameter.copy_(full)


def _fill_experts(parameter: Tensor, fill: Callable[..., Tensor], name: str, device: torch.device) -> None:
    """Of the experts that this rank holds, or holds a part of, one after the other."""
    local, starts = parameter, (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        _, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        local = parameter.to_local()
    part = tuple(slice(start, start + size) for start, size in zip(starts[1:], local.shape[1:]))
    for i in range(len(local)):
        full = fill(torch.empty(parameter.shape[1:], dtype=torch.float32, device=device), label=f"{name}.{starts[0] + i}")
        local[i].copy_(full[part])


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
