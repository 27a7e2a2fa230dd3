"""What travels with each label of a batch: see `Batch.signals`."""

import torch
from torch import Tensor

from titanlite.batch import Batch

# What `Batch.signals` [B, S, 8] holds of each label, in fp32 at least: how much it counts, once the step's sum is divided by its number of
# labels; how many labels its sample has; the rest as in `algorithms`, `value` and `returns` being what a critic foretold before the step and
# should have. `old` is NaN in a step's first update: there it is the policy itself.
SIGNALS = ("weight", "length", "advantage", "old", "rollout", "reference", "value", "returns")


def stack_signals(**signals: Tensor) -> Tensor:
    """[B, S, 8] of tensors [B, S]; one that is not given is 0."""
    like = signals["weight"]
    return torch.stack([signals.get(name, torch.zeros_like(like)) for name in SIGNALS], -1)


def with_signals(batch: Batch, **signals: Tensor) -> Batch:
    """`batch` with these of its signals [B, S] replaced."""
    stacked = batch.signals.clone()
    for name, values in signals.items():
        stacked[..., SIGNALS.index(name)] = values
    return batch._replace(signals=stacked)
