"""What `titanlite verify` does, and the same as a call for tests and forks."""

import os
import time

import torch

from titanlite.config import Config
from titanlite.models import get_plan
from titanlite.utils import ConfigError
from titanlite.validate import validate
from titanlite.verify.compare import verify
from titanlite.verify.layouts import Layout, base_config, covering_layouts, parse_layout
from titanlite.verify.mutants import MUTANTS, find_mutant

RANKS_PER_CORE = 8


def verify_command(cfg: Config, texts: list[str] | None, *, full: bool, plant: str | None) -> int:
    """Prints a line a layout and a summary; returns 0 where all agree with one rank, else 1."""
    if plant == "list":
        for name, mutant in MUTANTS.items():
            print(f"{name:<44} {mutant.layout:<22} {mutant.fault}")
        return 0
    if plant is not None and texts is None:
        texts = [find_mutant(plant).layout]
    base = base_config(cfg)
    if plant is not None and find_mutant(plant).experts and not get_plan(cfg.model).experts:
        raise ConfigError(f"--plant {plant} is a fault with experts, which {cfg.model.name} has not: use train_configs/{find_mutant(plant).experts}_debug.toml")
    if texts is None:
        texts = covering_layouts(3 if full else 2, lambda text: legal_ranks(parse_layout(text, base)))
    layouts = [check_layout(parse_layout(text, base)) for text in texts]
    began, differ = time.monotonic(), 0
    for verdict in verify(layouts, plant=plant):
        print(verdict, flush=True)
        differ += bool(verdict.first_difference)
    print(f"{len(layouts)} layouts, {differ} differ ({time.monotonic() - began:.0f} s)")
    return int(differ > 0)


def check_layout(layout: Layout) -> Layout:
    """The layout, if it is legal and this machine can run it. Raises ConfigError otherwise."""
    try:
        validate(layout.cfg, layout.world_size)
    except ConfigError as e:
        raise ConfigError(f"layout {layout.text!r}: {e}", *e.keys) from e
    most = torch.cuda.device_count() if torch.cuda.is_available() else RANKS_PER_CORE * (os.cpu_count() or 1)
    if layout.world_size > most:
        raise ConfigError(
            f"layout {layout.text!r} has {layout.world_size} ranks; this machine can run {most} "
            f"({'its devices' if torch.cuda.is_available() else f'{RANKS_PER_CORE} a core'}): use smaller degrees"
        )
    return layout


def legal_ranks(layout: Layout) -> int:
    """The layout's world size, 0 where it is not legal."""
    try:
        return check_layout(layout).world_size
    except ConfigError:
        return 0
