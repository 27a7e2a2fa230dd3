"""From problems to what a step trains on: samples with their rewards, groups of them, rows with their signals and advantages."""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from titanlite.batch import IGNORE, Batch
from titanlite.config import RL, Config
from titanlite.data.chat import chat_prompt, chat_reply
from titanlite.data.tokenizer import Tokenizer
from titanlite.rl.algorithms import (
    gae,
    group_advantages,
    overlong_penalty,
    returns,
    tells_apart,
    token_weights,
    whitened,
)
from titanlite.rl.generator import Generator, Request
from titanlite.rl.rewards import RewardPool
from titanlite.rl.signals import stack_signals, with_signals
from titanlite.rl.tasks import Problem, Task


@dataclass(frozen=True)
class Rollout:
    """One sample with all its turns. Token ids as they were drawn or put in, never made again from text."""

    ordinal: int
    sample: int
    ids: tuple[int, ...]  # the prompt's too
    drawn: tuple[bool, ...]  # whether the policy drew it: not a prompt's, a tool's or a template's
    logprobs: tuple[float, ...]  # of what was drawn; 0 elsewhere
    text: str  # after the prompt
    ended: bool  # by an end mark; else cut
    source: str
    version: int  # of the weights
    reward: float | None = None
    failure: str = ""  # why there is no reward
    prompt: str = ""

    @property
    def n_drawn(self) -> int:
        return sum(self.drawn)

    @property
    def n_new(self) -> int:
        """Tokens after the prompt, what tools said included: those that max_new_tokens bounds."""
        return len(self.ids) - self.drawn.index(True)


class Encode(Protocol):
    def __call__(self, text: str, *, reply: bool = False) -> list[int]:
        """Token ids of a prompt, or of what is said to a turn that has ended, up to where the policy says something."""


def build_encode(cfg: Config, tokenizer: Tokenizer) -> Encode:
    """By the model's chat template with `rl.chat`."""

    def encode(text: str, *, reply: bool = False) -> list[int]:
        if cfg.rl.chat:
            return (chat_reply if reply else chat_prompt)(cfg.model, tokenizer, text)
        return tokenizer.encode_prompt(text)[1 if reply else 0 :]  # the first is a document's begin mark

    return encode


def collect(
    cfg: RL,
    task: Task,
    problems: Mapping[int, Problem],
    encode: Encode,
    tokenizer: Tokenizer,
    generator: Generator,
    pool: RewardPool,
    *,
    seed: int,
    version: int,
) -> tuple[list[Rollout], float]:
    """(the groups of these problems by number, with rewards, in order; seconds that rewards took beyond the drawing)."""
    prompts = {ordinal: tuple(encode(problem.prompt)) for ordinal, problem in problems.items()}
    requests = [Request(ordinal, prompt, tuple(range(cfg.group_size)), cfg.max_new_tokens) for ordinal, prompt in prompts.items()]
    open_, done = {}, []
    while requests:
        going_on = []
        for s in generator.generate(requests, temperature=cfg.temperature, seed=seed, version=version):
            before = open_.pop((s.ordinal, s.sample), None) or Rollout(
                s.ordinal, s.sample, s.prompt, (False,) * len(s.prompt), (0.0,) * len(s.prompt), "", False, problems[s.ordinal].source, version,
                prompt=problems[s.ordinal].prompt,
            )  # fmt: skip
            rollout = replace(
                before,
                ids=before.ids + s.ids,
                drawn=before.drawn + (True,) * len(s.ids),
                logprobs=before.logprobs + s.logprobs,
                text=before.text + tokenizer.decode(s.ids[:-1] if s.ended else s.ids),
                ended=s.ended,
            )
            reply = task.reply(problems[s.ordinal], rollout.text) if s.ended else None
            said = encode(reply, reply=True) if reply is not None else []
            left = cfg.max_new_tokens - (len(rollout.ids) - len(prompts[s.ordinal])) - len(said)
            if reply is None or left < 1:
                done.append(replace(rollout, ended=s.ended and reply is None))
                pool.submit(problems[s.ordinal], rollout.text)
                continue
            nothing = len(said)
            rollout = replace(
                rollout, ids=rollout.ids + tuple(said), drawn=rollout.drawn + (False,) * nothing, logprobs=rollout.logprobs + (0.0,) * nothing,
                text=rollout.text + reply,
            )  # fmt: skip
            open_[s.ordinal, s.sample] = rollout
            going_on.append(Request(s.ordinal, rollout.ids, (s.sample,), left))
        requests = sorted(going_on, key=lambda request: (request.ordinal, request.samples))
    began = time.perf_counter()
    rewarded = [replace(rollout, reward=reward.value, failure=reward.failure) for rollout, reward in zip(done, pool.results(), strict=True)]
    return sorted(rewarded, key=lambda rollout: (rollout.ordinal, rollout.sample)), time.perf_counter() - began


