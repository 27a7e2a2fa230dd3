"""Finds a model family by name. A family is a package with FLAVORS, Model, flops_per_token and plan (see llama)."""

import dataclasses
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import nn

from titanlite.config import Model
from titanlite.parallel.plan import ParallelPlan
from titanlite.utils import ConfigError, nearest

FAMILIES = {"llama3": "titanlite.models.llama"} | {name: f"titanlite.models.{name}" for name in ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")}


def get_family(cfg: Model) -> ModuleType:
    """The package of `model.name`: a known family or an import path."""
    path = FAMILIES.get(cfg.name, cfg.name)
    if path == cfg.name and not ("." in path and all(part.isidentifier() for part in path.split("."))):
        raise ConfigError(
            f"model.name={cfg.name!r}: expected one of {sorted(FAMILIES)} or an import path{nearest(cfg.name, FAMILIES)}",
            "model.name",
        )
    try:
        family = importlib.import_module(path)
    except ModuleNotFoundError as e:
        raise ConfigError(f"model.name={cfg.name!r}: cannot import it: {e}", "model.name") from e
    if missing := [name for name in ("FLAVORS", "Model", "flops_per_token", "plan") if not hasattr(family, name)]:
        raise ConfigError(f"model.name={cfg.name!r}: the package lacks {', '.join(missing)}", "model.name")
    return family


def get_args(cfg: Model) -> Any:
    """The sizes of `model.flavor` with what the configuration overrides."""
    flavors = get_family(cfg).FLAVORS
    if cfg.flavor not in flavors:
        raise ConfigError(
            f"model.flavor={cfg.flavor!r}: {cfg.name} has {', '.join(flavors)}{nearest(cfg.flavor, flavors)}",
            "model.flavor",
        )
    given = {key: getattr(cfg, key) for key in ("vocab_size", "tie_embeddings", "attention") if getattr(cfg, key) is not None}
    args = dataclasses.replace(flavors[cfg.flavor], **given)
    if cfg.moe_capacity_factor is None:
        return args
    if getattr(args, "moe", None) is None:
        raise ConfigError(
            f"model.moe_capacity_factor={cfg.moe_capacity_factor}: {cfg.name} {cfg.flavor} has no experts", "model.moe_capacity_factor"
        )
    return dataclasses.replace(args, moe=dataclasses.replace(args.moe, capacity_factor=cfg.moe_capacity_factor))


def get_plan(cfg: Model) -> ParallelPlan:
    """How the model of the configuration may be sharded."""
    return get_family(cfg).plan(get_args(cfg))


def get_model(cfg: Model, dtype: torch.dtype) -> nn.Module:
    """The whole model on the meta device (no memory), parameters in `dtype`."""
    with torch.device("meta"):
        return get_family(cfg).Model(get_args(cfg)).to(dtype)
