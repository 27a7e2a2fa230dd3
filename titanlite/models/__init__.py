"""Finds a model family by name. A family is a package with FLAVORS, Model, flops_per_token and plan (see llama)."""

import dataclasses
import functools
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from titanlite.config import Model
from titanlite.models.decoder import DecoderArgs
from titanlite.models.hf import HFFamily, args_from, read_config
from titanlite.models.layers import LinearScaling, NTKScaling, RopeScaling, Scaling, YarnScaling
from titanlite.parallel.plan import ParallelPlan
from titanlite.utils import ConfigError, nearest

FAMILIES = {"llama3": "titanlite.models.llama"} | {name: f"titanlite.models.{name}" for name in ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "minimax")}
HF_TYPES = {"llama": "llama3", "deepseek_v2": "deepseek_v3"} | {name: name for name in FAMILIES if name != "llama3"}  # config.json's model_type -> family


ALIASES = {  # names that torchtitan gives -> ours
    ("qwen3", "debugmodel_moe"): ("qwen3_moe", "debugmodel"), ("qwen3", "30B-A3B"): ("qwen3_moe", "30B-A3B"),
    ("qwen3", "235B-A22B"): ("qwen3_moe", "235B-A22B"), ("gpt_oss", "20b"): ("gpt_oss", "20B"), ("gpt_oss", "120b"): ("gpt_oss", "120B"),
}  # fmt: skip


def get_family(cfg: Model) -> ModuleType:
    """The package of `model.name`: a known family, an import path, or what config.json in `model.hf_assets_path` says."""
    cfg = _ours(cfg)
    if cfg.name == "hf":
        kind = read_config(hf_folder(cfg))["model_type"]
        if kind not in HF_TYPES:
            raise ConfigError(
                f"{hf_folder(cfg) / 'config.json'}: model_type={kind!r} is not supported: expected one of {', '.join(HF_TYPES)}",
                "model.hf_assets_path",
            )
        cfg = dataclasses.replace(cfg, name=HF_TYPES[kind])
    path = FAMILIES.get(cfg.name, cfg.name)
    if path == cfg.name and not ("." in path and all(part.isidentifier() for part in path.split("."))):
        raise ConfigError(
            f"model.name={cfg.name!r}: expected one of {sorted(FAMILIES)}, 'hf' or an import path{nearest(cfg.name, FAMILIES)}",
            "model.name",
        )
    try:
        family = importlib.import_module(path)
    except (ModuleNotFoundError, ValueError) as e:  # a flavor's sizes do not fit together
        raise ConfigError(f"model.name={cfg.name!r}: cannot import it: {e}", "model.name") from e
    if missing := [name for name in ("FLAVORS", "Model", "flops_per_token", "plan") if not hasattr(family, name)]:
        raise ConfigError(f"model.name={cfg.name!r}: the package lacks {', '.join(missing)}", "model.name")
    return family


def get_args(cfg: Model) -> Any:
    """The sizes of `model.flavor`, or of config.json, with what the configuration overrides."""
    cfg = _ours(cfg)
    flavors = {cfg.flavor: _hf_args(cfg)} if cfg.name == "hf" else get_family(cfg).FLAVORS
    if cfg.flavor not in flavors:
        raise ConfigError(
            f"model.flavor={cfg.flavor!r}: {cfg.name} has {', '.join(flavors)}{nearest(cfg.flavor, flavors)}",
            "model.flavor",
        )
    args = flavors[cfg.flavor]
    given = {key: getattr(cfg, key) for key in OVERRIDES if getattr(cfg, key) is not None}
    if cfg.flavor == "debugmodel" and cfg.name != "hf" and not given.get("vocab_size"):
        given["vocab_size"] = max(args.vocab_size, _tokens_of(cfg))
    for key, value in given.items():
        if not hasattr(args, key):
            raise ConfigError(f"model.{key}={value!r}: {cfg.title} has no such size: leave it out", f"model.{key}")
    if "rope_scaling" in given:
        given["rope_scaling"] = _rope_scaling(cfg)
    if cfg.moe_capacity_factor is not None:
        if getattr(args, "moe", None) is None:
            raise ConfigError(
                f"model.moe_capacity_factor={cfg.moe_capacity_factor}: {cfg.title} has no experts", "model.moe_capacity_factor"
            )
        given["moe"] = dataclasses.replace(args.moe, capacity_factor=cfg.moe_capacity_factor)
    if given.get("mtp_depth") and given.get("tie_embeddings", args.tie_embeddings):
        raise ConfigError(
            f"model.mtp_depth={cfg.mtp_depth}: {cfg.title} ties its head to the embedding, which prediction further ahead holds "
            "too: set model.tie_embeddings=false",
            "model.mtp_depth",
            "model.tie_embeddings",
        )
    return dataclasses.replace(args, **given)


