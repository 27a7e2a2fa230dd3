"""The exchange by DeepEP, with a stand-in for its buffer that sends over gloo: it shows that what is asked of DeepEP is right."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from tests.parallel.test_expert import config
from tests.ranks import run_ranks
from tests.test_validate import mistake
from titanlite import validate
from titanlite.parallel import deepep
from titanlite.trainer import join, place, setup, train_step, validation_loss
from titanlite.verify.compare import _microbatches


class Buffer:
    """As DeepEP says of ElasticBuffer: a token goes once to each rank of its experts, and is summed over those."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def dispatch(self, x, topk_idx=None, topk_weights=None, num_experts=None, num_max_tokens_per_rank=None, handle=None):
        if handle is None:
            assert len(x) <= num_max_tokens_per_rank
            handle = SimpleNamespace(chosen=self.gathered(topk_idx), weights=self.gathered(topk_weights), local=num_experts // self.size)
            handle.mine = [(c // handle.local == self.rank).any(1) for c in handle.chosen]  # of each rank's tokens, those for this one
        received = torch.cat([part[mine] for part, mine in zip(self.gathered(x), handle.mine)])
        chosen, weights = (torch.cat([part[mine] for part, mine in zip(all_, handle.mine)]) for all_ in (handle.chosen, handle.weights))
        here = chosen // handle.local == self.rank
        return received, torch.where(here, chosen % handle.local, -1), weights * here, handle, None

    def combine(self, x, handle, topk_weights=None):
        sums = []
        for values in [x] if topk_weights is None else [x, topk_weights]:
            pieces = iter(values.split([int(mine.sum()) for mine in handle.mine]))
            whole = [values.new_zeros(len(mine), values.shape[1]).index_put((mine,), next(pieces)) for mine in handle.mine]
            for rank, part in enumerate(whole):
                dist.all_reduce(part, group=self.group)
                if rank == self.rank:
                    sums.append(part)
        return sums[0], sums[1] if len(sums) > 1 else None, None

    def gathered(self, tensor):
        parts = [None] * self.size
        dist.all_gather_object(parts, tensor, group=self.group)
        return parts


def test_a_step_with_deepeps_exchange_equals_one_with_all_to_all():
    def gradients(backend: str):
        cfg = config("deepseek_v3", "ep=2,fsdp=2,recompute=full", parallelism__expert_parallel_comm_backend=backend)
        run = setup(cfg, join(cfg))
        batches = [place(run, batch) for batch in _microbatches(run)]
        heldout = validation_loss(run, iter(_microbatches(run, other=True)))
        run.forward_backward(batches, run.loss_fn, torch.tensor(100.0, dtype=torch.float64))
        values = {n: p.grad.to_local().clone() if hasattr(p.grad, "to_local") else p.grad.clone() for n, p in run.parts[0].named_parameters()}
        run.optimizer.zero_grad()
        step = train_step(run, batches, run.loss_fn)
        return values, heldout, step.loss, step.figures

    def both():
        def build(group, n_experts):
            return deepep.Exchange(n_experts, n_experts // group.size(), lambda *sizes: Buffer(group))

        with mock.patch.object(validate, "_check_deepep"), mock.patch.object(deepep, "build_exchange", build):
            return gradients("standard"), gradients("deepep")

    for (expected, *figures), (ours, *same) in run_ranks(both, 2):
        # fp64; sums over a token's choices are made in another order.
        assert all((ours[name] - g).abs().max() <= 1e-12 for name, g in expected.items())
        torch.testing.assert_close(same, figures, rtol=1e-12, atol=0)


def test_deepep_is_refused_with_all_that_it_lacks():
    values = {"model__name": "deepseek_v3", "parallelism__expert_parallel_comm_backend": "deepep", "training__mixed_precision_param": "float32"}
    assert str(mistake(2, **values)) == (
        "parallelism.expert_parallel_comm_backend='deepep' needs parallelism.expert_parallel_degree above 1, "
        "training.mixed_precision_param='bfloat16', CUDA devices, the package deep_ep: use 'standard', or see to these"
    )
