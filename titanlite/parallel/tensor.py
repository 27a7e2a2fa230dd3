"""Tensor parallel on DTensor (Megatron-LM, arXiv 1909.08053) with sequence parallel (arXiv 2205.05198).

Between blocks a rank holds its part of the sequence [B, S / tp, D]. The vocabulary is split, evenly or not. Heads that do not
divide are not: a rank then makes the queries, keys and values of its part, and each attends over whole rows with all heads.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.config import Parallelism
from titanlite.parallel.collective import added_up
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.plan import ParallelPlan, is_tied, matching, tie
from titanlite.utils import logger


class GatherInput(ParallelStyle):
    """The first input comes in as this rank's part of the sequence and goes on whole, as a DTensor."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple) -> tuple:
            part = inputs[0]
            if not isinstance(part, DTensor):
                part = DTensor.from_local(part, mesh, [Shard(1)], run_check=False)
            return part.redistribute(placements=[Replicate()]), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class Gather(GatherInput):
    """What comes out is whole and plain. Each rank's heads give a part of its gradient."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _, inputs, output: output.to_local(grad_placements=[Partial()]))
        return super()._apply(module, mesh)


class OfHeads(ParallelStyle):
    """Parameters with one entry a head, which go to where the heads [B, S, H, E] are."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def split(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)))

        return distribute_module(
            module,
            mesh,
            split,
            lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Shard(2)], run_check=False),
            lambda _, output, mesh: output.to_local(),
        )


class WidthNorm(ParallelStyle):
    """The norm over all heads [B, S, H * E], of this rank's heads: squares are added up over the ranks."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.register_parameter("weight", nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)))
        module.forward = lambda x_BSW: module.normed(x_BSW, module.weight.to_local())
        module.sum_over_heads = lambda squares: added_up(squares, mesh)
        return module


class HoldHeads(ParallelStyle):
    """A module that depends on which heads it has is told."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.hold(mesh.get_local_rank(), mesh.size())
        return module


class LocalInput(ParallelStyle):
    """The first input goes on as this rank's part of the sequence, a plain tensor."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def take(_: nn.Module, inputs: tuple) -> tuple:
            part = inputs[0]
            return part.to_local() if isinstance(part, DTensor) else part, *inputs[1:]

        module.register_forward_pre_hook(take)
        return module


class OwnPart(ParallelStyle):
    """Attention on this rank's part of the sequence [B, S / tp, ...], inputs, positions and documents: plain tensors."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def take(_: nn.Module, inputs: tuple) -> tuple:
            x, *places = inputs
            x = x.to_local() if isinstance(x, DTensor) else x
            return x, *(None if place is None else place.chunk(mesh.size(), 1)[mesh.get_local_rank()] for place in places)

        module.register_forward_pre_hook(take)
        return module


class WholeRows(ParallelStyle):
    """A core within OwnPart that works on whole rows, as every rank's does; what comes out is this rank's part again."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(
            lambda _, parts: tuple(None if part is None else _redistributed(part, mesh, Shard(1), Replicate()) for part in parts)
        )
        module.register_forward_hook(lambda _, inputs, output: _redistributed(output, mesh, Replicate(), Shard(1)))
        return module


def _redistributed(x: Tensor, mesh: DeviceMesh, now: Placement, then: Placement) -> Tensor:
    # The gradient goes the same way back: that of whole rows is whole on every rank, none is a part of a sum.
    return DTensor.from_local(x, mesh, [now], run_check=False).redistribute(placements=[then]).to_local()


class Head(GatherInput):
    """Logits stay split over the vocabulary: a DTensor [B, S, V] in Shard(2). The loss works on the parts."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def split(_: str, linear: nn.Module, mesh: DeviceMesh) -> None:
            weight = distribute_tensor(linear.weight, mesh, [Shard(0)], src_data_rank=None)
            linear.register_parameter("weight", nn.Parameter(weight))

        return super()._apply(distribute_module(module, mesh, split), mesh)


class ValueHead(SequenceParallel):
    """A head with few outputs: each rank makes those of its part of the sequence, and they come out whole and plain."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, mesh)
        module.register_forward_hook(lambda _, inputs, output: output.redistribute(placements=[Replicate()]).to_local())
        return module


class Embedding(RowwiseParallel):
    """Rows of the table are split; the output is this rank's part of the sequence, a plain tensor."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(1))

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, mesh)
        module.register_forward_hook(_settled)
        return module


def _settled(_: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    # A collective still under way must not enter a compiled block: its backward fails there, and waiting for it by hand
    # drops the gradient in silence.
    return output.clone()


STYLES = {
    "colwise": ColwiseParallel,
    "gather_colwise": lambda: ColwiseParallel(input_layouts=Shard(1)),
    "rowwise": lambda: RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel,
    "head_norm": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),  # [B, S, H, E], of this rank's heads
    "local_norm": lambda: SequenceParallel(use_local_output=True),
    "gather_input": GatherInput,
    "gather": Gather,
    "of_heads": OfHeads,
    "width_norm": WidthNorm,
    "hold_heads": HoldHeads,
    "local_input": LocalInput,
    "own_part": OwnPart,
    "whole_rows": WholeRows,
    "embedding": Embedding,
    "head": Head,
    "value_head": ValueHead,
}


def apply_tp(part: nn.Module, mesh: Mesh, plan: ParallelPlan, cfg: Parallelism) -> None:
    """Splits the modules that the plan names over the tp axis."""
    if mesh.degrees.tp == 1:
        return
    tied = [pair for pair in plan.tied if is_tied(part, *pair)]
    tp = mesh.dense["tp"]
    styles = styles_of(part, plan, mesh.degrees.tp)
    parallelize_module(part, tp, {name: STYLES[style]() for name, style in styles.items()})
    for pair in tied:  # parallelize_module made new parameters
        tie(part, *pair)
    if cfg.enable_async_tensor_parallel:
        _enable_async_tensor_parallel(tp)
    logger.info(f"tensor_parallel={mesh.degrees.tp} modules={len(styles)} async={cfg.enable_async_tensor_parallel}")
    if not plan.splits_heads(mesh.degrees.tp):
        logger.info(f"tensor_parallel={mesh.degrees.tp} does not divide heads={plan.heads}: every rank attends with all heads over whole rows")


def styles_of(part: nn.Module, plan: ParallelPlan, tp: int) -> dict[str, str]:
    """Name -> style of the part's modules: the plan's, but for attention whose heads do not divide, the modules around the cores."""
    styles = {name: style for pattern, style in plan.tensor.items() for name in matching(part, pattern)}
    if plan.splits_heads(tp):
        return styles
    for core in matching(part, plan.cores):
        attention = core.rpartition(".")[0]
        for name, module in part.get_submodule(attention).named_modules(prefix=attention):
            styles.pop(name, None)
            if module._parameters:  # their gradients are parts of sums over the sequence, as those of norms
                styles[name] = "local_norm"
        styles |= {attention: "own_part", core: "whole_rows"}
    return styles


def _enable_async_tensor_parallel(tp: DeviceMesh) -> None:
    """Lets the compiler split matrix products into pieces that overlap their communication. CUDA only, not verified."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(tp.get_group().group_name)
