"""Losses as sums over labels: the step divides by the global count of labels, so any padding or packing is right."""

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.batch import IGNORE, Batch


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """logits [B, S, V] -> next-token loss in nats, summed over labels that are not IGNORE, fp32 (fp64 for fp64 logits)."""
    logits = logits.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")
