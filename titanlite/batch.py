"""What travels from the data to the model: one microbatch of packed rows."""

from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100  # a label that is not trained on


class Batch(NamedTuple):
    """One microbatch. A row holds segments of documents, one after another; no attention goes from one segment to another.

    tokens    [B, S] int64
    labels    [B, S] int64, the token that follows, or IGNORE
    positions [B, S] int64, counted from the start of the segment in this row
    documents [B, S] int64, the segment's number within its row; None where every row is one segment,
              which lets attention take the plain causal kernel
    ahead     [B, S, K, 2] int64, where tokens further ahead are predicted: the token that stands k places on in the same
              segment and its label, k from 1 to K, or IGNORE and IGNORE; see `with_ahead`
    signals   [B, S, ...] what a loss knows of each label besides; see `titanlite.rl.signals`
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    ahead: Tensor | None = None
    signals: Tensor | None = None


def with_ahead(batch: Batch, depth: int) -> Batch:
    """`batch`, whole rows of it, with `ahead` of so many tokens; with none the batch itself."""
    if depth == 0:
        return batch
    documents = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents
    pairs = torch.stack([batch.tokens, batch.labels], -1)
    ahead = torch.full((*batch.tokens.shape, depth, 2), IGNORE, device=batch.tokens.device)
    for k in range(1, min(depth, batch.tokens.shape[1] - 1) + 1):
        same = documents[:, k:] == documents[:, :-k]
        ahead[:, :-k, k - 1] = torch.where(same[..., None], pairs[:, k:], IGNORE)
    return batch._replace(ahead=ahead)
