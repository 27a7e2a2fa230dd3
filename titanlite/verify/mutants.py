"""Planted faults: what real trainers shipped, put into this one, so that `verify` can be seen to catch it.

Each replaces one function while a layout runs: `titanlite verify X.toml --plant NAME`, on the layout it needs or on others.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titanlite import losses, trainer
from titanlite.batch import IGNORE, Batch, with_ahead
from titanlite.models.lightning import LightningCore, WidthNorm
from titanlite.parallel import context, data_parallel, expert, parallelize, pipeline, tensor
from titanlite.parallel.mesh import Mesh
from titanlite.utils import ConfigError, nearest


@dataclass(frozen=True)
class Mutant:
    fault: str  # what goes wrong
    layout: str  # one that shows it
    found: str  # what the verdict names; empty: the layout fails
    patch: Callable[[], contextlib.AbstractContextManager]
    experts: str = ""  # a family of experts that shows it; empty: any model does


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], contextlib.AbstractContextManager]:
    return lambda: mock.patch.object(owner, name, value)


def _around_forward_backward(change: Callable) -> Callable[[], contextlib.AbstractContextManager]:
    """`change(inner, mesh, microbatches, loss_fn, denominator)` in place of the step's forward and backward."""
    original = trainer.build_forward_backward

    def build(parts: list[nn.Module], mesh: Mesh, cfg: Any) -> Callable:
        inner = original(parts, mesh, cfg)
        return lambda *args: change(inner, mesh, *args)

    return _replaced(trainer, "build_forward_backward", build)


def _with_batches(change: Callable[[Batch], Batch]) -> Callable[[], contextlib.AbstractContextManager]:
    return _around_forward_backward(
        lambda inner, mesh, batches, loss_fn, denominator: inner([change(b) for b in batches], loss_fn, denominator)
    )


def _take_partial_for_whole(parameters: Iterator[nn.Parameter]) -> None:
    for p in parameters:
        if isinstance(p, DTensor) and all(place.is_replicate() for place in p.placements):
            p.grad = DTensor.from_local(p.grad.to_local(), p.device_mesh, p.placements)


def _mean_of_means(inner, mesh, batches, loss_fn, denominator) -> Tensor:
    mine = sum((batch.labels != IGNORE).sum() for batch in batches)
    return inner(batches, loss_fn, torch.zeros_like(denominator) + mine * mesh.degrees.batch)


def _mean_of_batch_means(run: Any, batches: Iterator[Batch]) -> float:
    means = [validation_loss(run, iter([batch])) for batch in batches if (batch.labels != IGNORE).any()]
    return sum(means) / len(means)


validation_loss = trainer.validation_loss


def _norm_of_own_shards(parameters: Iterator[nn.Parameter], stage_size: int) -> Tensor:
    grads = [g for g in trainer.local_gradients(parameters) if g.numel()]
    return torch.stack([g.double().square().sum() for g in grads]).sum() / stage_size


def _same_values_everywhere(full: Tensor, mesh: Any, placements: Any, *, src_data_rank: None) -> DTensor:
    right = parallelize_distribute(full, mesh, placements, src_data_rank=src_data_rank)
    local = full.flatten()[: right.to_local().numel()].view_as(right.to_local())
    return DTensor.from_local(local, mesh, placements, shape=right.shape, stride=right.stride())


parallelize_distribute = parallelize.distribute_tensor


