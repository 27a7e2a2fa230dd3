"""Optimizer, learning-rate schedule, and the global gradient norm."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config import LRScheduler, Optimizer


def build_optimizer(parts: list[nn.Module], cfg: Optimizer) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) over all parameters of the parts that are trained."""
    parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        parameters,
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        fused=cfg.implementation == "fused",
        foreach=cfg.implementation == "foreach",
    )


def lr_factor(step: int, cfg: LRScheduler, steps: int) -> float:
    """The share of optimizer.lr used by step 1, 2, ...: linear warm-up, stable, decay to min_lr_factor at the end.

    A pure function of the step, so a resume cannot bring back a stale rate. Warmup-stable-decay: arXiv 2404.06395.
    """
    total = cfg.total_steps or steps
    warmup = min(cfg.warmup_steps, total)
    if step <= warmup:
        return step / max(warmup, 1)
    decay = total - warmup if cfg.decay_ratio is None else min(round(total * cfg.decay_ratio), total - warmup)
    done = min(max(step - (total - decay), 0) / decay, 1.0) if decay else 0.0
    shape = {"linear": 1 - done, "sqrt": 1 - math.sqrt(done), "cosine": (1 + math.cos(math.pi * done)) / 2}
    return cfg.min_lr_factor + (1 - cfg.min_lr_factor) * shape[cfg.decay_type]


def finish_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Gives every gradient its parameter's placements: under tensor parallel without FSDP those of norms are partial sums."""
    for p in parameters:
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients; views, so that scaling them scales the gradients."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in grads]


def local_square_sum(parameters: Iterable[nn.Parameter], stage_size: int) -> Tensor:
    """This rank's share, fp64 scalar: summed over the world it is the square of the global gradient norm.

    A shard that several of the `stage_size` ranks of a pipeline stage hold alike counts once: each gives its share of it.
    """
    by_holders: dict[int, list[Tensor]] = {}
    device = None
    for p in parameters:
        if p.grad is None:
            continue
        grad, shards = p.grad, 1
        if isinstance(grad, DTensor):
            # Not is_shard(): it is false for the strided shards of FSDP over tensor parallel.
            shards = math.prod(n for n, place in zip(grad.device_mesh.shape, grad.placements) if not place.is_replicate())
            grad = grad.to_local()
        device = grad.device
        by_holders.setdefault(stage_size // shards, []).append(grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for holders, grads in by_holders.items():
        dtype = torch.promote_types(grads[0].dtype, torch.float32)
        norms = torch._foreach_norm(grads, 2, dtype=dtype)
        total += torch.stack(norms).double().square().sum() / holders
    return total
