"""What each form of data parallel holds, in bytes, at two moments of a step."""

import pytest
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from tests.runs import microbatches_of, rows, small_config
from titanlite.trainer import join, setup, train_step

FORMS = {
    "replicate": ("--parallelism.data_parallel_replicate_degree", "2"),
    "zero1": ("--parallelism.data_parallel_sharding", "zero1"),
    "zero2": ("--parallelism.data_parallel_sharding", "zero2"),
    "zero3": ("--parallelism.data_parallel_sharding", "zero3"),
}


def _held(cfg, batch) -> dict[str, float]:
    """Bytes of one block's gathered parameters and gradients after the first of two microbatches, and of the optimizer's
    state, each as a share of the block's parameters."""
    run = setup(cfg, join(cfg))
    block = run.parts[0].layers["0"]
    group = block._get_fsdp_state()._fsdp_param_group
    numel = sum(p.numel() for p in block.parameters())
    held = {}

    calls = []

    def between_microbatches(*_):
        calls.append(None)
        if len(calls) != 2:
            return
        held["parameters"] = _numel(block.parameters()) / numel
        grads = [g for p in group.fsdp_params for g in (p.sharded_param.grad, p.unsharded_accumulated_grad) if g is not None]
        gathered = [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        grads += [p.grad for p in gathered if p.grad is not None]
        held["gradients"] = _numel(grads) / numel

    run.parts[0].tok_embeddings.register_forward_pre_hook(between_microbatches)
    train_step(run, microbatches_of(run, batch), run.loss_fn)
    held["optimizer"] = _numel(run.optimizer.state[p]["exp_avg"] for p in block.parameters()) / numel
    return held


def _numel(tensors) -> int:
    """Elements in memory on this rank; several tensors may lie in one storage."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in local}.values())


@pytest.mark.parametrize(
    "form, parameters, gradients, optimizer",
    [("replicate", 1, 1, 1), ("zero1", 1, 1, 0.5), ("zero2", 1, 0.5, 0.5), ("zero3", 0.5, 0.5, 0.5)],
)
def test_each_form_holds_what_its_name_says_between_microbatches(tmp_path, form, parameters, gradients, optimizer):
    cfg = small_config(tmp_path, "--training.local_batch_size", "2", *FORMS[form])
    for held in run_ranks(_held, 2, cfg, rows("even", 8)):
        # Gathered parameters stand beside their shard; padding of uneven shards adds a little.
        assert held["optimizer"] == pytest.approx(optimizer, rel=0.02)
        assert held["gradients"] == pytest.approx(gradients, rel=0.02)
        assert held["parameters"] == pytest.approx(parameters, rel=0.02)
