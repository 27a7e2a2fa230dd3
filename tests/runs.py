"""Small runs on made-up batches, for tests that compare layouts."""

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from titanlite.batch import IGNORE, Batch
from titanlite.config import Config, load_config
from titanlite.trainer import Run, join, place, setup, train_step

SEQ_LEN, VOCAB = 32, 257


def small_config(tmp_path, *overrides: str) -> Config:
    """The debug model in fp64 without mixed precision, one row a microbatch; `overrides` on top."""
    path = tmp_path / "small.toml"
    path.write_text(
        f"[training]\nseq_len = {SEQ_LEN}\nlocal_batch_size = 1\nsteps = 10\nmax_norm = 0.0\ndtype = 'float64'\n"
        "mixed_precision_param = 'float64'\n[lr_scheduler]\nwarmup_steps = 0\n[activation_checkpoint]\nmode = 'none'\n"
    )
    return load_config(path, overrides)[0]


def rows(kind: str, n: int) -> Batch:
    """n rows: `even`, `padded` (a different tail of each row is not trained; one row not at all), `packed` (documents)."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (n, SEQ_LEN + 1), generator=generator)
    labels, positions, documents = tokens[:, 1:].clone(), torch.arange(SEQ_LEN).repeat(n, 1), None
    if kind == "padded":
        for i in range(n):
            labels[i, SEQ_LEN * i // (n - 1) :] = IGNORE
    if kind == "packed":
        documents = torch.zeros(n, SEQ_LEN, dtype=torch.int64)
        for i in range(n):
            for cut in sorted((torch.randperm(SEQ_LEN - 1, generator=generator)[: i % 4] + 1).tolist()):
                documents[i, cut:] += 1
                positions[i, cut:] = torch.arange(SEQ_LEN - cut)
                labels[i, cut - 1] = IGNORE
    return Batch(tokens[:, :-1].contiguous(), labels, positions, documents)


def microbatches_of(run: Run, batch: Batch) -> list[Batch]:
    """This rank's part of the global batch, in microbatches of training.local_batch_size."""
    ranks, size = run.mesh.degrees.batch, run.cfg.training.local_batch_size
    mine = len(batch.tokens) // ranks
    start = run.mesh.batch_rank * mine
    cut = lambda x, i: None if x is None else x[i : i + size]  # noqa: E731
    return [place(run, Batch(*(cut(x, i) for x in batch))) for i in range(start, start + mine, size)]


def full(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double().numpy().copy()


def step_of(cfg: Config, batch: Batch) -> dict:
    """One train_step on this rank: loss, grad_norm, and every gradient and updated parameter, whole, by name."""
    run = setup(cfg, join(cfg))
    gradients = {}

    def capture(*_):
        for part in run.parts:
            for name, p in part.named_parameters():
                assert p.grad is not None, f"{name} has no gradient"
                gradients[name] = full(p.grad)

    run.optimizer.register_step_pre_hook(capture)
    measured = train_step(run, microbatches_of(run, batch), run.loss_fn)
    parameters = {name: full(p) for part in run.parts for name, p in part.named_parameters()}
    return {"loss": measured.loss, "norm": measured.grad_norm, "gradients": gradients, "parameters": parameters}


def worst_error(ours: dict, reference: dict) -> float:
    """Largest difference over tensors, each relative to the reference tensor's largest value."""
    assert ours.keys() == reference.keys()
    return max(float(np.abs(ours[k] - reference[k]).max() / np.abs(reference[k]).max()) for k in reference)
