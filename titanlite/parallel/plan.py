"""How a model may be sharded, as data that stands next to the model."""

import re
from dataclasses import dataclass, field
from fnmatch import translate

from torch import nn

from titanlite.utils import ConfigError, nearest


@dataclass(frozen=True)
class ParallelPlan:
    """Names are module or parameter paths; `*` matches one layer number.

    blocks   the repeated block: the unit of data-parallel sharding, recompute and compile
    first    modules before the blocks, in the order they run
    last     modules after the blocks, in the order they run
    tied     (name, canonical name) of parameters that share their storage when the model ties them
    """

    blocks: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    tied: tuple[tuple[str, str], ...] = field(default=())

    def blocks_of(self, part: nn.Module) -> dict[str, nn.Module]:
        """Name -> block, of those that this part holds."""
        pattern = re.compile(translate(self.blocks))
        return {name: m for name, m in part.named_modules() if pattern.match(name) and name.count(".") == self.blocks.count(".")}


def check_plan(model: nn.Module, plan: ParallelPlan) -> None:
    """Raises ConfigError where the plan names something that the whole model does not have."""
    if not plan.blocks_of(model):
        raise ConfigError(f"the parallel plan's blocks {plan.blocks!r} match no module of {type(model).__name__}")
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for kind, names, known in (
        ("first", plan.first, modules),
        ("last", plan.last, modules),
        ("tied", [n for pair in plan.tied for n in pair], parameters),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"the parallel plan's {kind} name {name!r} matches nothing in {type(model).__name__}{nearest(name, known)}"
                )
