"""The policy's loss is, token by token, what the papers say that its keys ask for; see test_layouts for its gradients on many ranks."""

import pytest
import torch

from tests.runs import SEQ_LEN, VOCAB
from titanlite.batch import IGNORE, Batch
from titanlite.config import RL
from titanlite.rl.algorithms import token_weights
from titanlite.rl.metrics import Figures
from titanlite.rl.policy import POLICY_FIGURES, build_policy_loss
from titanlite.rl.signals import stack_signals, with_signals

ROWS = 4
PROMPT, ANSWERS = 3, [5, 1, 7, 3, 0, 9, 2, 12]  # tokens of each sample's prompt, and of its answer; one has none


def a_batch() -> Batch:
    """The eight samples, packed into the first rows."""
    generator = torch.Generator().manual_seed(3)
    batch = Batch(*(torch.zeros(2 * ROWS, SEQ_LEN, dtype=torch.int64) for _ in range(4)))
    batch.labels.fill_(IGNORE)
    signals = torch.zeros(2 * ROWS, SEQ_LEN, 5, dtype=torch.float64)
    places = [(0, 0), (0, 8), (0, 12), (1, 0), (1, 7), (1, 10), (2, 0), (2, 6)]
    lengths = torch.tensor(ANSWERS)
    for i, (row, start) in enumerate(places):
        n = PROMPT + ANSWERS[i]
        tokens = torch.randint(0, VOCAB, (n + 1,), generator=generator)
        drawn = torch.randn(ANSWERS[i], 4, dtype=torch.float64, generator=generator)
        part = slice(start, start + n)
        batch.tokens[row, part], batch.positions[row, part] = tokens[:-1], torch.arange(n)
        batch.documents[row, start:] += start > 0
        answer = slice(start + PROMPT, start + n)
        batch.labels[row, answer] = tokens[PROMPT + 1 :]
        weights = token_weights(torch.full((ANSWERS[i],), i), lengths, "sequence")
        old = -5 + drawn[:, 1] * 0.5
        signals[row, answer] = torch.stack(
            [weights, torch.full_like(weights, ANSWERS[i]), drawn[:1, 0].expand(ANSWERS[i]) if ANSWERS[i] else weights, old, old + 0.3 * drawn[:, 2]], -1
        )
        if start + n < SEQ_LEN:
            batch.documents[row, start + n :] += 1
    names = ("weight", "length", "advantage", "old", "rollout")
    stacked = stack_signals(**dict(zip(names, signals.unbind(-1))), reference=signals[..., 3] - 0.2)
    return batch._replace(signals=stacked)


class Whole:
    """A mesh of one rank, as far as a loss asks."""

    class degrees:
        cp = 1


# What keys ask for -> the papers' loss of a token, of ratios to the policy before the step and of that one to the generator.
PAPERS = {
    "decoupled PPO (arXiv 2110.00641, eq. 12)": (
        {"rollout_correction": "truncate", "rollout_high": float("inf")},
        lambda r, u, A, **_: u * -min(r * A, min(max(r, 0.8), 1.2) * A),
    ),
    "truncated importance sampling": ({"rollout_correction": "truncate", "rollout_high": 1.1}, lambda r, u, A, **_: min(u, 1.1) * -min(r * A, min(max(r, 0.8), 1.2) * A)),
    "IcePop (arXiv 2510.18855)": (
        {"rollout_correction": "mask", "rollout_low": 0.8, "rollout_high": 1.3, "clip_high": 0.28},
        lambda r, u, A, **_: (u if 0.8 <= u <= 1.3 else 0) * -min(r * A, min(max(r, 0.8), 1.28) * A),
    ),
    "a mask of sequences": (
        {"rollout_correction": "mask", "rollout_low": 0.9, "rollout_high": 1.2, "rollout_correction_of": "sequence", "policy_loss": "reinforce"},
        lambda r, u, A, *, p, mean_u, **_: (mean_u if 0.9 <= mean_u <= 1.2 else 0) * -A * p,
    ),
    "off-policy sequence masking (arXiv 2512.02556, eq. 9)": (
        {"off_policy_kl": 0.02},
        lambda r, u, A, *, drift, **_: -min(r * A, min(max(r, 0.8), 1.2) * A) * (0 if A < 0 and drift > 0.02 else 1),
    ),
    "dual clip and DAPO's": (
        {"clip_high": 0.28, "dual_clip": 1.3},
        lambda r, u, A, **_: -(max(min(r * A, min(max(r, 0.8), 1.28) * A), 1.3 * A) if A < 0 else min(r * A, min(max(r, 0.8), 1.28) * A)),
    ),
}


@pytest.mark.parametrize("paper", PAPERS)
def test_keys_reach_the_papers_losses_also_after_the_first_minibatch(paper):
    """Logits of two entries, so that log p is what a test chooses; `old` as in a later minibatch, and NaN as in the first."""
    values, loss_of_token = PAPERS[paper]
    cfg, generator, batch = RL(**values, aggregation="token"), torch.Generator().manual_seed(5), a_batch()
    here = batch.labels != IGNORE
    n = int(here.sum())
    p, old, rollout = (-1 + 0.25 * torch.randn(3, n, dtype=torch.float64, generator=generator)).unbind(0)
    of = (torch.arange(2 * ROWS)[:, None] * SEQ_LEN + batch.documents)[here]
    A = torch.randn(2 * ROWS * SEQ_LEN, dtype=torch.float64, generator=generator)[of]
    mean = lambda x: torch.stack([x[of == one].mean() for one in of])  # noqa: E731
    for proximal in (old, p):
        logits = torch.zeros(*here.shape, VOCAB, dtype=torch.float64)
        logits[here] = -1e9
        logits[here, batch.labels[here]] = p
        logits[here, (batch.labels[here] + 1) % VOCAB] = (1 - p.exp()).log()
        rows = lambda x: torch.zeros(here.shape, dtype=torch.float64).masked_scatter(here, x)  # noqa: E731
        given = torch.full_like(old, torch.nan) if proximal is p else old
        batch = with_signals(batch, weight=1.0, advantage=rows(A), old=rows(given), rollout=rows(rollout))
        figures = Figures.empty(torch.device("cpu"), **POLICY_FIGURES)
        found = build_policy_loss(cfg, Whole, figures)(logits, batch)
        r, u = (p - proximal).exp(), (proximal - rollout).exp()
        more = {"p": p, "mean_u": mean(proximal - rollout).exp(), "drift": mean(rollout - p)}
        losses = [loss_of_token(*token[:3], **dict(zip(more, token[3:]))) for token in torch.stack([r, u, A, *more.values()], 1).tolist()]
        assert found.item() == pytest.approx(sum(losses), rel=1e-12)
        means = {name: (figures.sums[name] / figures.count).item() for name in figures.sums}
        clips = [(u_ < 0.8 and a < 0, u_ > 1 + cfg.clip_high and a > 0) for u_, a in zip(r.tolist(), A.tolist())] if cfg.policy_loss == "ppo" else [(False, False)]
        assert [means["clip_low_fraction"], means["clip_high_fraction"]] == pytest.approx([sum(c) / max(len(clips), 1) for c in zip(*clips)])
        assert means["logprob_gap"] == pytest.approx((proximal - rollout).abs().mean().item()) and figures.highest["ratio_max"] == pytest.approx(r.max().item())