def _tokens_of(cfg: Model) -> int:
    """How many the Hugging Face tokenizer has, rounded up to 128; 0 without one."""
    file = Path(cfg.hf_assets_path or "").expanduser() / "tokenizer.json"
    return _tokens_in(file) if cfg.hf_assets_path and cfg.tokenizer in (None, "hf") and file.is_file() else 0


@functools.cache
def _tokens_in(file: Path) -> int:
    try:
        tokenizer = json.loads(file.read_bytes())
        vocab, added = tokenizer["model"]["vocab"], [token["id"] for token in tokenizer["added_tokens"]]
        highest = max([*(vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]), *added])
    except (ValueError, KeyError, TypeError):
        return 0  # not a tokenizer: whoever reads it says so
    return -(-(highest + 1) // 128) * 128


OVERRIDES = ("vocab_size", "tie_embeddings", "attention", "mtp_depth", "rope_theta", "rope_scaling")  # sizes that keys of the same name replace


def _rope_scaling(cfg: Model) -> Scaling | None:
    """Raises ConfigError where a key that the scaling needs is not set."""
    needs = {"none": (), "linear": ("factor",), "ntk": ("factor",)}.get(cfg.rope_scaling, ("factor", "original"))
    given = {"factor": cfg.rope_scaling_factor, "original": cfg.rope_original_seq_len}
    for name, key in (("factor", "model.rope_scaling_factor"), ("original", "model.rope_original_seq_len")):
        if name in needs and given[name] is None:
            raise ConfigError(f"model.rope_scaling={cfg.rope_scaling!r} needs {key}: set it", "model.rope_scaling", key)
    values = [given[name] for name in needs]
    return {
        "none": lambda: None,
        "linear": LinearScaling,
        "ntk": NTKScaling,
        "yarn": YarnScaling,
        "llama3": lambda factor, original: RopeScaling(factor, original_max_position=original),
    }[cfg.rope_scaling](*values)


def _ours(cfg: Model) -> Model:
    name, flavor = ALIASES.get((cfg.name, cfg.flavor), (cfg.name, cfg.flavor))
    return dataclasses.replace(cfg, name=name, flavor=flavor)


def get_hf(cfg: Model) -> HFFamily:
    """What the family of `model.name` is called in a Hugging Face folder."""
    family = get_family(cfg).__name__
    try:
        twins = importlib.import_module(f"{family}.hf").HF
        if cfg.name == "hf":
            kind = read_config(hf_folder(cfg))["model_type"]
            return next(twin for twin in twins if twin.model_type == kind)
        return next(twin for twin in twins if twin.fits(get_args(cfg)))
    except ModuleNotFoundError as e:
        if e.name != f"{family}.hf":
            raise
        raise ConfigError(f"model.name={cfg.name!r}: the package lacks hf.py with HF, its Hugging Face twins", "model.name") from e


def hf_folder(cfg: Model) -> Path:
    if cfg.hf_assets_path is None:
        raise ConfigError("model.name='hf' needs model.hf_assets_path, a folder with config.json", "model.name")
    return Path(cfg.hf_assets_path).expanduser()


def _hf_args(cfg: Model) -> DecoderArgs:
    folder = hf_folder(cfg)
    return args_from(read_config(folder), get_hf(cfg), folder / "config.json")


def get_plan(cfg: Model) -> ParallelPlan:
    """How the model of the configuration may be sharded."""
    return get_family(cfg).plan(get_args(cfg))


def get_model(cfg: Model, dtype: torch.dtype) -> nn.Module:
    """The whole model on the meta device (no memory), parameters in `dtype`."""
    with torch.device("meta"):
        return get_family(cfg).Model(get_args(cfg)).to(dtype)
