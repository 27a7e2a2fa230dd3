"""The policy's loss on packed rows, under any layout: what `algorithms` says of tokens, summed by the trainer's own step.

A row holds samples one after another, each a segment of its own: `documents` numbers them, labels of what was not sampled are IGNORE.
"""

from collections.abc import Callable

import torch
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
from titanlite.rl.metrics import Figures

POLICY_FIGURES = {  # means and maxima over labels
    "means": (
        "entropy", "ratio", "clip_fraction", "clip_low_fraction", "clip_high_fraction", "kl_old", "kl_rollout", "kl_reference", "logprob_gap",
        "corrected_fraction", "masked_fraction",
    ),
    "maxima": ("ratio_max", "logprob_gap_max"),
}  # fmt: skip


def build_policy_loss(cfg: RL, mesh: Mesh, figures: Figures) -> Callable[[Tensor, Batch], Tensor]:
    """`loss_fn(logits, batch)` for the trainer's step; what it sees on the way is added to `figures`."""
    cp = mesh.data["cp"] if mesh.degrees.cp > 1 else None
    sum_over_ranks = (lambda sums: sums) if cp is None else (lambda sums: added_up(sums, cp))  # ranks hold parts of samples
    clips = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}

    def loss_fn(logits: Tensor, batch: Batch) -> Tensor:
        logprobs, entropies = label_logprobs(logits, batch.labels, cfg.temperature)
        here = batch.labels != IGNORE
        logprobs, entropies = logprobs[here], entropies[here]
        weight, length, advantage, old, rollout, reference, *_ = batch.signals[here].to(logprobs.dtype).unbind(-1)
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
        mask = torch.ones_like(losses)
        if cfg.off_policy_kl is not None:
            mask = off_policy_mask(logprobs, rollout, advantage, **samples, most_kl=cfg.off_policy_kl)
            losses = losses * mask
        if cfg.kl_loss != "none":
            losses = losses + cfg.kl_coef * kl_loss(logprobs, reference, cfg.kl_loss, old=old)
        if cfg.entropy_coef:
            losses = losses - cfg.entropy_coef * entropies

        low, high = ratio < 1 - cfg.clip_low, ratio > 1 + cfg.clip_high
        clipped = low | high
        if cfg.policy_loss in ("ppo", "gspo", "gspo_token"):
            low, high, clipped = low & (advantage < 0), high & (advantage > 0), is_clipped(ratio, advantage, **clips, dual_clip=cfg.dual_clip)
        elif cfg.policy_loss == "reinforce":
            low = high = clipped = torch.zeros_like(clipped)
        gap = (old - rollout).abs()
        figures.add(
            len(logprobs),
            entropy=entropies,
            ratio=ratio,
            clip_fraction=clipped,
            clip_low_fraction=low,
            clip_high_fraction=high,
            kl_old=kl_estimate(logprobs, old, "k3"),
            kl_rollout=kl_estimate(old, rollout, "k3"),
            kl_reference=kl_estimate(logprobs, reference, "k3") if uses_reference(cfg) else torch.zeros_like(ratio),
            logprob_gap=gap,
            corrected_fraction={"none": torch.zeros_like(mask), "truncate": correction >= cfg.rollout_high, "mask": correction == 0}[cfg.rollout_correction],
            masked_fraction=1 - mask,
            ratio_max=ratio,
            logprob_gap_max=gap,
        )
        return (weight * losses).sum()

    return loss_fn


def uses_reference(cfg: RL) -> bool:
    return cfg.kl_loss != "none" or cfg.kl_reward != "none"
