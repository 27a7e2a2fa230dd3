"""Samples from the trained module itself, many at a time: slots with key-value caches that are refilled as soon as a sample ends.

What part of the work a batch, a chunk or a slot has never changes what is drawn: each draw is a pure function of (seed, prompt, sample,
position). A group's prompt is computed once; what it shares with the prompt before is not computed again.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from titanlite.losses import label_logprobs


@dataclass(frozen=True)
class Request:
    """Samples to be drawn after a prompt's token ids; `ordinal` numbers prompts over the whole run."""

    ordinal: int
    prompt: tuple[int, ...]
    samples: tuple[int, ...]  # numbers of the samples within the prompt's group
    max_new_tokens: int


@dataclass(frozen=True)
class Sample:
    """What was drawn: token ids, with the end mark where it came, and log p of each under the sampling temperature."""

    ordinal: int
    sample: int
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool  # by the end mark; else cut at max_new_tokens
    version: int  # of the weights


class Generator(Protocol):
    def generate(self, requests: Iterable[Request], *, temperature: float, seed: int, version: int) -> Iterator[Sample]:
        """Samples as they end, in any order; `version` names the weights that are to draw them. With temperature 0 the likeliest token
        is taken, and log p is that of temperature 1."""


@dataclass
class _Slot:
    request: Request
    sample: int
    length: int  # tokens in the cache
    last: int  # drawn, not yet in the cache
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class EmbeddedGenerator:
    """Runs a whole model, in evaluation, on its own device. Replaces its attention cores: the model is for generation from then on.

    n_slots         samples that are drawn together
    max_length      tokens of a prompt and its sample together, at most
    chunk_tokens    tokens of a prompt that go through the model at once
    """

    def __init__(self, model: nn.Module, *, end_id: int, n_slots: int, max_length: int, chunk_tokens: int = 512):
        self.model, self.end_id, self.n_slots, self.max_length, self.chunk_tokens = model, end_id, n_slots, max_length, chunk_tokens
        self.device = next(model.parameters()).device
        self.cores: list[SlotCore | SlotLightningCore] = []
        self.last_prompt: tuple[int, ...] = ()
        for module in list(model.modules()):
            if hasattr(module, "core"):
                kind = SlotCore if hasattr(module.core, "attend") else SlotLightningCore
                module.core = kind(module.core, n_slots + 1, max_length)  # one more, for a prompt
                self.cores.append(module.core)

        self.sharing = all(isinstance(core, SlotCore) for core in self.cores)

    @torch.inference_mode()
    def generate(self, requests: Iterable[Request], *, temperature: float, seed: int, version: int) -> Iterator[Sample]:
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: must not be below 0")
        waiting, ready, active = iter(requests), deque(), []  # ready: of the prompt in the last slot, samples that wait for one of their own
        prompt_logits = None
        while True:
            while len(active) < self.n_slots:
                if not ready:
                    request = next(waiting, None)
                    if request is None:
                        break
                    prompt_logits = self._prefill(request)
                    ready.extend((request, sample) for sample in request.samples)
                request, sample = ready.popleft()
                for core in self.cores:
                    core.copy(self.n_slots, len(active), len(request.prompt))
                slot = _Slot(request, sample, len(request.prompt), last=-1)
                self._draw([slot], prompt_logits, temperature, seed)
                active.append(slot)
                yield from self._take_out(active, version)
            if not active:
                return
            logits = self._decode(active)
            self._draw(active, logits, temperature, seed)
            yield from self._take_out(active, version)

    def _prefill(self, request: Request) -> Tensor:
        """Logits [1, V] after a prompt, whose keys and values are in the last slot then."""
        n = len(request.prompt)
        if n < 1 or n + request.max_new_tokens > self.max_length:
            raise ValueError(f"prompt {request.ordinal} has {n} tokens and asks for {request.max_new_tokens} more: slots hold {self.max_length}")
        same = n - 1 if self.sharing else 0  # tokens that the prompt before began with, too: their keys and values are there
        same = next((i for i, (a, b) in enumerate(zip(request.prompt[:same], self.last_prompt)) if a != b), min(same, len(self.last_prompt)))
        self.last_prompt = request.prompt
        tokens = torch.tensor([request.prompt], device=self.device)
        for start in range(same, n, self.chunk_tokens):
            end = min(start + self.chunk_tokens, n)
            logits = self._forward(tokens[:, start:end], torch.arange(start, end, device=self.device)[None], slice(self.n_slots, None), end)
        return logits

    def _decode(self, active: list[_Slot]) -> Tensor:
        """Logits [active, V] after each slot's last token."""
        tokens = torch.tensor([[slot.last] for slot in active], device=self.device)
        positions = torch.tensor([[slot.length] for slot in active], device=self.device)
        for slot in active:
            slot.length += 1
        return self._forward(tokens, positions, slice(0, len(active)), max(slot.length for slot in active))

    def _forward(self, tokens: Tensor, positions: Tensor, slots: slice, end: int) -> Tensor:
        for core in self.cores:
            core.slots, core.end = slots, end
        return self.model(tokens, positions, None)[:, -1] if tokens.shape[1] == 1 else self._last(tokens, positions)

    def _last(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The head for a prompt's last token only."""
        head, self.model.output = self.model.output, None
        try:
            hidden = self.model(tokens, positions, None)[:, -1]
        finally:
            self.model.output = head
        return head(hidden)

    def _draw(self, slots: list[_Slot], logits: Tensor, temperature: float, seed: int) -> None:
        if temperature == 0:
            self._take(slots, logits, logits.argmax(-1, keepdim=True), 1.0)
            return
        uniform = torch.from_numpy(uniforms(seed, *np.array([(s.request.ordinal, s.sample, len(s.request.prompt) + len(s.ids)) for s in slots], np.uint64).T))
        p = (logits.float() / temperature).softmax(-1).double().cumsum(-1)
        drawn = torch.searchsorted(p, uniform.to(p.device)[:, None] * p[:, -1:], right=True).clamp(max=p.shape[-1] - 1)
        self._take(slots, logits, drawn, temperature)

    def _take(self, slots: list[_Slot], logits: Tensor, drawn: Tensor, temperature: float) -> None:
        logprobs, _ = label_logprobs(logits[:, None], drawn, temperature)
        for slot, token, logprob in zip(slots, drawn.flatten().tolist(), logprobs.flatten().tolist()):
            slot.last = token
            slot.ids.append(token)
            slot.logprobs.append(logprob)

    def _take_out(self, active: list[_Slot], version: int) -> Iterator[Sample]:
        """Samples that have ended leave, and the last slot's takes the place of each."""
        for i in reversed(range(len(active))):
            slot = active[i]
            ended = slot.last == self.end_id
            if not ended and len(slot.ids) < slot.request.max_new_tokens:
                continue
            yield Sample(slot.request.ordinal, slot.sample, slot.request.prompt, tuple(slot.ids), tuple(slot.logprobs), ended, version)
            last = active.pop()
            if last is not slot:
                active[i] = last
                for core in self.cores:
                    core.copy(len(active), i, last.length)


class SlotCore(nn.Module):
    """An attention core with keys and values of many sequences: [slots, max_length, K, E]."""

    def __init__(self, core: nn.Module, n_slots: int, max_length: int):
        super().__init__()
        self.core, self.shape = core, (n_slots, max_length)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.slots, self.end = slice(0), 0  # which sequences the next tokens are of, and how long the longest is then

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: None) -> Tensor:
        if self.keys is None:
            self.keys, self.values = (x.new_zeros(*self.shape, *x.shape[2:]) for x in (k, v))
        keys, values = self.keys[self.slots], self.values[self.slots]
        rows = torch.arange(len(k), device=k.device)[:, None]
        keys[rows, positions], values[rows, positions] = k, v
        places = torch.arange(self.end, device=k.device).expand(len(k), -1)
        return self.core.attend(q, keys[:, : self.end], values[:, : self.end], (positions, None), (places, None))

    def copy(self, source: int, to: int, length: int) -> None:
        self.keys[to, :length], self.values[to, :length] = self.keys[source, :length], self.values[source, :length]


class SlotLightningCore(nn.Module):
    """A lightning core with the states of many sequences: [slots, H, E, E]."""

    def __init__(self, core: nn.Module, n_slots: int, max_length: int):
        super().__init__()
        self.core, self.n_slots = core, n_slots
        self.states: Tensor | None = None
        self.slots, self.end = slice(0), 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: None) -> Tensor:
        begins = positions[0, 0] == 0  # a prompt's first chunk; nothing else starts at 0
        state = None if self.states is None or begins else self.states[self.slots]
        out, state = self.core.advance(q, k, v, None, state)
        if self.states is None:
            self.states = state.new_zeros(self.n_slots, *state.shape[1:])
        self.states[self.slots] = state
        return out

    def copy(self, source: int, to: int, length: int) -> None:
        self.states[to] = self.states[source]


def uniforms(seed: int, ordinal: np.ndarray, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    """[N] fp64 in [0, 1): a hash of the counters, splitmix64's finalizer over each (Steele, Lea and Flood, 2014)."""
    x = np.full(len(ordinal), seed, np.uint64)
    for counter in (ordinal, sample, position):
        x = _mix(_mix(x) + counter)
    return (_mix(x) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return x ^ x >> np.uint64(31)
