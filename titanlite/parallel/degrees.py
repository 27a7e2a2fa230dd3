"""The arithmetic of parallel degrees: no torch, so that a launcher can check them before it starts a gang."""

import math
from dataclasses import dataclass, fields

from titanlite.config import Parallelism
from titanlite.utils import ConfigError


@dataclass(frozen=True)
class Degrees:
    """How many ranks each axis has; the product of all but ep and etp is the world size."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int = 1  # experts take their ranks from dp_shard, cp and tp
    etp: int = 1

    @property
    def batch(self) -> int:
        """Ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks over which a parameter is sharded by data parallel."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks over which an expert's parameter is sharded by data parallel."""
        return self.fsdp * self.tp // (self.ep * self.etp)

    def __str__(self) -> str:
        experts = {"ep", "etp"} if self.ep * self.etp == 1 else set()
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in experts)


_EP, _ETP = "parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree"
_PP, _REPLICATE, _SHARD, _CP, _TP = (
    f"parallelism.{name}_degree"
    for name in ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
)


def resolve_degrees(cfg: Parallelism, world_size: int) -> Degrees:
    """The degrees on `world_size` ranks, with -1 filled in. Raises ConfigError with the arithmetic where they don't fit."""
    shard = cfg.data_parallel_shard_degree
    others = {
        _PP: cfg.pipeline_parallel_degree,
        _REPLICATE: cfg.data_parallel_replicate_degree,
        _CP: cfg.context_parallel_degree,
        _TP: cfg.tensor_parallel_degree,
    }
    for key, degree in others.items():
        if degree < 1:
            raise ConfigError(f"{key}={degree} must be at least 1", key)
        if world_size % degree:
            raise ConfigError(f"{key}={degree} must divide the world size {world_size}: use one of {divisors(world_size)}", key)
    if shard != -1 and shard < 1:
        raise ConfigError(f"{_SHARD}={shard} must be at least 1, or -1 for all ranks that are left", _SHARD)
    rest = math.prod(others.values())
    product = " * ".join(f"{key}={degree}" for key, degree in others.items() if degree > 1)
    if shard == -1:
        if world_size % rest:
            raise ConfigError(f"{product} = {rest} must divide the world size {world_size}", *others)
        shard = world_size // rest
    if rest * shard != world_size:
        product = f"{product} * {_SHARD}={shard}".removeprefix(" * ")
        raise ConfigError(
            f"{product} = {rest * shard} ranks, but the world size is {world_size}: "
            f"launch {rest * shard} processes, or set {_SHARD}=-1 for all that are left",
            *others,
            _SHARD,
        )
    _check_experts(cfg, shard * others[_CP] * others[_TP])
    return Degrees(
        pp=others[_PP],
        dp_replicate=others[_REPLICATE],
        dp_shard=shard,
        cp=others[_CP],
        tp=others[_TP],
        ep=cfg.expert_parallel_degree,
        etp=cfg.expert_tensor_parallel_degree,
    )


def _check_experts(cfg: Parallelism, ranks: int) -> None:
    """`ranks`: those that experts may be spread over, of dp_shard, cp and tp."""
    ep, etp = cfg.expert_parallel_degree, cfg.expert_tensor_parallel_degree
    for key, degree in ((_EP, ep), (_ETP, etp)):
        if degree < 1:
            raise ConfigError(f"{key}={degree} must be at least 1", key)
    if ranks % (ep * etp):
        raise ConfigError(
            f"{_EP}={ep} * {_ETP}={etp} must divide the {ranks} ranks of {_SHARD} * {_CP} * {_TP}, which experts are spread over: "
            f"with {_ETP}={etp} use {_EP} of {[d for d in divisors(ranks) if ranks % (d * etp) == 0] or 'none: take a smaller one'}",
            _EP,
            _ETP,
        )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
