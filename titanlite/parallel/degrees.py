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


def resolve_degrees(cfg: Parallelism, world_size: int) -> Degrees:
    """The degrees on `world_size` ranks, with -1 filled in. Raises ConfigError with the arithmetic where they don't fit."""
    for name in (
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
        "expert_parallel_degree",
        "expert_tensor_parallel_degree",
    ):
        if getattr(cfg, name) != 1:
            key = f"parallelism.{name}"
            raise ConfigError(f"{key}={getattr(cfg, name)} on world size {world_size}: this version has 1 only", key)

    replicate, shard = cfg.data_parallel_replicate_degree, cfg.data_parallel_shard_degree
    keys = ("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree")
    if replicate < 1:
        raise ConfigError(f"{keys[0]}={replicate} must be at least 1", keys[0])
    if shard != -1 and shard < 1:
        raise ConfigError(f"{keys[1]}={shard} must be at least 1, or -1 for all ranks that are left", keys[1])
    if shard == -1:
        if world_size % replicate:
            raise ConfigError(
                f"{keys[0]}={replicate} must divide the world size {world_size}: use one of {divisors(world_size)}", *keys
            )
        shard = world_size // replicate
    if replicate * shard != world_size:
        raise ConfigError(
            f"{keys[0]}={replicate} * {keys[1]}={shard} = {replicate * shard} ranks, but the world size is {world_size}: "
            f"launch {replicate * shard} processes, or set {keys[1]}=-1 for all that are left",
            *keys,
        )
    return Degrees(pp=1, dp_replicate=replicate, dp_shard=shard, cp=1, tp=1)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
