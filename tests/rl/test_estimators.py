"""Estimators on drawn groups equal their expectation, enumerated over all pairs of sequences from formulas that are written here once more.

A policy of up to three tokens from a vocabulary of four, one of which ends a sequence. Groups of two are drawn from a generator, `old` lies
between it and the policy. Gradients by the logits are compared in six random directions.
"""

from dataclasses import dataclass

import pytest
import torch

from tests.rl.test_algorithms import EXACT, L, Policy, V
from titanlite.rl.algorithms import (
    cispo_loss,
    gae,
    group_advantages,
    kl_loss,
    log_ratio,
    off_policy_mask,
    ppo_loss,
    reinforce_loss,
    returns,
    rollout_weights,
    sequence_ratio,
    tells_apart,
    token_weights,
    whitened,
)

PAIRS, N = 40_000, V**L
LOW, HIGH = 0.1, 0.15  # clips
GAMMA, LAMBDA, BETA = 0.9, 0.8, 0.3

POLICY = Policy(0)
SEQUENCES = POLICY.sequences
LENGTH = torch.where((SEQUENCES == 0).any(1), (SEQUENCES == 0).int().argmax(1) + 1, L)  # token 0 ends
HERE = torch.arange(L) < LENGTH[:, None]
REWARD = ((SEQUENCES * HERE * torch.tensor([1, 2, 3])).sum(1) % 3).double() / 2


