"""What metrics say of a step of reinforcement."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.rl.rollouts import Rollout


@dataclass
class Figures:
    """Sums and maxima over a step's labels on this rank, and how many labels: `take` brings the ranks together."""

    sums: dict[str, Tensor]
    highest: dict[str, Tensor]
    count: Tensor

    @staticmethod
    def empty(device: torch.device, *, means: Sequence[str], maxima: Sequence[str] = ()) -> "Figures":
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return Figures({name: zero.clone() for name in means}, {name: zero - math.inf for name in maxima}, zero)

    def add(self, count: int, **values: Tensor) -> None:
        """Of so many labels; every figure's values."""
        assert values.keys() == self.sums.keys() | self.highest.keys(), values.keys() ^ (self.sums.keys() | self.highest.keys())
        self.count += count
        for name, value in values.items():
            value = value.detach().double()
            if name in self.sums:
                self.sums[name] += value.sum()
            elif count:
                self.highest[name].clamp_(min=value.max())

    def take(self) -> dict[str, float]:
        """Means and maxima over the labels of all ranks, and starts anew. Collective; a rank may have seen none."""
        totals = torch.stack([*self.sums.values(), self.count])
        dist.all_reduce(totals)
        *sums, count = totals.tolist()
        found = {name: value / max(count, 1) for name, value in zip(self.sums, sums)}
        if self.highest:
            highest = torch.stack([*self.highest.values()])
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            found |= dict(zip(self.highest, highest.tolist()))
        for total in (*self.sums.values(), self.count):
            total.zero_()
        for one in self.highest.values():
            one.fill_(-math.inf)
        return found


def of_rollouts(rollouts: list[Rollout], counts: dict[str, int], generate_s: float) -> dict[str, float]:
    """Of a step's samples, those of groups that were dropped included; `counts` of groups, by what became of them."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts if rollout.reward is not None], dtype=torch.float64)
    lengths = torch.tensor([float(rollout.n_drawn) for rollout in rollouts], dtype=torch.float64)
    told = {
        "reward": rewards.mean().item() if len(rewards) else math.nan,
        "reward_std": rewards.std(correction=0).item() if len(rewards) else math.nan,
        "failed_rewards": sum(rollout.reward is None for rollout in rollouts),
        **{f"groups_{name}": count for name, count in counts.items()},
        "sample_tokens": lengths.mean().item(),
        "sample_tokens_min": lengths.min().item(),
        "sample_tokens_max": lengths.max().item(),
        "cut_fraction": sum(not rollout.ended for rollout in rollouts) / len(rollouts),
        "generated_tokens_per_s": lengths.sum().item() / generate_s,
    }
    for reason, n in Counter(rollout.failure.partition(":")[0] for rollout in rollouts if rollout.failure).items():
        told[f"failed_rewards_{reason}"] = n
    for source in sorted({rollout.source for rollout in rollouts}):
        of = [rollout.reward for rollout in rollouts if rollout.source == source and rollout.reward is not None]
        told[f"reward_{source}"] = sum(of) / len(of) if of else math.nan
    return told