def _split_evenly(whole: DTensor, dim: int) -> tuple[int, dist.ProcessGroup]:
    mesh = whole.device_mesh
    return mesh.get_local_rank() * (whole.shape[dim] // mesh.size()), mesh.get_group()


def _local(change: Callable[[Batch, Batch], Batch]) -> Callable[[], contextlib.AbstractContextManager]:
    """`change(batch, part)` in place of a context-parallel rank's part of the batch."""
    original = trainer.local_batch
    return _replaced(trainer, "local_batch", lambda batch, *args: change(batch, original(batch, *args)))


def _first_of(whole: Tensor, part: Tensor) -> Tensor:
    return whole[:, : part.shape[1]]


def _scaling_schedule(*args: Any) -> Any:
    schedule = build_schedule(*args)
    schedule.scale_grads = True
    return schedule


build_schedule = pipeline._build_schedule


def _norm_of_the_first_stage(parameters: Iterator[nn.Parameter], stage_size: int) -> Tensor:
    return local_square_sum(parameters, stage_size) * (dist.get_rank() < stage_size)


local_square_sum = trainer.local_square_sum


def _resharded(modules: Any, *, reshard_after_forward: bool, **options: Any) -> Any:
    return fully_shard(modules, reshard_after_forward=True, **options)


fully_shard = data_parallel.fully_shard


def _joined(change: Callable[[Batch], Batch]) -> Callable[[], contextlib.AbstractContextManager]:
    """`change(rows)` on what a pipeline's stages get of a step's rows."""
    original = pipeline._joined
    return _replaced(pipeline, "_joined", lambda microbatches: change(original(microbatches)))


def _compiled_in_a_wrapper(part: nn.Module, plan: Any, ac: Any, cfg: Any) -> None:
    for name, block in plan.blocks_of(part).items():
        owner, _, attribute = name.rpartition(".")
        part.get_submodule(owner)[attribute] = torch.compile(block, backend=cfg.backend)


@contextlib.contextmanager
def _divided_twice_on_one_rank() -> Iterator[None]:
    def factor_4(module: FSDPModule, factor: float) -> None:
        set_factor(module, 4.0)
        module.set_force_sum_reduction_for_comms(True)

    set_factor = FSDPModule.set_gradient_divide_factor
    scaled = _around_forward_backward(lambda inner, mesh, batches, loss_fn, n: inner(batches, loss_fn, n / 4) / 4)
    with mock.patch.object(FSDPModule, "set_gradient_divide_factor", factor_4), scaled():
        yield


def _summed_back(x: Tensor, mesh: Any, now: Placement, then: Placement) -> Tensor:
    whole = DTensor.from_local(x, mesh, [now], run_check=False).redistribute(placements=[then])
    return whole.to_local(grad_placements=[Partial() if then.is_replicate() else then])


class _Local(tensor.ParallelStyle):
    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        return module


def _divided_by_the_experts_mesh(module: FSDPModule, factor: float) -> None:
    set_divide_factor(module, 2 * factor if hasattr(module, "width_dims") else factor)


set_divide_factor = FSDPModule.set_gradient_divide_factor


def _over_ep_with(change: Callable[[Tensor, dict], tuple[Tensor, dict]]) -> Callable[[], contextlib.AbstractContextManager]:
    """`change(rows, weights)` before experts see either."""
    original = expert._over_ep

    def over_ep(experts: nn.Module, weights: dict, group: Any, x: Tensor, counts: Tensor) -> Tensor:
        x, weights = change(x, weights)
        return original(experts, weights, group, x, counts)

    return _replaced(expert, "_over_ep", over_ep)


def _drop(x: Tensor, weights: dict) -> tuple[Tensor, dict]:
    return x * (torch.arange(len(x)) % 8 != 0)[:, None], weights


def _swap(x: Tensor, weights: dict) -> tuple[Tensor, dict]:
    return x, {name: w.flip(0) for name, w in weights.items()}


def _count_everything(router: nn.Module, inputs: tuple, outputs: tuple) -> None:
    with torch.enable_grad():
        count(router, inputs, outputs)


count = expert._count


def _update_twice(parts: list[nn.Module], mesh: Mesh) -> dict:
    loads = [expert._loads_of(moe.router, mesh.device).clone() for part in parts for moe in expert.mixtures_of(part)]
    update_routers(parts, mesh)
    for load, moe in zip(loads, (moe for part in parts for moe in expert.mixtures_of(part))):
        moe.router.loads.copy_(load)
    return update_routers(parts, mesh)


def _update_from_own_tokens(parts: list[nn.Module], mesh: Mesh) -> dict:
    with mock.patch.object(dist, "all_reduce", lambda *args, **options: None):
        return update_routers(parts, mesh)


update_routers = trainer.update_routers


MUTANTS: dict[str, Mutant] = {
    "drop_tp_gradient_reduction": Mutant(
        "gradients of norms, sums over the sequence's parts, are taken for whole (torchtitan 2387, 2416, 1878)",
        "tp=2", "gradient norm.weight", _replaced(trainer, "finish_gradients", _take_partial_for_whole),
    ),
    "chunked_loss_gradient_taken_for_replicated": Mutant(
        "the gradient of hidden states, a sum over vocabulary parts, is labelled replicated (torchtitan 3412)",
        "tp=2,chunk=50", "gradient norm.weight", _replaced(losses, "Partial", Replicate),
    ),
    "attention_on_every_rank_counted_by_each": Mutant(
        "heads do not divide, every rank computes all, and their gradients are taken for parts of a sum",
        "tp=4", "gradient layers.3.attention_norm.weight", _replaced(tensor, "_redistributed", _summed_back),
    ),
    "half_loss": Mutant(
        "the reported loss leaves out ranks (torchtitan 3329, 3280)",
        "fsdp=2", "loss step 1",
        _around_forward_backward(lambda inner, mesh, *args: inner(*args) * (mesh.rank == 0)),
    ),
    "wrong_denominator": Mutant(
        "a mean of per-rank means instead of the global token mean (torchtitan 1842, 2206)",
        "fsdp=2", "loss step 1", _around_forward_backward(_mean_of_means),
    ),
    "padding_counted": Mutant(
        "labels that are ignored count in the denominator (transformers 34191)",
        "tp=2", "loss step 1", _replaced(trainer, "IGNORE", IGNORE - 1),
    ),
    "double_scaled_accumulation": Mutant(
        "the loss is divided by the number of microbatches on top (torchtitan 1733)",
        "accumulate=4", "loss step 1",
        _around_forward_backward(lambda inner, mesh, batches, loss_fn, n: inner(batches, loss_fn, n * len(batches))),
    ),
    "validation_mean_of_batch_means": Mutant(
        "validation averages the means of batches (torchtitan 1758, 2366, 4167)",
        "accumulate=4", "validation loss", _replaced(trainer, "validation_loss", _mean_of_batch_means),
    ),
    "norm_misses_ranks": Mutant(
        "the gradient norm is that of this rank's shards (torchtitan 596, 649)",
        "fsdp=2", "grad_norm step 1", _replaced(trainer, "local_square_sum", _norm_of_own_shards),
    ),
    "gradient_mean_over_ranks": Mutant(
        "FSDP divides by its group's size although the loss is divided already (torchtitan 1551)",
        "fsdp=2", "gradient output.weight", _replaced(FSDPModule, "set_gradient_divide_factor", lambda module, factor: None),
    ),
    "replicas_not_reduced": Mutant(
        "gradients are reduced among shards, not among replicas",
        "hsdp=2x2", "gradient output.weight", _replaced(FSDPModule, "set_requires_all_reduce", lambda module, wanted, recurse: all_reduce_off(module)),
    ),
    "gradients_never_reduced": Mutant(
        "gradient synchronisation stays off after accumulation: gradients are missing",
        "zero1=2", "gradient output.weight", _replaced(FSDPModule, "set_requires_gradient_sync", lambda module, wanted, recurse: sync_off(module)),
    ),
    "untied_at_materialisation": Mutant(
        "tied embeddings come apart when a meta model is materialised (torchtitan 2252)",
        "tied=true", "output output", _replaced(parallelize, "tie", lambda *_: None),
    ),
    "tied_on_one_side": Mutant(
        "tensor parallel leaves the head with a parameter of its own",
        "tied=true,tp=2", "output output", _replaced(tensor, "tie", lambda *_: None),
    ),
    "init_equal_on_all_shards": Mutant(
        "every shard starts with the same random values, as DTensor's own draws do on CPU",
        "fsdp=2", "output tok_embeddings", _replaced(parallelize, "distribute_tensor", _same_values_everywhere),
    ),
    "positions_off_by_one": Mutant(
        "positions belong to the neighbouring token",
        "tp=2", "output layers.0", _with_batches(lambda batch: batch._replace(positions=batch.positions.roll(1, dims=1))),
    ),
    "attention_across_documents": Mutant(
        "packing lets one document attend to another (torchtitan 3130)",
        "fsdp=2", "output layers.0", _with_batches(lambda batch: batch._replace(documents=None)),
    ),
    "uneven_vocabulary_taken_for_even": Mutant(
        "a rank looks for labels in the wrong part of a vocabulary that does not divide",
        "tp=2", "loss step 1", _replaced(losses, "_split_of", _split_evenly),
    ),
    "compile_renames_parameters": Mutant(
        "compiled blocks are wrapped, names gain a prefix (torchtitan 961, 594)",
        "compile=aot_eager", "output layers.0", _replaced(parallelize, "apply_recompute_and_compile", _compiled_in_a_wrapper),
    ),
    "wait_drops_gradients": Mutant(
        "a collective is waited for by hand before a compiled block (PyTorch: its gradient is dropped in silence)",
        "tp=2,compile=aot_eager", "gradient tok_embeddings.weight",
        _replaced(tensor, "_settled", lambda module, inputs, output: getattr(output, "wait", lambda: output)()),
    ),
    "divided_twice_on_one_rank": Mutant(
        "a divide factor on a shard group of one rank is applied twice (PyTorch)",
        "offload=true", "gradient output.weight", _divided_twice_on_one_rank,
    ),
    "positions_of_the_unsplit_sequence": Mutant(
        "a context-parallel rank counts positions as if its part were the row's beginning (torchtitan 792)",
        "cp=2", "output layers.0", _local(lambda batch, part: part._replace(positions=_first_of(batch.positions, part.positions))),
    ),
    "document_mask_not_sliced": Mutant(
        "a context-parallel rank takes the documents of the row's beginning for its part's",
        "cp=2", "output layers.0", _local(lambda batch, part: part._replace(documents=_first_of(batch.documents, part.documents))),
    ),
    "head_tail_order_not_followed_by_labels": Mutant(
        "tokens are dealt head and tail, labels in one piece",
        "cp=2,method=ulysses", "loss step 1", _local(lambda batch, part: part._replace(labels=_first_of(batch.labels, part.labels))),
    ),
    "key_gradients_of_own_queries_only": Mutant(
        "gradients of gathered keys and values, sums over ranks, are taken for whole",
        "cp=2", "gradient layers.3.attention", _replaced(context, "Partial", Replicate),
    ),
    "keys_gathered_along_heads": Mutant(
        "context parallel gathers the head dimension instead of the sequence (torchtitan 3206): here it cannot even run",
        "cp=2", "", _replaced(context, "_over", lambda cp, part, dim: DTensor.from_local(part, cp, [Shard(2)])),
    ),
    "pipeline_scales_gradients": Mutant(
        "a pipeline schedule divides gradients by its number of microbatches (torchtitan 1733)",
        "pp=2", "gradient output.weight", _replaced(pipeline, "_build_schedule", _scaling_schedule),
    ),
    "norm_of_the_first_stage": Mutant(
        "the gradient norm leaves out the other pipeline stages (torchtitan 596, 649)",
        "pp=2", "grad_norm step 1", _replaced(trainer, "local_square_sum", _norm_of_the_first_stage),
    ),
    "loss_of_the_first_stage": Mutant(
        "the loss is taken from ranks that do not have the last pipeline stage (torchtitan 550)",
        "pp=2", "loss step 1", _replaced(Mesh, "counts_loss", property(lambda mesh: mesh.data.get_local_rank("tp") == 0 and mesh.pp_rank == 0)),
    ),
    "zero_bubble_with_reshard": Mutant(
        "parameters are dropped between the two halves of a split backward (PyTorch: gradients go missing in silence)",
        "fsdp=2,pp=2,schedule=ZBVZeroBubble", "gradient", _replaced(data_parallel, "fully_shard", _resharded),
    ),
    "tied_gradients_of_one_stage": Mutant(
        "embedding and head lie in two stages, and each keeps its own gradient",
        "pp=2,tied=true", "gradient output.weight", _replaced(pipeline, "_add_tied_gradients", lambda parts, mesh: None),
    ),
    "tied_copies_start_apart": Mutant(
        "the head's copy of the embedding starts with values of its own",
        "pp=2,tied=true", "output output", _replaced(parallelize, "copies", lambda parts: {}),
    ),
    "tied_gradient_counted_twice": Mutant(
        "the gradient norm counts both copies of a tied parameter",
        "pp=2,tied=true", "grad_norm step 1", _replaced(trainer, "copies", lambda parts: {}),
    ),
    "positions_of_another_row": Mutant(
        "positions do not travel with their rows through the pipeline",
        "pp=2", "output layers.0", _joined(lambda rows: rows._replace(positions=rows.positions.roll(1, dims=0))),
    ),
    "documents_of_another_row": Mutant(
        "document masks do not travel with their rows through the pipeline",
        "pp=2,schedule=ZBVZeroBubble", "output layers.0", _joined(lambda rows: rows._replace(documents=rows.documents.roll(1, dims=0))),
    ),
    "labels_of_another_microbatch": Mutant(
        "the last stage takes the labels of another microbatch than its output's",
        "pp=2,schedule=DualPipeV", "loss step 1", _replaced(pipeline, "_split", lambda rows, size: split(rows, size)[::-1]),
    ),
    "labels_of_one_context_rank_counted": Mutant(
        "the label count leaves out the other parts of the sequence (torchtitan 3329)",
        "cp=2,tp=2", "loss step 1",
        _around_forward_backward(lambda inner, mesh, batches, loss_fn, n: inner(batches, loss_fn, n / 2)),
    ),
    "router_gradient_of_own_tokens": Mutant(
        "tensor parallel without experts' own: each rank keeps the router's gradient of its part of the sequence",
        "tp=2", "gradient layers.3.moe.router.gate.weight",
        lambda: mock.patch.dict(tensor.STYLES, {"local_norm": _Local}), "deepseek_v3",
    ),
    "expert_gradients_over_the_smaller_mesh": Mutant(
        "expert gradients are divided by the size of another mesh (torchtitan 1551)",
        "ep=2,fsdp=4", "gradient layers.3.moe.experts.w3", _replaced(FSDPModule, "set_gradient_divide_factor", _divided_by_the_experts_mesh), "deepseek_v3",
    ),
    "swapped_experts": Mutant(
        "a rank takes its experts in another order than the tokens that are sent to them",
        "ep=2", "output layers.1", _over_ep_with(_swap), "deepseek_v3",
    ),
    "silent_drops": Mutant("one row in eight is lost on its way to its expert", "ep=2", "output layers.1", _over_ep_with(_drop), "deepseek_v3"),
    "replicated_expert_bias_multiplied": Mutant(
        "an expert's bias is added on every rank before their parts are summed (torchtitan 4245)",
        "etp=2", "gradient layers.3.moe.experts.b2", _replaced(expert, "_counted_once", lambda weight, etp: weight), "gpt_oss",
    ),
    "balance_loss_of_own_part_of_the_row": Mutant(
        "the balance loss takes the loads of a rank's part of a row for those of the row",
        "cp=2", "gradient", _replaced(expert, "_sum", lambda group, loads: loads), "gpt_oss",
    ),
    "balance_loss_of_a_microbatch": Mutant(
        "the balance loss is not divided by the labels of the step",
        "accumulate=4", "gradient", _replaced(trainer, "set_loss_scale", lambda parts, scale: expert.set_loss_scale(parts, 4 * scale)), "gpt_oss",
    ),
    "decays_of_the_first_heads": Mutant(
        "every rank's heads have the decays of the first rank's", "tp=2", "output layers.0",
        _replaced(LightningCore, "hold", lambda core, rank, size, hold=LightningCore.hold: hold(core, 0, size)), "minimax",
    ),
    "norm_of_own_heads": Mutant(
        "a norm over all heads takes the mean over the rank's own", "tp=2", "output layers.0",
        _replaced(WidthNorm, "normed", lambda norm, x, weight: nn.functional.rms_norm(x, x.shape[-1:], weight, norm.eps)), "minimax",
    ),
    "state_goes_through_documents": Mutant(
        "a context-parallel rank's lightning attention takes a row for one document", "cp=2", "output layers.0",
        _replaced(LightningCore, "forward", lambda core, q, k, v, positions, documents: core.advance(q, k, v, None, None)[0]), "minimax",
    ),
    "tokens_ahead_of_own_part": Mutant(
        "the token after next is taken from a context-parallel rank's part of the sequence",
        "cp=2,mtp=1", "output mtp_embeddings", _local(lambda batch, part: with_ahead(part, 1)), "deepseek_v3",
    ),
    "further_tokens_count_as_losses": Mutant(
        "what is predicted further ahead is divided by its own microbatch's labels", "accumulate=4,mtp=1", "gradient",
        _replaced(trainer, "multi_token_loss", lambda output, batch, weight, **others: losses.multi_token_loss(output, batch, weight=4 * weight, **others)),
        "deepseek_v3",
    ),
    "expert_bias_of_own_tokens": Mutant(
        "each rank moves the experts' biases by its own loads", "fsdp=4", "later", _replaced(trainer, "update_routers", _update_from_own_tokens), "deepseek_v3",
    ),
    "expert_bias_updated_twice": Mutant(
        "the experts' biases move twice a step", "ep=2", "later", _replaced(trainer, "update_routers", _update_twice), "deepseek_v3",
    ),
    "expert_bias_follows_validation": Mutant(
        "routing in validation counts as load (torchtitan 4148)", "ep=2", "later", _replaced(expert, "_count", _count_everything), "deepseek_v3",
    ),
    "load_counted_again_in_recompute": Mutant(
        "recomputed blocks count their tokens again", "ep=2,recompute=2", "later", _replaced(expert, "in_backward", lambda: False), "deepseek_v3",
    ),
    "expert_bias_is_not_updated": Mutant(
        "the experts' biases never move (torchtitan 1226)", "ep=2", "later", _replaced(trainer, "update_routers", lambda parts, mesh: {}), "deepseek_v3",
    ),
}  # fmt: skip


split = pipeline._split


def all_reduce_off(module: FSDPModule, set_all_reduce: Callable = FSDPModule.set_requires_all_reduce) -> None:
    set_all_reduce(module, False, recurse=False)


def sync_off(module: FSDPModule, set_sync: Callable = FSDPModule.set_requires_gradient_sync) -> None:
    set_sync(module, False, recurse=False)


def find_mutant(name: str) -> Mutant:
    if name not in MUTANTS:
        raise ConfigError(f"--plant {name}: no such fault{nearest(name, MUTANTS)} (`--plant list` shows them)")
    return MUTANTS[name]


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Runs with the fault in place, or as it is."""
    with contextlib.nullcontext() if name is None else find_mutant(name).patch():
        yield
