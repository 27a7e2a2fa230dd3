"""Text from a checkpoint of a run, on one process, with a key-value cache: `titanlite generate RUN -p "def "`."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.checkpoint.folder import checkpoint_folder, list_steps
from titanlite.checkpoint.integrity import DamagedStep
from titanlite.checkpoint.state import model_state
from titanlite.checkpoint.store import load
from titanlite.config import Config, load_config
from titanlite.data.chat import chat_prompt
from titanlite.data.tokenizer import Tokenizer, build_tokenizer, stream_decode
from titanlite.models import get_model, get_plan
from titanlite.parallel.parallelize import allocate
from titanlite.utils import ConfigError, is_utf8


class CachedCore(nn.Module):
    """An attention core for one row that keeps the keys and values of what it has seen: [1, S so far, K, E]."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.length = 0

    def forward(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, positions: Tensor, documents: Tensor | None
    ) -> Tensor:
        new, end = k_BSKE.shape[1], self.length + k_BSKE.shape[1]
        if self.keys is None or end > self.keys.shape[1]:  # doubled, so that growth costs little a token
            self.keys, self.values = (self._grown(old, x, 2 * end) for old, x in ((self.keys, k_BSKE), (self.values, v_BSKE)))
        self.keys[:, self.length : end], self.values[:, self.length : end] = k_BSKE, v_BSKE
        self.length = end
        if self.core.window or self.core.sink:
            places = torch.arange(end, device=positions.device)[None]
            return self.core.attend(q_BSHE, self.keys[:, :end], self.values[:, :end], (positions, None), (places, None))
        q, k, v = (x.transpose(1, 2) for x in (q_BSHE, self.keys[:, :end], self.values[:, :end]))
        mask = None
        if new > 1:
            mask = positions[0, :, None] >= torch.arange(end, device=q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    def _grown(self, old: Tensor | None, like: Tensor, room: int) -> Tensor:
        grown = like.new_empty(1, room, *like.shape[2:])
        if old is not None:
            grown[:, : self.length] = old[:, : self.length]
        return grown


class CachedLightningCore(nn.Module):
    """A lightning core that keeps its state [1, H, E, E]."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.state: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        out, self.state = self.core.advance(q, k, v, documents, self.state)
        return out


def load_run(folder: Path, step: int | None) -> tuple[nn.Module, Tokenizer, int]:
    """The model of a run's folder with the weights of `step` (None: the newest), its tokenizer, and the step."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is not a run's folder: it has no config.toml")
    cfg, _ = load_config(folder / "config.toml")
    checkpoints = checkpoint_folder(cfg, folder)
    steps = list_steps(checkpoints)
    if not steps:
        raise ConfigError(f"{checkpoints} holds no checkpoint: train with --checkpoint.enable")
    if step is not None and step not in steps:
        raise ConfigError(f"--step={step}: {checkpoints} holds {', '.join(map(str, steps))}")
    step = steps[-1] if step is None else step
    tokenizer = build_tokenizer(cfg.model, folder, None)
    try:
        return _whole_model(cfg, checkpoints, step), tokenizer, step
    except DamagedStep as damage:
        others = ", ".join(map(str, steps))
        raise ConfigError(f"{checkpoints}/step-{step} is damaged: {damage}; use another --step of {others}") from damage


def _whole_model(cfg: Config, checkpoints: Path, step: int) -> nn.Module:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = get_model(cfg.model, getattr(torch, cfg.training.dtype))
    allocate(model, get_plan(cfg.model), device)
    load(checkpoints, step, model_state([model]))
    return model.eval()


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    end_id: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Token ids one by one, up to `end_id` (not given out) or `max_new_tokens`. Temperature 0 takes the likeliest.

    top_p keeps the smallest set of likeliest tokens that holds that share of the probability (arXiv 1904.09751).
    Replaces the model's attention cores: the model is for generation from then on.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for module in list(model.modules()):
        if hasattr(module, "core") and not isinstance(module, CachedCore | CachedLightningCore):
            core = module.core.core if isinstance(module.core, CachedCore | CachedLightningCore) else module.core
            module.core = CachedCore(core) if hasattr(core, "attend") else CachedLightningCore(core)
    new, seen = prompt_ids, 0
    for _ in range(max_new_tokens):
        tokens = torch.tensor([new], device=device)
        positions = torch.arange(seen, seen + len(new), device=device)[None]
        token = _choose(model(tokens, positions)[0, -1].float(), temperature, top_p, generator)
        if token == end_id:
            return
        yield token
        new, seen = [token], seen + len(new)


def _choose(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities, order = ((logits_V - logits_V.max()) / temperature).softmax(-1).sort(descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0  # the likeliest always stays
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def generate_command(
    run: Path, prompt: str, *, chat: bool, step: int | None, max_new_tokens: int, temperature: float, top_p: float, seed: int, as_json: bool
) -> None:
    """Prints prompt and text as they come, or one JSON object {"prompt_ids", "ids", "text"} at the end.

    With `chat` the prompt is a user's message, and the text the answer.
    """
    for name, value, legal, allowed in (
        ("--temperature", temperature, temperature >= 0, "0 (the likeliest token) or more"),
        ("--top_p", top_p, 0 < top_p <= 1, "a share above 0 and at most 1"),
        ("--max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("--seed", seed, -(2**63) <= seed < 2**64, "a number of 64 bits"),
    ):
        if not legal:
            raise ConfigError(f"{name}={value}: expected {allowed}")
    if not is_utf8(prompt):
        raise ConfigError(f"--prompt={prompt!r}: not UTF-8")
    model, tokenizer, step = load_run(run, step)
    prompt_ids = chat_prompt(load_config(run / "config.toml")[0].model, tokenizer, prompt) if chat else tokenizer.encode_prompt(prompt)
    new = generate(
        model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        end_id=tokenizer.end_id,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    if as_json:
        ids = list(new)
        print(json.dumps({"prompt_ids": prompt_ids, "ids": ids, "text": tokenizer.decode(ids), "step": step}))
        return
    print("" if chat else prompt, end="", flush=True)
    for piece in stream_decode(tokenizer, new, after=prompt_ids):
        print(piece, end="", flush=True)
    print()
