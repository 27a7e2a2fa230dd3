"""The arithmetic of parallel degrees: no torch, so that a launcher can check them before it starts a gang."""

from dataclasses import dataclass, fields

from titanlite.config import Parallelism
from titanlite.utils import ConfigError


@dataclass(frozen=True)
class Degrees:
    """How many ranks each axis has; their product is the world size."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def batch(self) -> int:
        """Ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks over which a parameter is sharded by data parallel."""
        return self.dp_shard * self.cp

    def __str__(self) -> str:
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


_UNSUPPORTED = ("pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree")
_REPLICATE, _SHARD, _TP = (
    f"parallelism.{name}"
    for name in ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
)


def resolve_degrees(cfg: Parallelism, world_size: int) -> Degrees:
    """The degrees on `world_size` ranks, with -1 filled in. Raises ConfigError with the arithmetic where they don't fit."""
    for name in _UNSUPPORTED:
        if getattr(cfg, name) != 1:
            key = f"parallelism.{name}"
            raise ConfigError(f"{key}={getattr(cfg, name)} on world size {world_size}: this version has 1 only", key)

    replicate, shard, tp = cfg.data_parallel_replicate_degree, cfg.data_parallel_shard_degree, cfg.tensor_parallel_degree
    for key, degree in ((_REPLICATE, replicate), (_TP, tp)):
        if degree < 1:
            raise ConfigError(f"{key}={degree} must be at least 1", key)
        if world_size % degree:
            raise ConfigError(f"{key}={degree} must divide the world size {world_size}: use one of {divisors(world_size)}", key)
    if shard != -1 and shard < 1:
        raise ConfigError(f"{_SHARD}={shard} must be at least 1, or -1 for all ranks that are left", _SHARD)
    if shard == -1 and world_size % (replicate * tp) == 0:
        shard = world_size // (replicate * tp)
    if replicate * shard * tp != world_size:
        product = f"{_REPLICATE}={replicate} * {_SHARD}={shard} * {_TP}={tp}"
        if shard == -1:
            raise ConfigError(
                f"{_REPLICATE}={replicate} * {_TP}={tp} = {replicate * tp} must divide the world size {world_size}", _REPLICATE, _TP
            )
        raise ConfigError(
            f"{product} = {replicate * shard * tp} ranks, but the world size is {world_size}: "
            f"launch {replicate * shard * tp} processes, or set {_SHARD}=-1 for all that are left",
            _REPLICATE,
            _SHARD,
            _TP,
        )
    return Degrees(pp=1, dp_replicate=replicate, dp_shard=shard, cp=1, tp=tp)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
