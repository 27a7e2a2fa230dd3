"""Runs a layout and one rank on the same batch from the same initial weights, and compares them tensor by tensor."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite import trainer
from titanlite.batch import IGNORE, Batch
from titanlite.config import Config, override
from titanlite.models import get_args, get_plan
from titanlite.parallel.context import sequence_index
from titanlite.parallel.pipeline import copies
from titanlite.trainer import Run, join, place, setup, train_step
from titanlite.verify.gang import Gang, RankFailed
from titanlite.verify.layouts import ACCUMULATE, ROWS, SEQ_LEN, STEPS, Layout, base_config
from titanlite.verify.mutants import planted

# A layout adds in another order than one rank. How far that may carry is measured on the reference itself: its weights
# are moved by one unit in the last place, and each kind of result may differ by DRIFTS times what that changes. A sum
# reordered at every operation is a few such moves; a wrong term is thousands of millions of them.
DRIFTS = 8
FP64_FLOOR = 1e-12  # well above fp64's 1e-15 for these sums, far below any fault

LAYOUTS_A_GANG = 4

Values = dict[str, Any]  # kind -> name -> value
KINDS = ("output", "loss", "gradient", "grad_norm", "validation", "later", "parameter")  # in the order in which a fault would show


@dataclass(frozen=True)
class Verdict:
    layout: str
    kind: str  # where the relative error is largest against its tolerance
    name: str
    error: float
    tolerance: float
    first_difference: str  # empty: the layout computes what one rank computes

    def __str__(self) -> str:
        end = f"DIFFERS {self.first_difference}" if self.first_difference else "ok"
        worst = f"{self.kind} {self.name}"
        return f"{self.layout:<42} {worst:<58} error {self.error:.1e}  tolerance {self.tolerance:.1e}  {end}"


def verify(layouts: list[Layout], *, plant: str | None = None) -> Iterator[Verdict]:
    """A verdict for each layout, in the order in which gangs of equal size can be shared.

    `plant` names a fault of `mutants` that the layouts (not the reference) are run with.
    """
    with tempfile.TemporaryDirectory() as folder:
        references: dict[tuple, Path] = {}
        for gang, layout in _with_gangs(layouts):
            key = layout.reference_key
            if key not in references:
                references[key] = Path(folder) / f"reference_{len(references)}.pt"
                _on_one_rank(_save_reference, layout, references[key])
            yield _judge(layout, gang, references[key], plant)


def _with_gangs(layouts: list[Layout]) -> Iterator[tuple[Gang, Layout]]:
    """Each layout with a gang of its size, which a few share: one slows down with every set of process groups it has made."""
    for world_size in sorted({layout.world_size for layout in layouts}):
        of_this_size = [layout for layout in layouts if layout.world_size == world_size]
        for i in range(0, len(of_this_size), LAYOUTS_A_GANG):
            gang = Gang(world_size)
            try:
                for layout in of_this_size[i : i + LAYOUTS_A_GANG]:
                    yield gang, layout
            finally:
                gang.close()


def _on_one_rank(fn: Callable, *args: Any) -> None:
    gang = Gang(1)
    try:
        gang.run(fn, *args)
    finally:
        gang.close()


def _judge(layout: Layout, gang: Gang, reference: Path, plant: str | None) -> Verdict:
    try:
        errors_by_rank = gang.run(_compare, layout.cfg, reference, plant)
    except RankFailed as failure:
        last_line = str(failure).strip().splitlines()[-1]
        return Verdict(layout.text, "failed", "", np.inf, 0.0, f"it fails: {last_line}")
    tolerances = torch.load(reference, weights_only=False)["tolerances"]
    stage_size = layout.world_size // layout.cfg.parallelism.pipeline_parallel_degree
    worst, first = ("", "", 0.0), ""
    for kind in KINDS:
        names = dict.fromkeys(name for errors in errors_by_rank for name in errors[kind])
        errors = {name: _over_ranks([errors[kind].get(name) for errors in errors_by_rank], stage_size) for name in names}
        # Backward goes through the model from the end: the last parameter that differs is the first that went wrong.
        order = list(reversed(errors)) if kind == "gradient" else list(errors)
        wrong = [name for name in order if not errors[name] <= tolerances[kind]]
        if wrong and not first:
            first = f"first in {kind} {wrong[0]}".rstrip() + (f" ({len(wrong)} of {len(errors)})" if len(errors) > 1 else "")
        name = max(errors, key=lambda n: np.nan_to_num(errors[n], nan=np.inf))
        if not worst[0] or not errors[name] / tolerances[kind] <= worst[2] / tolerances[worst[0]]:
            worst = (kind, name, errors[name])
    kind, name, error = worst
    return Verdict(layout.text, kind, name, error, tolerances[kind], first)


def _over_ranks(errors: list[float | None], stage_size: int) -> float:
    """The largest; infinite where not all ranks of some pipeline stages, and only those, have the tensor."""
    stages = [errors[i : i + stage_size] for i in range(0, len(errors), stage_size)]
    stages = [stage for stage in stages if set(stage) != {None}]
    found = [error for stage in stages for error in stage]
    return max(found) if found and None not in found else np.inf


def _save_reference(layout: Layout, path: Path) -> None:
    """One rank, plain in everything that only concerns how the computation is done; with the tolerances for others."""
    cfg = plain(layout.cfg)
    reference, moved = observe(cfg), observe(cfg, ulp=True)
    dtype = cfg.training.mixed_precision_param
    floor = FP64_FLOOR if dtype == "float64" else torch.finfo(getattr(torch, dtype)).eps  # a drift may happen to be nothing
    tolerances = {
        kind: max(floor, DRIFTS * max(_error(moved[kind][name], value) for name, value in reference[kind].items()))
        for kind in KINDS
    }
    torch.save({"values": reference, "tolerances": tolerances}, path)


def plain(cfg: Config) -> Config:
    """The same computation on one rank, with no pass but mixed precision."""
    same = {f"training.{name}": getattr(cfg.training, name) for name in ("dtype", "mixed_precision_param")}
    base = dataclasses.replace(base_config(cfg), model=cfg.model)
    return override(base, same | {"training.local_batch_size": ROWS // ACCUMULATE})


def _compare(cfg: Config, reference: Path, plant: str | None) -> dict[str, dict[str, float | None]]:
    """kind -> name -> relative error on this rank; None where it does not have the tensor."""
    with planted(plant):
        ours = observe(cfg)
    expected = torch.load(reference, weights_only=False)["values"]
    errors: dict[str, dict[str, float | None]] = {}
    for kind in KINDS:
        errors[kind] = dict.fromkeys(name for name in expected[kind] if not (kind == "output" and name.split(" +")[0] in ours["skipped"]))
        for name, value in ours[kind].items():
            reference_value = expected[kind].get(ours["copies"].get(name, name))
            if kind == "output" and reference_value is not None:
                reference_value = reference_value[ours["slices"][name]]
            errors[kind][name] = _error(value, reference_value)
    return errors


def _error(ours: np.ndarray, expected: np.ndarray | None) -> float:
    if expected is None or ours.shape != expected.shape:
        return np.inf
    return float(np.abs(ours - expected).max() / max(np.abs(expected).max(), np.finfo(np.float64).tiny))


def observe(cfg: Config, *, ulp: bool = False) -> Values:
    """What this rank sees of validation, then STEPS steps: in the first, outputs, loss, gradients and norm; later, loss and
    norm; in the end, weights.

    Gradients and weights are whole; an output is this rank's part of [ROWS, SEQ_LEN, ...], "slices" says which. With
    `ulp` the initial weights are moved by one unit in the last place, up or down.
    """
    if cfg.compile.enable:
        torch._dynamo.reset()
    run = setup(cfg, join(cfg))
    if ulp:
        _move(run)
    whole_rows = _microbatches(run)
    microbatches = [place(run, batch) for batch in whole_rows]
    values: Values = {kind: {} for kind in (*KINDS, "slices")}
    values["copies"] = copies(run.parts)
    values["skipped"] = {get_plan(cfg.model).head} if cfg.training.loss_chunk_tokens else set()
    # Before the steps, which it must not disturb.
    values["validation"]["loss"] = np.array(trainer.validation_loss(run, iter(_microbatches(run, other=True))))
    with _recorded(run, values):
        for step in range(STEPS):
            measured = train_step(run, microbatches, run.loss_fn)
            for kind, value in (("loss", measured.loss), ("grad_norm", measured.grad_norm)):
                values["later" if step else kind][f"{kind} of step {step + 1}" if step else "step 1"] = np.array(value)
            values["later"] |= {f"{name} of step {step + 1}": np.array(value) for name, value in measured.figures.items()}
    values["parameter"] = {name: _whole(p) for name, p in _named_parameters(run)}
    for part in run.parts:
        kept = part.state_dict().keys()
        values["parameter"] |= {name: _whole(buffer) for name, buffer in part.named_buffers() if name in kept}
    return values


@contextlib.contextmanager
def _recorded(run: Run, values: Values) -> Iterator[None]:
    """Records outputs and gradients of the first step."""
    plan = get_plan(run.cfg.model)
    outputs: dict[str, list[np.ndarray]] = {}
    hooks = []
    for part in run.parts:
        for name, module in part.named_modules():
            if name in (*plan.first, *plan.last, *plan.blocks_of(part)) and name not in values["skipped"]:
                hooks.append(module.register_forward_hook(lambda _, inputs, out, name=name: keep(name, out)))

    def keep(name: str, out: Tensor) -> None:
        if run.step == 0:
            outputs.setdefault(name, []).extend(_whole(piece) for piece in out.split(run.cfg.training.local_batch_size))

    def finish_and_keep(parameters: Iterator[nn.Parameter]) -> None:
        finish(parameters)
        if run.step == 0:
            values["gradient"] = {name: _whole(p.grad) for name, p in _named_parameters(run) if p.grad is not None}

    finish = trainer.finish_gradients
    with mock.patch.object(trainer, "finish_gradients", finish_and_keep):
        yield
    for hook in hooks:
        hook.remove()
    rows = ROWS // run.mesh.degrees.batch
    for name, pieces in outputs.items():
        times = len(pieces) * run.cfg.training.local_batch_size // rows  # of each row: once more for every token further ahead
        for ahead in range(times):
            label = f"{name} +{ahead}" if ahead else name
            values["output"][label] = np.concatenate(pieces[ahead::times])
            part = values["output"][label].shape[1]
            index = sequence_index(SEQ_LEN, run.mesh, run.cfg.parallelism).numpy()
            if part < len(index):  # sequence parallel
                index = index[run.mesh.data.get_local_rank("tp") * part :][:part]
            values["slices"][label] = np.ix_(range(run.mesh.batch_rank * rows, (run.mesh.batch_rank + 1) * rows), index)


def make_batch(vocab_size: int) -> Batch:
    """ROWS rows of up to four documents, each row with a padded tail of another length, the last row all padding."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    labels, positions = tokens[:, 1:].clone(), torch.arange(SEQ_LEN).repeat(ROWS, 1)
    documents = torch.zeros(ROWS, SEQ_LEN, dtype=torch.int64)
    for row in range(ROWS):
        end = SEQ_LEN - row * SEQ_LEN // (ROWS - 1)  # where the padding starts
        cuts = (torch.randperm(SEQ_LEN - 1, generator=generator)[: row % 4] + 1).tolist()
        for cut in sorted({*cuts, end} - {0, SEQ_LEN}):
            documents[row, cut:] += 1
            positions[row, cut:] = torch.arange(SEQ_LEN - cut)
            labels[row, cut - 1] = IGNORE
        labels[row, end:] = IGNORE
    return Batch(tokens[:, :-1].contiguous(), labels, positions, documents)


def _microbatches(run: Run, *, other: bool = False) -> list[Batch]:
    """This rank's; `other`: with other tokens."""
    vocab_size, size = get_args(run.cfg.model).vocab_size, run.cfg.training.local_batch_size
    batch = make_batch(vocab_size)
    if other:
        batch = batch._replace(tokens=batch.tokens // 2, labels=torch.where(batch.labels == IGNORE, IGNORE, batch.labels // 2))
    rows = ROWS // run.mesh.degrees.batch
    start = run.mesh.batch_rank * rows
    return [Batch(*(None if x is None else x[i : i + size] for x in batch)) for i in range(start, start + rows, size)]


@torch.no_grad()
def _move(run: Run) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in run.parameters():
        up = torch.randint(0, 2, p.shape, generator=generator).to(p.device, p.dtype) * 2 - 1
        p *= 1 + up * torch.finfo(p.dtype).eps


def _named_parameters(run: Run) -> Iterator[tuple[str, nn.Parameter]]:
    return (pair for part in run.parts for pair in part.named_parameters())


def _whole(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double().cpu().numpy().copy()