@dataclass(frozen=True)
class Group:
    """A problem's samples and what each is worth: its reward, less what its length costs."""

    rollouts: tuple[Rollout, ...]
    rewards: tuple[float, ...]


def groups_of(cfg: RL, rollouts: Sequence[Rollout]) -> tuple[list[Group], dict[str, int]]:
    """(groups to be trained on, how many were dropped, by reason)."""
    by_ordinal: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_ordinal[rollout.ordinal].append(rollout)
    kept, dropped = [], {"failed": 0, "alike": 0, "cut": 0}
    for ordinal in sorted(by_ordinal):
        group = by_ordinal[ordinal]
        if any(rollout.reward is None for rollout in group):  # a group that is whole only: the others' advantages would be of another
            dropped["failed"] += 1
            continue
        rewards = torch.tensor([rollout.reward for rollout in group], dtype=torch.float64)
        if cfg.dynamic_sampling and not tells_apart(rewards[None]).item():  # before lengths count: being wrong at other lengths is no signal
            dropped["alike"] += 1
            continue
        if cfg.overlong_filter and not any(rollout.ended for rollout in group):
            dropped["cut"] += 1
            continue
        if cfg.overlong_buffer_tokens:
            lengths = torch.tensor([float(rollout.n_new) for rollout in group], dtype=torch.float64)
            rewards = rewards + overlong_penalty(lengths, most_tokens=cfg.max_new_tokens, buffer_tokens=cfg.overlong_buffer_tokens)
        kept.append(Group(tuple(group), tuple(rewards.tolist())))
    return kept, dropped


@dataclass(frozen=True)
class Minibatch:
    """Packed rows [n, seq_len], and whose samples they hold, one after another: (which group, which of it)."""

    batch: Batch
    samples: list[tuple[int, int]]


def minibatches_of(cfg: RL, groups: Sequence[Group], *, seq_len: int, unit: int, end_id: int) -> list[Minibatch]:
    """Up to `cfg.minibatches`, n a multiple of `unit`; what each label counts is of its own minibatch. Advantages are not in yet.

    Groups are dealt out in turn, samples go into rows longest first. A sample that was cut is left out with `overlong_filter`.
    """
    parts = [[] for _ in range(cfg.minibatches)]
    for g, group in enumerate(groups):
        parts[g % cfg.minibatches] += [(g, i) for i, rollout in enumerate(group.rollouts) if rollout.ended or not cfg.overlong_filter]
    minibatches = []
    for part in filter(None, parts):
        batch, order = _rows(cfg, [groups[g].rollouts[i] for g, i in part], seq_len, unit, end_id)
        minibatches.append(Minibatch(batch, [part[k] for k in order]))
    return minibatches


def with_advantages(
    cfg: RL, groups: Sequence[Group], minibatches: Sequence[Minibatch], *, kl: Sequence[Tensor] = (), values: Sequence[Tensor] = ()
) -> list[Batch]:
    """The minibatches' rows with each token's advantage, and with what a critic should have foretold of it.

    kl, values [n, seq_len] fp64, of each minibatch: estimates of the divergence that rewards are less by, and a critic's forecasts.
    Rewards come with a sample's last token and divergences with each; between two drawn tokens what a tool said takes no time.
    """
    here = [minibatch.batch.labels != IGNORE for minibatch in minibatches]
    flat = lambda rows: torch.cat([row[mask] for row, mask in zip(rows, here)])  # noqa: E731
    samples = list(chain(*(minibatch.samples for minibatch in minibatches)))
    lengths = torch.tensor([groups[g].rollouts[i].n_drawn for g, i in samples])
    of = torch.arange(len(samples)).repeat_interleave(lengths)
    step_rewards = -cfg.kl_reward_coef * flat(kl) if kl else torch.zeros(len(of), dtype=torch.float64)
    worth = [torch.tensor(group.rewards, dtype=torch.float64) for group in groups]
    if cfg.advantage == "group":
        for (g, i), penalty in zip(samples, torch.zeros(len(samples), dtype=torch.float64).index_add(0, of, step_rewards)):
            worth[g][i] += penalty
    if cfg.advantage != "gae":
        worth = [group_advantages(w[None], baseline=cfg.baseline, deviation=cfg.deviation, eps=cfg.advantage_eps)[0] for w in worth]
    worth = torch.stack([worth[g][i] for g, i in samples])
    if cfg.advantage == "group":
        advantages, targets = worth[of], torch.zeros(len(of))
    else:
        step_rewards[lengths.cumsum(0) - 1] += worth
        if cfg.advantage == "gae":
            advantages, targets = gae(step_rewards, flat(values), lengths.tolist(), gamma=cfg.gamma, lam=cfg.gae_lambda)
        else:
            advantages, targets = returns(step_rewards, lengths.tolist(), gamma=cfg.gamma), torch.zeros(len(of))
    if cfg.whiten:
        advantages = whitened(advantages)
    sizes = [int(mask.sum()) for mask in here]
    batches = []
    for minibatch, mask, *parts in zip(minibatches, here, advantages.split(sizes), targets.split(sizes)):
        rows = [torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, part.double()) for part in parts]
        batches.append(with_signals(minibatch.batch, advantage=rows[0], returns=rows[1]))
    return batches


