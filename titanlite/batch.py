"""What travels from the data to the model: one microbatch of packed rows."""

from typing import NamedTuple

from torch import Tensor

IGNORE = -100  # a label that is not trained on


class Batch(NamedTuple):
    """One microbatch. A row holds segments of documents, one after another; no attention goes from one segment to another.

    tokens    [B, S] int64
    labels    [B, S] int64, the token that follows, or IGNORE
    positions [B, S] int64, counted from the start of the segment in this row
    documents [B, S] int64, the segment's number within its row; None where every row is one segment,
              which lets attention take the plain causal kernel
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