def near(seed: int, by: float) -> torch.Tensor:
    """[N, L] logprobs of a policy that differs."""
    other = Policy(0)
    with torch.no_grad():
        other.table += by * torch.randn(other.table.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return other.logprobs(SEQUENCES)


X = POLICY.logprobs(SEQUENCES)
SLOPES = torch.randn(6, *POLICY.table.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def slopes() -> torch.Tensor:
    """[N, L, 6] derivatives of each token's log p in the six directions."""
    rows = [[torch.autograd.grad(X[s, t], POLICY.table, retain_graph=True)[0] for t in range(L)] for s in range(N)]
    return torch.einsum("ntabcd,kabcd->ntk", torch.stack([torch.stack(row) for row in rows]), SLOPES)


X, D_LOG = X.detach(), slopes()
OLD, ROLLOUT, REFERENCE = near(1, 0.15), near(2, 0.3), near(3, 0.5)
VALUES = torch.rand(N, L, dtype=torch.float64, generator=torch.Generator().manual_seed(4))  # of a critic, which may foretell anything


@dataclass
class Drawn:
    """Tokens of drawn sequences, for the functions under test."""

    index: torch.Tensor  # [P, 2]
    on_policy: bool

    def __post_init__(self):
        flat = self.index.flatten()
        self.here = HERE[flat]
        self.lengths = LENGTH[flat]
        self.of = torch.arange(len(flat)).repeat_interleave(self.lengths)
        take = lambda values: values[flat][self.here]  # noqa: E731
        self.x = take(X).requires_grad_()
        self.old, self.rollout = (take(X if self.on_policy else values) for values in (OLD, ROLLOUT))
        self.reference, self.values, self.rewards = take(REFERENCE), take(VALUES), REWARD[self.index]
        self.samples = {"sequences": self.of, "lengths": self.lengths}

    def advantages(self, **options) -> torch.Tensor:
        return group_advantages(self.rewards, **options).flatten()[self.of]

    def last(self, worth: torch.Tensor) -> torch.Tensor:
        """[T] what a sequence is worth at its last token, else 0."""
        return torch.zeros_like(self.x).index_put((self.lengths.cumsum(0) - 1,), worth).detach()

    @property
    def ratio(self) -> torch.Tensor:
        return log_ratio(self.x, self.old).exp()


# Formulas over all pairs [N, N, 2, ...]; i is of the first of a pair, j of the second


def both(values: torch.Tensor) -> torch.Tensor:
    """[N, N, 2, ...] of what each sequence has."""
    one = values[:, None].expand(N, N, *values.shape[1:])
    return torch.stack([one, one.transpose(0, 1)], 2)


R, OTHER = both(REWARD), both(REWARD).flip(2)
DIFFERENCE = R - OTHER


def ppo(A: torch.Tensor, low: float = LOW, high: float = HIGH) -> torch.Tensor:
    """[N, N, 2, L] the derivative of PPO's loss by each log p."""
    r, A = both((X - OLD).exp()), A.expand(N, N, 2, L)
    clipped = (A > 0) & (r > 1 + high) | (A < 0) & (r < 1 - low)
    return torch.where(clipped, 0.0, -A * r)


def gspo(A: torch.Tensor) -> torch.Tensor:
    s = both((((X - OLD) * HERE).sum(1) / LENGTH).exp())
    clipped = (A > 0) & (s > 1 + HIGH) | (A < 0) & (s < 1 - LOW)
    return torch.where(clipped, 0.0, -A * s)[..., None].expand(N, N, 2, L)


GRPO = DIFFERENCE / 2 / (DIFFERENCE.abs() / 2 + 1e-6)
GRPO_SAMPLE = DIFFERENCE / 2 / (DIFFERENCE.abs() / 2**0.5 + 1e-6)
W = both((OLD - ROLLOUT).exp())
W_MEAN = both((((OLD - ROLLOUT) * HERE).sum(1) / LENGTH).exp())[..., None]
DRIFT = both(((ROLLOUT - X) * HERE).sum(1) / LENGTH)[..., None]


def along(rewards: torch.Tensor) -> torch.Tensor:
    """[N, L] discounted rewards to come, of one at the last token."""
    return rewards[:, None] * GAMMA ** (LENGTH[:, None] - 1.0 - torch.arange(L)) * HERE


def gae_by_hand() -> torch.Tensor:
    found = torch.zeros(N, L, dtype=torch.float64)
    for s in range(N):
        n = int(LENGTH[s])
        errors = [(REWARD[s] if t == n - 1 else GAMMA * VALUES[s, t + 1]) - VALUES[s, t] for t in range(n)]
        for t in range(n):
            found[s, t] = sum((GAMMA * LAMBDA) ** (u - t) * errors[u] for u in range(t, n))
    return found


def white(tokens: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """[N, N, 2, L] less their expected mean, over their deviation, over all tokens of all samples."""
    weights = chances[..., None, None] * both(HERE.double())
    mean = (weights * tokens).sum() / weights.sum()
    return (tokens - mean) / ((weights * (tokens - mean).square()).sum() / weights.sum()).sqrt()


MEAN = {"deviation": "none"}
LEFT_OUT = {"baseline": "leave_one_out", "deviation": "none"}
CLIPS = {"clip_low": LOW, "clip_high": HIGH}

# name -> (aggregation, drawn from the policy itself, loss of a token by the code, its derivative by log p as written, from chances of pairs)
ESTIMATORS = {
    "REINFORCE": ("constant", True, lambda d: reinforce_loss(d.x, d.advantages(baseline="none", deviation="none")), lambda _: -R[..., None]),
    "RLOO": ("constant", True, lambda d: reinforce_loss(d.x, d.advantages(**LEFT_OUT)), lambda _: -DIFFERENCE[..., None]),
    "Dr. GRPO": ("constant", False, lambda d: ppo_loss(d.ratio, d.advantages(**MEAN), **CLIPS), lambda _: ppo(DIFFERENCE[..., None] / 2)),
    "GRPO": (
        "sequence", False, lambda d: ppo_loss(d.ratio, d.advantages(), **CLIPS) + BETA * kl_loss(d.x, d.reference, "k3"),
        lambda _: ppo(GRPO[..., None]) + BETA * (1 - both((REFERENCE - X).exp())),
    ),
    "GRPO by the sample deviation": ("sequence", False, lambda d: ppo_loss(d.ratio, d.advantages(deviation="sample"), **CLIPS), lambda _: ppo(GRPO_SAMPLE[..., None])),
    "DAPO": ("token", False, lambda d: ppo_loss(d.ratio, d.advantages(), clip_low=0.2, clip_high=0.28), lambda _: ppo(GRPO[..., None], 0.2, 0.28)),
    "REINFORCE++": (
        "token", True, lambda d: reinforce_loss(d.x, whitened(returns(d.last(d.rewards.flatten()), d.lengths.tolist(), gamma=GAMMA))),
        lambda chances: -white(both(along(REWARD)), chances),
    ),
    "REINFORCE++ with a baseline": (
        "token", True, lambda d: reinforce_loss(d.x, whitened(d.advantages(**MEAN))), lambda chances: -white(DIFFERENCE[..., None] / 2, chances),
    ),
    "PPO": (
        "token", False, lambda d: ppo_loss(d.ratio, gae(d.last(d.rewards.flatten()), d.values, d.lengths.tolist(), gamma=GAMMA, lam=LAMBDA)[0], **CLIPS),
        lambda _: ppo(both(gae_by_hand())),
    ),
    "GSPO": ("sequence", False, lambda d: ppo_loss(sequence_ratio(d.x, d.old, **d.samples), d.advantages(), **CLIPS), lambda _: gspo(GRPO)),
    "GSPO of tokens": ("sequence", False, lambda d: ppo_loss(sequence_ratio(d.x, d.old, **d.samples, form="token"), d.advantages(), **CLIPS), lambda _: gspo(GRPO)),
    "CISPO": (
        "token", False, lambda d: cispo_loss(d.x, d.ratio, d.advantages(), **CLIPS), lambda _: -GRPO[..., None] * both((X - OLD).exp().clamp(1 - LOW, 1 + HIGH)),
    ),
    "truncated importance sampling": (
        "token", False, lambda d: ppo_loss(d.ratio, d.advantages(), **CLIPS) * rollout_weights(d.old, d.rollout, "truncate", high=1.2),
        lambda _: ppo(GRPO[..., None]) * W.clamp(max=1.2),
    ),
    "decoupled PPO": (
        "token", False, lambda d: ppo_loss(d.ratio, d.advantages(), **CLIPS) * rollout_weights(d.old, d.rollout, "truncate", high=float("inf")),
        lambda _: ppo(GRPO[..., None]) * W,
    ),
    "IcePop": (
        "token", False, lambda d: ppo_loss(d.ratio, d.advantages(), **CLIPS) * rollout_weights(d.old, d.rollout, "mask", low=0.8, high=1.3),
        lambda _: ppo(GRPO[..., None]) * W * ((W >= 0.8) & (W <= 1.3)),
    ),
    "masks of sequences": (
        "token", False, lambda d: ppo_loss(d.ratio, d.advantages(), **CLIPS) * rollout_weights(d.old, d.rollout, "mask", low=0.9, high=1.2, **d.samples),
        lambda _: ppo(GRPO[..., None]) * W_MEAN * ((W_MEAN >= 0.9) & (W_MEAN <= 1.2)),
    ),
    "off-policy sequence masking": (
        "token", False, lambda d: ppo_loss(d.ratio, d.advantages(), **CLIPS) * off_policy_mask(d.x, d.rollout, d.advantages(), **d.samples, most_kl=0.1),
        lambda _: ppo(GRPO[..., None]) * ~((GRPO[..., None] < 0) & (DRIFT > 0.1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ESTIMATORS)
def test_means_over_drawn_groups_are_the_enumerated_expectations(name):
    aggregation, on_policy, loss_of, written = ESTIMATORS[name]
    chance = ((X if on_policy else ROLLOUT) * HERE).sum(1).exp() * torch.where(HERE, 1.0, V**-1.0).prod(1)  # what follows an end is one sequence's
    index = torch.multinomial(chance, 2 * PAIRS, replacement=True, generator=torch.Generator().manual_seed(5)).view(-1, 2)
    chances = chance[:, None] * chance
    if name == "DAPO":
        index, chances = index[tells_apart(REWARD[index])], chances * (DIFFERENCE[..., 0] != 0)
    chances = chances / chances.sum()

    counts = {"token": 1.0, "sequence": 1 / LENGTH[:, None].double(), "constant": 1 / L}[aggregation] * HERE.double()
    tokens = both(counts).sum((2, 3))  # that a pair has, where tokens are counted
    expected_tokens = (chances * tokens).sum() if aggregation == "token" else 2.0
    each = (written(chances) * both(counts))[..., None] * both(D_LOG)
    truth = (chances[..., None] * each.sum((2, 3))).sum((0, 1)) / expected_tokens
    if name in ("REINFORCE", "RLOO"):
        gradient = torch.einsum("n,n,nk->k", chance, REWARD, (D_LOG * HERE[..., None]).sum(1))
        torch.testing.assert_close(truth, -gradient / L, **EXACT)

    drawn = Drawn(index, on_policy)
    weights = token_weights(drawn.of, drawn.lengths, aggregation, most_tokens=L)
    (by_log,) = torch.autograd.grad((weights * loss_of(drawn)).sum(), drawn.x)
    terms = torch.zeros(len(drawn.here), L, dtype=torch.float64).masked_scatter(drawn.here, by_log)[..., None] * D_LOG[index.flatten()]
    groups = terms.sum(1).view(len(index), 2, -1).sum(1) * len(index)  # whose mean is the estimate
    share = tokens[index[:, 0], index[:, 1], None] / expected_tokens if aggregation == "token" else 1.0
    error = (groups - truth * share).std(0) / len(index) ** 0.5
    # Six directions of 17 estimators: 4 standard errors are passed by chance once in 150. Whitening's own deviation is off by 1 / sqrt(2 * samples) of itself.
    assert ((groups.mean(0) - truth).abs() < 4 * error + 4 * truth.abs() / (4 * PAIRS) ** 0.5).all()
    assert (truth.abs() > 8 * error).any()  # an estimate of something
