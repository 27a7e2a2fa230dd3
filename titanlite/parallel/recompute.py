"""Activation checkpointing (arXiv 1604.06174): what a block keeps for backward, and what it computes again."""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Dear to compute again: matrix products, attention, communication. Everything else is elementwise.
_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def recomputed(forward: Callable) -> Callable:
    """`forward`, keeping its inputs only."""
    return partial(checkpoint, forward, use_reentrant=False)


def recomputed_by_operator(forward: Callable) -> Callable:
    """`forward`, keeping the results of dear operators."""
    return partial(checkpoint, forward, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _policy))


def _policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE
