"""How a model may be sharded, as data that stands next to the model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from titanlite.utils import ConfigError, nearest


@dataclass(frozen=True)
class ParallelPlan:
    """Names are module or parameter paths; `*` stands for one name between dots, a layer's number say.

    blocks   the repeated block: the unit of data-parallel sharding, recompute and compile
    first    modules before the blocks, in the order they run
    last     modules after the blocks, in the order they run
    with_last  blocks that must lie in one pipeline stage with these
    head     the module of `last` that makes logits
    cores    pattern of the attention cores, `core(q, k, v, positions, documents)`, with `core.attend(q, k, v, queries, keys)`
             for context parallel, where queries and keys are (positions, documents) of theirs (see models/layers.py);
             or, of those that work on whole rows only, with `core.hold(rank, size)`, which leaves it a part of its heads
    experts  pattern of the modules that hold experts, `experts(rows, counts)`, whose parameters have the experts as their first
             dimension and, where `width_dims` names them, a dimension along which each expert can be split (see models/moe.py)
    tensor   pattern of modules -> tensor-parallel style, one of `titanlite.parallel.tensor.STYLES`
    heads    numbers of heads: where tensor parallel does not divide each, attention is not split, whatever `tensor` says of it;
             only its cores then see whole rows (see `titanlite.parallel.tensor`). Without these or cores: it must divide n_heads and n_kv_heads
    tied     (name, canonical name) of parameters that share their storage when the model ties them
    """

    blocks: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    head: str
    with_last: tuple[str, ...] = ()
    cores: str = ""
    experts: str = ""
    tensor: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[int, ...] = ()
    tied: tuple[tuple[str, str], ...] = field(default=())

    def blocks_of(self, part: nn.Module) -> dict[str, nn.Module]:
        """Name -> block, of those that this part holds."""
        return matching(part, self.blocks)

    def first_of(self, part: nn.Module) -> list[nn.Module]:
        """Those modules of `first` that this part holds."""
        return [m for name in self.first for m in matching(part, name).values()]

    def last_of(self, part: nn.Module) -> list[nn.Module]:
        """Those modules of `last` that this part holds."""
        return [m for name in self.last for m in matching(part, name).values()]

    def splits_heads(self, tp: int) -> bool:
        """Whether each of the `tp` ranks has equally many."""
        return all(n % tp == 0 for n in self.heads)


def matching(part: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Name -> module, of this part's modules that the pattern names; an empty pattern names none."""
    if not pattern:
        return {}
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return {name: module for name, module in part.named_modules() if expression.fullmatch(name)}


def tie(part: nn.Module, name: str, canonical: str) -> None:
    """Makes the two names stand for the canonical one's parameter."""
    owner, _, attribute = name.rpartition(".")
    setattr(part.get_submodule(owner), attribute, part.get_parameter(canonical))


def is_tied(part: nn.Module, name: str, canonical: str) -> bool:
    """Whether the two names stand for one parameter in this part."""
    parameters = dict(part.named_parameters(remove_duplicate=False))
    return name in parameters and parameters.get(canonical) is parameters[name]


def check_plan(model: nn.Module, plan: ParallelPlan) -> None:
    """Raises ConfigError where the plan names something that the whole model does not have."""
    for kind, pattern in (("blocks", plan.blocks), *(("tensor", pattern) for pattern in plan.tensor), ("cores", plan.cores), ("experts", plan.experts)):
        if pattern and not matching(model, pattern):
            names = [name for name, _ in model.named_modules() if name]
            raise ConfigError(
                f"the parallel plan's {kind} pattern {pattern!r} matches no module of {type(model).__name__}{nearest(pattern, names)}"
            )
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for kind, names, known in (
        ("first", plan.first, modules),
        ("last", plan.last, modules),
        ("head", (plan.head,), modules),
        ("with_last", plan.with_last, modules),
        ("tied", [n for pair in plan.tied for n in pair], parameters),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"the parallel plan's {kind} name {name!r} matches nothing in {type(model).__name__}{nearest(name, known)}"
                )
