"""Reinforcement learning as pure functions on tensors: advantages, losses, penalties and corrections, each with its paper.

Letters: P prompts, G samples of each, N sequences, T tokens that were sampled, of all sequences one after another. `sequences` [T] says
which sequence a token is of, `lengths` [N] how many tokens it has in the whole step. Losses are a token's, to be minimised; `token_weights`
says what each counts, so that one sum over all microbatches and ranks is the paper's mean.

Names of logprobs: `logprobs` of the policy that is trained, `old` of the one that it is compared with (it before this step's updates),
`rollout` of the generator that drew the tokens, `reference` of one that it should stay near.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MOST_LOG_RATIO = 20.0  # e^20 is beyond every clip, and e^100 would make infinities whose gradients are NaN


# Advantages


def group_advantages(
    rewards_PG: Tensor,
    *,
    baseline: Literal["none", "mean", "leave_one_out"] = "mean",
    deviation: Literal["none", "population", "sample"] = "population",
    eps: float = 1e-6,
) -> Tensor:
    """[P, G] how much better than its group a sample did, over (the group's deviation + eps) if asked.

    none, none           REINFORCE
    mean, population     GRPO (arXiv 2402.03300); some code takes the sample deviation, over G - 1
    mean, none           Dr. GRPO (arXiv 2503.20783)
    leave_one_out, none  RLOO (arXiv 2402.14740): the mean of the others
    A group of one has no other to be compared with: its advantage is 0 (with leave_one_out, and with a sample deviation).
    """
    G, centred = rewards_PG.shape[1], rewards_PG - rewards_PG.mean(1, keepdim=True)
    if baseline == "none":
        centred = rewards_PG
    elif baseline == "leave_one_out":
        centred = centred * (G / max(G - 1, 1))
    if deviation == "none":
        return centred
    spread = rewards_PG.std(1, keepdim=True, correction=0) if deviation == "population" or G == 1 else rewards_PG.std(1, keepdim=True)
    return centred / (spread + eps)


def whitened(values: Tensor, *, eps: float = 1e-8) -> Tensor:
    """`values` of the whole step with mean 0 and population deviation 1.

    REINFORCE++ (arXiv 2501.03262) does this to every token's return; its baseline form to rewards less their group's mean.
    """
    return (values - values.mean()) / (values.std(correction=0) + eps)


def returns(rewards_T: Tensor, lengths: list[int], *, gamma: float = 1.0) -> Tensor:
    """[T] the discounted rewards of a token and of those after it in its sequence."""
    return gae(rewards_T, torch.zeros_like(rewards_T), lengths, gamma=gamma, lam=1.0)[0]


def gae(rewards_T: Tensor, values_T: Tensor, lengths: list[int], *, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """([T] advantages, [T] returns that the critic should have foretold); after a sequence's last token comes nothing (arXiv 1506.02438)."""
    rewards_NL, values_NL = (pad_sequence(x.split(lengths), batch_first=True) for x in (rewards_T, values_T))
    advantages_NL, after, value_after = torch.empty_like(rewards_NL), rewards_NL.new_zeros(len(lengths)), rewards_NL.new_zeros(len(lengths))
    for t in reversed(range(rewards_NL.shape[1])):  # padding is all 0, and comes first
        after = rewards_NL[:, t] + gamma * value_after - values_NL[:, t] + gamma * lam * after
        value_after, advantages_NL[:, t] = values_NL[:, t], after
    advantages = torch.cat([row[:length] for row, length in zip(advantages_NL, lengths)])
    return advantages, advantages + values_T


def tells_apart(rewards_PG: Tensor) -> Tensor:
    """[P] bool: groups with more than one reward, the only ones with a gradient (DAPO's dynamic sampling, arXiv 2503.14476, eq. 11)."""
    return rewards_PG.amax(1) > rewards_PG.amin(1)


def overlong_penalty(lengths: Tensor, *, most_tokens: int, buffer_tokens: int) -> Tensor:
    """[N] added to rewards: falls from 0 to -1 over the last `buffer_tokens` before `most_tokens` (DAPO, arXiv 2503.14476, eq. 13)."""
    return ((most_tokens - buffer_tokens - lengths) / buffer_tokens).clamp(-1, 0)


# What a token counts


def token_weights(
    sequences: Tensor, lengths: Tensor, kind: Literal["token", "sequence", "constant"], *, most_tokens: int = 1, n_sequences: int | None = None
) -> Tensor:
    """[T] weights with which the sum over all tokens of a step is

    token     the mean over tokens (DAPO, arXiv 2503.14476)
    sequence  the mean over sequences of the mean over each one's tokens (GRPO, arXiv 2402.03300)
    constant  the mean over sequences of sums over `most_tokens` (Dr. GRPO, arXiv 2503.20783)

    `lengths` [N] holds all sequences of the step, also those whose tokens are elsewhere; `n_sequences` replaces N where some of them
    are left out of `lengths` but count all the same.
    """
    n = len(lengths) if n_sequences is None else n_sequences
    each = {
        "token": lambda: torch.full_like(lengths, 1.0, dtype=torch.float64) / lengths.sum().clamp(min=1),
        "sequence": lambda: 1.0 / (lengths.double().clamp(min=1) * n),
        "constant": lambda: torch.full_like(lengths, 1.0, dtype=torch.float64) / (n * most_tokens),
    }[kind]()
    return each[sequences]


def sequence_mean(values: Tensor, sequences: Tensor, lengths: Tensor, sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor:
    """[T] the mean of its sequence's values for each token; `sum_over_ranks` adds up, with gradients, where ranks hold parts of sequences."""
    sums = values.new_zeros(len(lengths)).index_add(0, sequences, values)
    return (sum_over_ranks(sums) / lengths.clamp(min=1).to(sums.dtype))[sequences]


# Losses of a token


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """[T] log of the probability ratio, bounded so that its exponential and that one's gradient are finite."""
    return (logprobs - old).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi: its gradient is that of the expected reward where samples are the policy's own (Williams, 1992)."""
    return -advantages * logprobs


def ppo_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> Tensor:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7); clip_high above clip_low is DAPO's clip-higher (arXiv 2503.14476).

    With `dual_clip` c > 1 a token with A < 0 loses at most -c A (arXiv 1912.09729).
    """
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return loss if dual_clip is None else torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Tensor:
    """[T] bool: tokens without a gradient under `ppo_loss`."""
    clipped = torch.where(advantages > 0, ratio > 1 + clip_high, (ratio < 1 - clip_low) & (advantages < 0))
    return clipped if dual_clip is None else clipped | ((advantages < 0) & (ratio > dual_clip))


def sequence_ratio(
    logprobs: Tensor, old: Tensor, sequences: Tensor, lengths: Tensor, *, form: Literal["sequence", "token"] = "sequence",
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:  # fmt: skip
    """GSPO's ratio (arXiv 2507.18071): the geometric mean over a sequence's tokens, eq. 7; for `ppo_loss` with clips of about 3e-4 and 4e-4.

    In token form (eq. 14) its value is the same, and its gradient that of the token's own probability.
    """
    mean = sequence_mean(log_ratio(logprobs, old), sequences, lengths, sum_over_ranks)
    if form == "token":
        mean = mean.detach() + logprobs - logprobs.detach()
    return mean.exp()


def cispo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0) -> Tensor:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): REINFORCE with a clipped weight, so every token keeps a gradient. Bounds 1 -+ clip."""
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """Half the squared error of a critic, whose move from `old_values` earns nothing beyond `clip` (arXiv 2005.12729, appendix)."""
    loss = (values - targets).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - targets).square())
    return loss / 2


