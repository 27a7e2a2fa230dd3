"""Losses against closed forms and against each other."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks import run_ranks
from titanlite.batch import IGNORE, Batch
from titanlite.losses import chunk_loss, cross_entropy

B, S, D, V = 3, 7, 16, 11  # V divides by nothing


def case() -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """hidden [B, S, D], weight [V, D], labels with ignored ones, fp64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, S, D, dtype=torch.float64, generator=generator)
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[0], labels[1, 3] = IGNORE, IGNORE
    return hidden, weight, Batch(labels, labels, labels, None)


def reference() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight, batch = case()
    hidden.requires_grad_(), weight.requires_grad_()
    counted = batch.labels != IGNORE
    log_probabilities = (hidden @ weight.T).log_softmax(-1)
    loss = -log_probabilities[counted].gather(1, batch.labels[counted][:, None]).sum()
    (3 * loss).backward()
    return loss.detach(), hidden.grad, weight.grad


def test_cross_entropy_is_the_sum_of_minus_log_probabilities_over_labels():
    hidden, weight, batch = case()
    loss, d_hidden, _ = reference()
    hidden.requires_grad_()
    ours = cross_entropy(hidden @ weight.T, batch)
    (3 * ours).backward()
    torch.testing.assert_close(ours.detach(), loss, rtol=1e-14, atol=0)
    torch.testing.assert_close(hidden.grad, d_hidden, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("chunk_tokens", [1, 5, B * S, 100])
def test_chunked_loss_and_gradients_equal_the_plain_ones(chunk_tokens):
    hidden, weight, batch = case()
    loss, d_hidden, d_weight = reference()
    head = nn.Linear(D, V, bias=False, dtype=torch.float64)
    head.weight.data.copy_(weight)
    hidden.requires_grad_()
    ours = chunk_loss(head, chunk_tokens)(head(hidden), batch)
    (3 * ours).backward()
    torch.testing.assert_close(ours.detach(), loss, rtol=1e-14, atol=0)
    torch.testing.assert_close(hidden.grad, d_hidden, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(head.weight.grad, d_weight, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_loss_in_low_precision_equals_the_plain_one(dtype):
    """Both make logits in that dtype and the rest in fp32. Gradients meet at the dtype's own rounding: sums in another order."""
    hidden, weight, batch = (x.to(dtype) if isinstance(x, torch.Tensor) else x for x in case())
    results = []
    for chunk_tokens in (0, 5):
        head = nn.Linear(D, V, bias=False, dtype=dtype)
        head.weight.data.copy_(weight)
        x = hidden.clone().requires_grad_()
        loss_fn = chunk_loss(head, chunk_tokens) if chunk_tokens else cross_entropy
        loss = loss_fn(head(x), batch)
        loss.backward()
        results.append((loss.detach(), x.grad, head.weight.grad))
    assert results[1][0].dtype == torch.float32
    tolerance = 4 * torch.finfo(dtype).eps
    for plain, chunked in zip(*results):
        assert (plain - chunked).abs().max() <= tolerance * plain.abs().max()


def test_no_label_at_all_gives_zero_and_no_gradient():
    hidden, weight, batch = case()
    batch = batch._replace(labels=torch.full((B, S), IGNORE))
    for loss_fn in (cross_entropy, None):
        head = nn.Linear(D, V, bias=False, dtype=torch.float64)
        loss_fn = loss_fn or chunk_loss(head, 4)
        loss = loss_fn(head(hidden), batch)
        loss.backward()
        assert loss.item() == 0 and head.weight.grad.abs().max() == 0


def _split() -> dict[str, tuple]:
    """Vocabulary over 2 ranks in parts of 6 and 5: (loss, gradient by hidden, gradient by weight) of both losses."""
    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for name, chunk_tokens in (("split", 0), ("split, chunked", 4)):
        hidden, weight, batch = case()
        head = nn.Linear(D, V, bias=False, dtype=torch.float64)
        head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        x = hidden.clone().requires_grad_()
        loss_fn = chunk_loss(head, chunk_tokens) if chunk_tokens else cross_entropy
        loss = loss_fn(head(DTensor.from_local(x, mesh, [Replicate()])), batch)
        (3 * loss).backward()
        weight_grad = head.weight.grad.full_tensor()
        # Where x came in whole on every rank, its gradient is the whole one, too.
        results[name] = tuple(t.detach().numpy() for t in (loss, x.grad, weight_grad))
    return results


def test_a_loss_over_a_split_vocabulary_equals_the_plain_one():
    expected = reference()
    for result in run_ranks(_split, 2):
        for ours in result.values():
            for a, b in zip(ours, expected):
                torch.testing.assert_close(torch.from_numpy(a), b, rtol=1e-13, atol=1e-14)


MEMORY = """
import re, sys, torch
from torch import nn
from titanlite.batch import Batch
from titanlite.losses import chunk_loss, cross_entropy
N, D, V, chunk = 1024, 64, 128_000, int(sys.argv[1])
head = nn.Linear(D, V, bias=False)
labels = torch.randint(0, V, (1, N))
hidden = torch.randn(1, N, D, requires_grad=True)
loss_fn = chunk_loss(head, chunk) if chunk else cross_entropy
(hidden[:, :1] @ head.weight.T).sum().backward()  # gradients exist before the count starts
peak_kib = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])  # ru_maxrss is the parent's, too
before = peak_kib()
loss_fn(head(hidden), Batch(labels, labels, labels, None)).backward()
print((peak_kib() - before) * 1024)
"""


def test_chunked_loss_at_vocabulary_128k_never_holds_whole_logits():
    """Logits of 1,024 tokens take 500 MiB in fp32, and the plain loss holds them at least twice; 64 tokens take 31 MiB."""
    run = lambda chunk: int(subprocess.run([sys.executable, "-c", MEMORY, str(chunk)], capture_output=True, text=True, check=True).stdout)  # noqa: E731
    logits_bytes = 1024 * 128_000 * 4
    assert run(0) > 1.9 * logits_bytes
    # Three chunks of logits at a time, the gradient of the weight (31 MiB) twice, and the allocator's slack.
    assert run(64) < 0.5 * logits_bytes