def _rows(cfg: RL, rollouts: list[Rollout], seq_len: int, unit: int, end_id: int) -> tuple[Batch, list[int]]:
    """(rows, the rollouts' numbers in the order in which rows hold them)."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(rollouts)), key=lambda i: (-len(rollouts[i].ids), i)):
        n = len(rollouts[i].ids) - 1
        row = next((r for r, left in enumerate(room) if left >= n), None)
        if row is None:
            rows.append([])
            room.append(seq_len)
            row = len(rows) - 1
        rows[row].append(i)
        room[row] -= n
    n_rows = max(math.ceil(len(rows) / unit), 1) * unit
    tokens = torch.full((n_rows, seq_len), end_id)
    labels, positions, documents = torch.full_like(tokens, IGNORE), torch.zeros_like(tokens), torch.zeros_like(tokens)
    lengths = torch.tensor([rollout.n_drawn for rollout in rollouts])
    weights = token_weights(torch.arange(len(rollouts)), lengths, cfg.aggregation, most_tokens=cfg.max_new_tokens) * lengths.sum()
    signals = {name: torch.zeros(n_rows, seq_len, dtype=torch.float64) for name in ("weight", "length", "old", "rollout")}
    for r, numbers in enumerate(rows):
        start = 0
        for k, i in enumerate(numbers):
            rollout = rollouts[i]
            part = slice(start, start + len(rollout.ids) - 1)
            ids, drawn = torch.tensor(rollout.ids), torch.tensor(rollout.drawn)
            tokens[r, part], positions[r, part], documents[r, part] = ids[:-1], torch.arange(len(ids) - 1), k
            labels[r, part] = torch.where(drawn[1:], ids[1:], IGNORE)
            signals["rollout"][r, part] = torch.tensor(rollout.logprobs, dtype=torch.float64)[1:]
            for name, value in (("weight", weights[i].item()), ("length", rollout.n_drawn), ("old", math.nan)):
                signals[name][r, part] = value
            start = part.stop
        positions[r, start:], documents[r, start:] = torch.arange(seq_len - start), len(numbers)
    return Batch(tokens, labels, positions, documents, signals=stack_signals(**signals)), list(chain(*rows))


def demonstrations(task: Task, encode: Encode, tokenizer: Tokenizer, numbers: Sequence[int], cfg: RL, *, seq_len: int, unit: int) -> Batch:
    """Packed rows of the task's own samples, every token of a turn with the same weight: for `cross_entropy`."""
    shown = []
    for number in numbers:
        problem = task.problem(number)
        ids, text = list(encode(problem.prompt)), ""
        drawn = [False] * len(ids)
        for turn in task.demonstration(number):
            said = [*tokenizer.encode_prompt(turn)[1:], tokenizer.end_id]
            ids, drawn, text = ids + said, drawn + [True] * len(said), text + turn
            reply = task.reply(problem, text)
            if reply is not None:
                said = encode(reply, reply=True)
                ids, drawn, text = ids + said, drawn + [False] * len(said), text + reply
        shown.append(Rollout(number, 0, tuple(ids), tuple(drawn), (0.0,) * len(ids), text, True, problem.source, 0))
    batch, _ = _rows(cfg, shown, seq_len, unit, tokenizer.end_id)
    return batch._replace(signals=None)