# Generator and trainer are not the same


def rollout_weights(
    old: Tensor, rollout: Tensor, kind: Literal["none", "truncate", "mask"], *, low: float = 0.5, high: float = 2.0,
    sequences: Tensor | None = None, lengths: Tensor | None = None, sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:  # fmt: skip
    """[T] what corrects for tokens that `rollout` drew where `old` would have, to multiply losses; no gradient.

    truncate  min(pi_old / pi_rollout, high): truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you
              off-policy RL training", 2025); also the behaviour's weight of decoupled PPO (arXiv 2110.00641), `old` its proximal policy
    mask      the ratio where it lies in [low, high], else 0: IcePop (arXiv 2510.18855)
    With `sequences` and `lengths` the ratio is the geometric mean over a sequence.
    """
    if kind == "none":
        return torch.ones_like(old)
    log = log_ratio(old, rollout).detach()
    if sequences is not None:
        log = sequence_mean(log, sequences, lengths, sum_over_ranks)
    ratio = log.exp()
    return ratio.clamp(max=high) if kind == "truncate" else torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def off_policy_mask(
    logprobs: Tensor, rollout: Tensor, advantages: Tensor, sequences: Tensor, lengths: Tensor, *, most_kl: float,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:  # fmt: skip
    """[T] 0 or 1: leaves out sequences with A < 0 that drifted further than `most_kl` nats a token (DeepSeek-V3.2, arXiv 2512.02556, eq. 9)."""
    drift = sequence_mean((rollout - logprobs).detach(), sequences, lengths, sum_over_ranks)
    return 1.0 - ((advantages < 0) & (drift > most_kl)).to(logprobs.dtype)


# Staying near a reference


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """[T] estimates of KL(pi || reference) at tokens that pi drew (Schulman, "Approximating KL divergence", 2020), as a penalty in the reward.

    k1 = -log r and k3 = r - 1 - log r are unbiased, k2 = (log r)^2 / 2 is not; r = pi_reference / pi.
    """
    log = log_ratio(reference, logprobs)
    return {"k1": lambda: -log, "k2": lambda: log.square() / 2, "k3": lambda: log.exp() - 1 - log}[kind]()


def kl_loss(logprobs: Tensor, reference: Tensor, kind: Literal["k2", "k3", "k3_weighted"], *, old: Tensor | None = None) -> Tensor:
    """[T] penalties in the loss. What counts there is the gradient, over tokens that the policy drew (arXiv 2510.01555):

    k2           that of KL(pi || reference)
    k3           that of KL(reference || pi): GRPO's (arXiv 2402.03300)
    k3_weighted  that of KL(pi || reference), with k3's value: k3 times the ratio to `old`, which drew the tokens
    k1's gradient is 0 on average: it is for rewards only.
    """
    if kind == "k3_weighted":
        return log_ratio(logprobs, old).exp() * kl_estimate(logprobs, reference, "k3")
    return kl_estimate(logprobs, reference, kind)
