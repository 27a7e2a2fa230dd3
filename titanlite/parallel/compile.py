"""Recompute and `torch.compile` of each block: one step, because their order depends."""

import torch
from torch import nn

from titanlite.config import ActivationCheckpoint, Compile
from titanlite.parallel.plan import ParallelPlan, matching
from titanlite.parallel.recompute import recomputed, recomputed_by_operator
from titanlite.utils import logger


def apply_recompute_and_compile(part: nn.Module, plan: ParallelPlan, ac: ActivationCheckpoint, cfg: Compile) -> None:
    """Replaces each block's forward. Recompute by operator lies inside the compiled region, full recompute outside it."""
    by_operator = ac.mode == "selective" and ac.selective_ac_option == "op"
    every = 1 if ac.mode == "full" else int(ac.selective_ac_option) if ac.mode == "selective" and not by_operator else 0
    compiled = cfg.enable and "model" in cfg.components
    for name, block in plan.blocks_of(part).items():
        if by_operator:
            _recompute_by_operator(block, set(matching(part, plan.experts).values()))
        forward = block.forward
        if compiled:
            forward = torch.compile(forward, backend=cfg.backend, fullgraph=not plan.experts)
        if every and int(name.rsplit(".", 1)[-1]) % every == 0:
            forward = recomputed(forward)
        block.forward = forward
    if compiled or by_operator or every:
        logger.info(f"recompute={'op' if by_operator else f'every {every}' if every else 'none'} compile={compiled}")


def _recompute_by_operator(module: nn.Module, experts: set[nn.Module]) -> None:
    """Of a module around experts, each piece by itself: these gather and drop their weights, which must not happen twice."""
    if module in experts:
        module.compute = recomputed_by_operator(module.compute)
    elif experts.isdisjoint(module.modules()):
        module.forward = recomputed_by_operator(module.forward)
    else:
        for child in module.children():
            if child in experts or list(child.children()):
                _recompute_by_operator(child, experts)
