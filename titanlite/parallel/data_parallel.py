"""Data parallel by FSDP2: replicate, ZeRO-1 to 3 and HSDP are one call with other meshes and policies; also mixed precision."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from titanlite.config import Parallelism, Training
from titanlite.parallel.degrees import Degrees, divisors
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.plan import ParallelPlan, is_tied, matching
from titanlite.utils import logger


def apply_data_parallel(part: nn.Module, mesh: Mesh, plan: ParallelPlan, cfg: Parallelism, training: Training) -> None:
    """Shards or replicates blocks, then what surrounds them, then the root. Gradients are sums over ranks, never means.

    ZeRO (arXiv 1910.02054) by policies: zero3 drops gathered parameters after each block, zero2 keeps them through the
    step, zero1 also keeps whole gradients until the last microbatch (`set_step_policy`).

    One rank alone is not wrapped: `computing` gives it FSDP2's mixed precision, bit for bit, without the copies that cost
    FSDP2 40 % of a small step.
    """
    degrees = mesh.degrees
    mixed = training.mixed_precision_param != training.dtype
    if mesh.world_size == 1 and not training.enable_cpu_offload:
        part.compute_dtype = getattr(torch, training.mixed_precision_param) if mixed else None
        return
    shards_experts = bool(plan.experts) and degrees.efsdp > 1
    if degrees.dp_replicate * degrees.fsdp == 1 and not shards_experts and not mixed and not training.enable_cpu_offload:
        return

    experts = matching(part, plan.experts)
    _warn_of_padding(part, degrees, experts)
    options = {
        "mesh": mesh.dense["dp_replicate", "fsdp"] if degrees.dp_replicate > 1 else mesh.dense["fsdp"],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=None if training.dtype == "float64" else getattr(torch, training.mixed_precision_reduce),
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu")
        if training.enable_cpu_offload
        else OffloadPolicy(),
    }
    reshard = cfg.fsdp_reshard_after_forward == "always" or cfg.fsdp_reshard_after_forward == "default" and degrees.pp == 1
    reshard &= degrees.fsdp > 1 and cfg.data_parallel_sharding == "zero3"
    for module in experts.values():
        expert_mesh = mesh.sparse["dp_replicate", "efsdp"] if degrees.dp_replicate > 1 else mesh.sparse["efsdp"]
        by_width = degrees.efsdp > next(module.parameters()).shape[0] // degrees.ep  # more ranks than experts
        fully_shard(
            module,
            reshard_after_forward=reshard and degrees.efsdp > 1,
            shard_placement_fn=(lambda p: Shard(1)) if by_width else None,
            **options | {"mesh": expert_mesh},
        )
    for block in plan.blocks_of(part).values():
        fully_shard(block, reshard_after_forward=reshard, **options)

    first, last = plan.first_of(part), plan.last_of(part)
    # Backward needs the last modules at once, so they stay gathered; tied parameters must lie in one group.
    groups = [(first, reshard), (last, reshard and cfg.fsdp_reshard_after_forward == "always")]
    if any(is_tied(part, *pair) for pair in plan.tied):
        groups = [(first + last, False)]
    for modules, reshard_group in groups:
        if modules:
            fully_shard(modules, reshard_after_forward=reshard_group, **options)
    fully_shard(part, reshard_after_forward=reshard, **options)

    for module in fsdp_modules(part):
        module.set_gradient_divide_factor(1.0)  # the loss is already divided by the global token count
        shards = degrees.efsdp if module in experts.values() else degrees.fsdp
        if mesh.device.type == "cpu" and degrees.dp_replicate * shards > 1:
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    logger.info(f"data_parallel replicate={degrees.dp_replicate} shard={degrees.fsdp} {cfg.data_parallel_sharding} param={training.mixed_precision_param}")


MOST_PADDING = 1.1


def padding_of(shapes: Sequence[torch.Size], fsdp: int) -> float:
    """Elements that gathered parameters take over those they have, each cut along its first dimension into `fsdp` equal pieces."""
    padded = sum(-(-shape[0] // fsdp) * fsdp * shape[1:].numel() for shape in shapes)
    return padded / sum(shape.numel() for shape in shapes)


def _warn_of_padding(part: nn.Module, degrees: Degrees, experts: dict[str, nn.Module]) -> None:
    """Says where there are so many shards that padding inflates every all-gather, and which HSDP split cures it."""
    own_mesh = {p for module in experts.values() for p in module.parameters()}
    shapes = [(p.to_local() if isinstance(p, DTensor) else p).shape for p in part.parameters() if p not in own_mesh]
    if not shapes or padding_of(shapes, degrees.fsdp) <= MOST_PADDING:
        return
    fitting = [shard for shard in divisors(degrees.dp_shard) if padding_of(shapes, shard * degrees.cp) <= MOST_PADDING]
    cure = "a smaller parallelism.context_parallel_degree"
    if fitting:
        replicas = degrees.batch // fitting[-1]
        cure = f"parallelism.data_parallel_shard_degree={fitting[-1]} and parallelism.data_parallel_replicate_degree={replicas}"
    logger.warning(
        f"padding={padding_of(shapes, degrees.fsdp):.2f}: over {degrees.fsdp} ranks an all-gather moves that many times what parameters "
        f"hold, since their first dimension is shorter or does not divide; {cure} cures it"
    )


def set_step_policy(modules: list[FSDPModule], mesh: Mesh, cfg: Parallelism, *, is_last: bool) -> None:
    """What the next backward does with gradients and gathered parameters, by whether it is the step's last."""
    keeps_gradients = mesh.degrees.fsdp == 1 or cfg.data_parallel_sharding == "zero1"
    keeps_parameters = cfg.data_parallel_sharding != "zero3"
    for module in modules:
        module.set_requires_gradient_sync(is_last or not keeps_gradients, recurse=False)
        module.set_requires_all_reduce(is_last, recurse=False)  # between replicas: once a step
        module.set_reshard_after_backward(is_last or not keeps_parameters, recurse=False)


@contextlib.contextmanager
def computing(part: nn.Module) -> Iterator[None]:
    """Inside, one rank's part holds copies of its parameters in its compute dtype; tied ones share a copy.

    Backward adds the gradients to the parameters themselves. It must lie inside too: recompute reads the copies again.
    """
    dtype = getattr(part, "compute_dtype", None)
    own = [(m._parameters, name, p) for m in part.modules() for name, p in m._parameters.items() if p is not None] if dtype else []
    copies = {p: p.to(dtype) for _, _, p in own}
    try:
        for slots, name, p in own:
            slots[name] = copies[p]
        yield
    finally:
        for slots, name, p in own:
            slots[name] = p


def fsdp_modules(part: nn.Module) -> list[FSDPModule]:
    return [m for m in part.modules() if isinstance(m, FSDPModule)]
