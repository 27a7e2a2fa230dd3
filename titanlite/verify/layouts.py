"""Layouts as short texts, `hsdp=2x2,tp=2,recompute=full`, and sets of them that take every pair of choices."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from titanlite import config
from titanlite.config import Config, override
from titanlite.utils import ConfigError, nearest

ROWS, SEQ_LEN, STEPS = 16, 32, 3  # of the batch that is compared
ACCUMULATE = 2  # microbatches a step without a pipeline, unless the layout says


@dataclass(frozen=True)
class Layout:
    text: str
    world_size: int
    cfg: Config

    @property
    def reference_key(self) -> tuple:
        """Layouts with the same key compute the same thing."""
        return self.cfg.model, self.cfg.training.dtype, self.cfg.training.mixed_precision_param


def _degrees(**degrees: int) -> dict[str, int]:
    return {f"parallelism.{name}_degree": n for name, n in degrees.items()}


def _sharded(stage: str) -> Callable[[str], dict]:
    return lambda n: {"parallelism.data_parallel_sharding": stage, **_degrees(data_parallel_shard=int(n))}


def _hsdp(size: str) -> dict:
    replicate, shard = map(int, size.split("x"))
    return _degrees(data_parallel_replicate=replicate, data_parallel_shard=shard)


def _recompute(mode: str) -> dict:
    if mode in ("none", "full"):
        return {"activation_checkpoint.mode": mode}
    return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": mode}


_SCHEDULES = get_args(config.KEYS["parallelism.pipeline_parallel_schedule"])
_N = r"[1-9]\d*"
# key -> (what its value looks like, in words, the configuration it stands for)
KEYS: dict[str, tuple[str, str, Callable[[str], dict]]] = {
    "replicate": (_N, "a number of ranks", lambda n: _degrees(data_parallel_replicate=int(n))),
    "zero1": (_N, "a number of ranks", _sharded("zero1")),
    "zero2": (_N, "a number of ranks", _sharded("zero2")),
    "fsdp": (_N, "a number of ranks", _sharded("zero3")),
    "hsdp": (rf"{_N}x{_N}", "REPLICATExSHARD, e.g. 2x2", _hsdp),
    "tp": (_N, "a number of ranks", lambda n: _degrees(tensor_parallel=int(n))),
    "pp": (_N, "a number of ranks", lambda n: _degrees(pipeline_parallel=int(n))),
    "schedule": ("|".join(_SCHEDULES), f"one of {', '.join(_SCHEDULES)}", lambda v: {"parallelism.pipeline_parallel_schedule": v}),
    "cp": (_N, "a number of ranks", lambda n: _degrees(context_parallel=int(n))),
    "method": ("allgather|ring|ulysses", "allgather, ring or ulysses", lambda v: {"parallelism.context_parallel_method": v}),
    "balance": ("headtail|none", "headtail or none", lambda v: {"parallelism.context_parallel_load_balancer": v}),
    "ep": (_N, "a number of ranks", lambda n: _degrees(expert_parallel=int(n))),
    "etp": (_N, "a number of ranks", lambda n: _degrees(expert_tensor_parallel=int(n))),
    "reshard": ("default|always|never", "default, always or never", lambda v: {"parallelism.fsdp_reshard_after_forward": v}),
    "recompute": (rf"none|full|op|{_N}", "none, full, op, or N for every N-th block", _recompute),
    "compile": ("[a-z_]+", "a torch.compile backend", lambda v: {"compile.enable": True, "compile.backend": v}),
    "accumulate": (_N, "microbatches a step", lambda n: {}),
    "chunk": (_N, "tokens", lambda n: {"training.loss_chunk_tokens": int(n)}),
    "offload": ("true|false", "true or false", lambda v: {"training.enable_cpu_offload": v == "true"}),
    "tied": ("true|false", "true or false", lambda v: {"model.tie_embeddings": v == "true"}),
    "mtp": (_N, "a depth", lambda n: {"model.mtp_depth": int(n)}),
    "dtype": ("float64|float32|bfloat16", "float64, float32 or bfloat16", lambda v: {"training.mixed_precision_param": v, "training.dtype": v}),
}  # fmt: skip


def parse_layout(text: str, cfg: Config) -> Layout:
    """The configuration that `text` means on top of `cfg`. Raises ConfigError for an unknown key or a value it cannot have."""
    given: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in KEYS:
            raise ConfigError(f"layout {text!r}: unknown key {key!r}{nearest(key, KEYS)} (keys: {', '.join(KEYS)})")
        pattern, words, _ = KEYS[key]
        if not re.fullmatch(pattern, value):
            raise ConfigError(f"layout {text!r}: {key}={value!r}: expected {words}")
        if key in given:
            raise ConfigError(f"layout {text!r}: {key} is given twice")
        given[key] = value
    forms = [key for key in ("replicate", "zero1", "zero2", "fsdp", "hsdp") if key in given]
    if len(forms) > 1:
        raise ConfigError(f"layout {text!r}: {' and '.join(forms)} are forms of data parallel: use one (hsdp=2x2 is both)")

    values = {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": 1}
    for key, value in given.items():
        values |= KEYS[key][2](value)
    if not forms:  # as many shards as experts need to be spread over
        experts = int(given.get("ep", 1)) * int(given.get("etp", 1))
        others = int(given.get("cp", 1)) * int(given.get("tp", 1))
        values["parallelism.data_parallel_shard_degree"] = experts // math.gcd(experts, others)
    batch_ranks = values["parallelism.data_parallel_replicate_degree"] * values["parallelism.data_parallel_shard_degree"]
    # A pipeline of two stages a rank needs as many microbatches.
    default = 2 * int(given["pp"]) if "pp" in given else ACCUMULATE
    microbatches = batch_ranks * int(given.get("accumulate", default))
    if ROWS % microbatches:
        raise ConfigError(
            f"layout {text!r}: {batch_ranks} data-parallel ranks * {microbatches // batch_ranks} microbatches must divide "
            f"the {ROWS} rows that are compared"
        )
    values["training.local_batch_size"] = ROWS // microbatches
    values["parallelism.pipeline_parallel_microbatch_size"] = ROWS // microbatches
    world_size = batch_ranks * math.prod(values.get(f"parallelism.{axis}_parallel_degree", 1) for axis in ("pipeline", "context", "tensor"))
    return Layout(text, world_size, override(cfg, values))


def base_config(cfg: Config) -> Config:
    """`cfg` as it is compared: its model and optimizer, plain in everything that a layout says, in fp64.

    The vocabulary is made odd, so that it divides by nothing; clipping acts on every step.
    """
    from titanlite.models import get_args

    vocab_size = get_args(cfg.model).vocab_size
    return override(
        cfg,
        {
            "model.vocab_size": vocab_size - 1 + vocab_size % 2,
            "training.seq_len": SEQ_LEN,
            "training.global_batch_size": ROWS,
            "training.steps": STEPS,
            "training.max_norm": 0.1,
            "training.dtype": "float64",
            "training.mixed_precision_param": "float64",
            "training.loss_chunk_tokens": 0,
            "training.enable_cpu_offload": False,
            "lr_scheduler.warmup_steps": 0,
            "lr_scheduler.total_steps": None,
            "activation_checkpoint.mode": "none",
            "compile.enable": False,
            "validation.enable": False,
            **{f"parallelism.{name}": getattr(type(cfg.parallelism)(), name) for name in vars(cfg.parallelism)},
        },
    )


# What the sets choose from, one of each line; empty: without.
CHOICES: tuple[tuple[str, ...], ...] = (
    ("", "replicate=2", "zero1=2", "zero2=2", "fsdp=2", "hsdp=2x2"),
    ("", "pp=2", *(f"pp=2,schedule={name}" for name in _SCHEDULES if name != "1F1B")),
    ("", "tp=2"),
    ("", "cp=2", "cp=2,method=ring", "cp=2,method=ulysses"),
    ("", "ep=2", "etp=2", "ep=2,etp=2"),
    ("", "reshard=never", "reshard=always"),
    ("", "recompute=full", "recompute=2", "recompute=op"),
    ("", "compile=aot_eager"),
    ("", "chunk=50"),
    ("", "accumulate=4"),
    ("", "tied=true"),
    ("", "mtp=1"),
    ("", "offload=true"),
)


def covering_layouts(strength: int, ranks: Callable[[str], int]) -> list[str]:
    """Each choice alone, then layouts that between them hold every legal combination of `strength` choices (absence is one).

    `ranks` gives a layout's world size, 0 where it is not legal. Each layout is grown from a combination that is still
    missing by the choices that bring in the most others; four more ranks, or one that compiles, must bring in one.
    """
    ranks = functools.cache(ranks)
    missing = {
        combination: None
        for lines in itertools.combinations(range(len(CHOICES)), strength)
        for combination in itertools.product(*([(line, choice) for choice in CHOICES[line]] for line in lines))
        if ranks(_text(combination))
    }
    layouts = [choice for choices in CHOICES for choice in choices if choice and ranks(choice)]
    while missing:
        chosen = list(next(iter(missing)))
        for line in sorted(set(range(len(CHOICES))) - {line for line, _ in chosen}):
            options = [(line, choice) for choice in CHOICES[line] if ranks(_text((*chosen, (line, choice))))]
            new = {option: len(missing.keys() & _combinations(chosen, option, strength)) for option in options}
            texts = {option: _text((*chosen, option)) for option in options}
            cost = {option: ranks(text) * (4 if "compile" in text else 1) / 4 for option, text in texts.items()}
            chosen.append(max(options, key=lambda option: new[option] - cost[option]))
        layouts.append(_text(chosen))
        for last in range(strength, len(chosen) + 1):
            for combination in _combinations(chosen[: last - 1], chosen[last - 1], strength):
                missing.pop(combination, None)
    return list(dict.fromkeys(layout for layout in layouts if layout))


def _combinations(chosen: Sequence[tuple[int, str]], option: tuple[int, str], strength: int) -> set[tuple]:
    """Those of `strength` choices that hold `option`, each in the order of lines."""
    return {tuple(sorted((*some, option))) for some in itertools.combinations(chosen, strength - 1)}


def _text(combination: Sequence[tuple[int, str]]) -> str:
    return ",".join(choice for _, choice in sorted(combination) if choice)
