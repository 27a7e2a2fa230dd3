"""The policy's loss on packed rows, under any layout: what `algorithms` says of tokens, summed by the trainer's own step.

A row holds samples one after another, each a segment of its own: `documents` numbers them, labels of what was not sampled are IGNORE.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.batch import IGNORE, Batch
from titanlite.config import RL
from titanlite.losses import label_logprobs
from titanlite.parallel.collective import added_up
from titanlite.parallel.mesh import Mesh
from titanlite.rl.algorithms import (
    cispo_loss,
    is_clipped,
    kl_estimate,
    kl_loss,
    log_ratio,
    off_policy_mask,
    ppo_loss,
    reinforce_loss,
    rollout_weights,
    sequence_ratio,
)

# What `Batch.signals` [B, S, 6] holds of each label, in fp32 at least: how much it counts, once the step's sum is divided by its number of
# labels; how many labels its sample has; the rest as in `algorithms`. `old` is NaN in a step's first update: there it is the policy itself.
SIGNALS = ("weight", "length", "advantage", "old", "rollout", "reference")


def stack_signals(**signals: Tensor) -> Tensor:
    """[B, S, 6] of tensors [B, S]; one that is not given is 0."""
    like = signals["weight"]
    return torch.stack([signals.get(name, torch.zeros_like(like)) for name in SIGNALS], -1)


@dataclass
class Figures:
    """Sums over a step's labels on this rank, and how many labels: `means` brings the ranks together."""

    sums: dict[str, Tensor]
    count: Tensor

    @staticmethod
    def empty(device: torch.device) -> "Figures":
        return Figures({}, torch.zeros((), dtype=torch.float64, device=device))

    def means(self) -> dict[str, float]:
        """Over the labels of all ranks, and starts anew. Collective: every rank must have seen something."""
        names = sorted(self.sums)
        totals = torch.stack([*(self.sums[name] for name in names), self.count])
        dist.all_reduce(totals)
        self.sums.clear()
        self.count.zero_()
        *sums, count = totals.tolist()
        return {name: value / max(count, 1) for name, value in zip(names, sums)}

    def add(self, count: int, **values: Tensor) -> None:
        self.count += count
        for name, value in values.items():
            total = value.detach().sum(dtype=torch.float64)
            self.sums[name] = self.sums[name] + total if name in self.sums else total


def build_policy_loss(cfg: RL, mesh: Mesh, figures: Figures) -> Callable[[Tensor, Batch], Tensor]:
    """`loss_fn(logits, batch)` for the trainer's step; what it sees on the way is added to `figures`."""
    cp = mesh.data["cp"] if mesh.degrees.cp > 1 else None
    sum_over_ranks = (lambda sums: sums) if cp is None else (lambda sums: added_up(sums, cp))  # ranks hold parts of samples
    clips = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}

    def loss_fn(logits: Tensor, batch: Batch) -> Tensor:
        logprobs, entropies = label_logprobs(logits, batch.labels, cfg.temperature)
        here = batch.labels != IGNORE
        logprobs, entropies = logprobs[here], entropies[here]
        weight, length, advantage, old, rollout, reference = batch.signals[here].to(logprobs.dtype).unbind(-1)
        rows, S = batch.labels.shape
        S *= 1 if cp is None else cp.size()
        of = (torch.arange(rows, device=here.device)[:, None] * S + batch.documents)[here]  # a number for each sample, alike on all ranks of cp
        lengths = torch.zeros(rows * S, dtype=length.dtype, device=here.device).scatter(0, of, length)
        samples = {"sequences": of, "lengths": lengths, "sum_over_ranks": sum_over_ranks}

        old = torch.where(old.isnan(), logprobs.detach(), old)  # nothing has moved since the samples were drawn

        ratio = log_ratio(logprobs, old).exp()
        if cfg.policy_loss in ("gspo", "gspo_token"):
            ratio = sequence_ratio(logprobs, old, **samples, form="token" if cfg.policy_loss == "gspo_token" else "sequence")
        if cfg.policy_loss == "cispo":
            losses = cispo_loss(logprobs, ratio, advantage, **clips)
        elif cfg.policy_loss == "reinforce":
            losses = reinforce_loss(logprobs, advantage)
        else:
            losses = ppo_loss(ratio, advantage, **clips, dual_clip=cfg.dual_clip)
        bounds = {"low": cfg.rollout_low, "high": cfg.rollout_high}
        correction = rollout_weights(old, rollout, cfg.rollout_correction, **bounds, **(samples if cfg.rollout_correction_of == "sequence" else {}))
        losses = losses * correction
        if cfg.off_policy_kl is not None:
            losses = losses * off_policy_mask(logprobs, rollout, advantage, **samples, most_kl=cfg.off_policy_kl)
        if cfg.kl_loss != "none":
            losses = losses + cfg.kl_coef * kl_loss(logprobs, reference, cfg.kl_loss, old=old)
        if cfg.entropy_coef:
            losses = losses - cfg.entropy_coef * entropies

        figures.add(
            len(logprobs),
            entropy=entropies,
            ratio=ratio,
            clip_fraction=is_clipped(ratio, advantage, **clips, dual_clip=cfg.dual_clip),
            kl_old=kl_estimate(logprobs, old, "k3"),
            kl_rollout=kl_estimate(old, rollout, "k3"),
            kl_reference=kl_estimate(logprobs, reference, "k3") if cfg.kl_loss != "none" else torch.zeros_like(ratio),
            corrected_fraction=correction != log_ratio(old, rollout).exp(),
        )
        return (weight * losses).sum()

    return loss_fn
