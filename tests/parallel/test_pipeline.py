"""What a pipeline does beyond agreeing with one rank (tests/verify): copies stay equal, schedules from files, what each rank holds."""

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.runs import full, microbatches_of, rows, small_config, step_of, worst_error
from titanlite.losses import cross_entropy
from titanlite.parallel.forward_backward import forward_only
from titanlite.trainer import join, setup, train_step

PP = ("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4")
ZBV = (*PP, "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble")


def _reference(cfg, batch):
    return step_of(cfg, batch)


def _tied_weights(cfg, batch, n_steps: int) -> dict[str, list]:
    """This rank's embedding and head weights, before and after some steps."""
    run = setup(cfg, join(cfg))
    seen = {}

    def look() -> None:
        for part in run.parts:
            for name, p in part.named_parameters():
                if name in ("tok_embeddings.weight", "output.weight"):
                    seen.setdefault(name, []).append(full(p))

    look()
    for _ in range(n_steps):
        train_step(run, microbatches_of(run, batch), run.loss_fn)
        look()
    return seen


@pytest.mark.parametrize(
    "options, dtype",
    [
        (PP, "bfloat16"),
        (ZBV, "float32"),
        ((*PP, "--parallelism.tensor_parallel_degree", "2"), "float32"),
        ((*ZBV, "--parallelism.data_parallel_shard_degree", "2"), "bfloat16"),
    ],
)
def test_both_copies_of_a_tied_weight_stay_bit_equal_over_steps(tmp_path, options, dtype):
    fused = ("--training.dtype", "float32", "--training.mixed_precision_param", dtype, "--training.max_norm", "0.1")
    cfg = small_config(tmp_path, "--model.tie_embeddings", "true", *options, *fused)
    world_size = 4 if {"--parallelism.tensor_parallel_degree", "--parallelism.data_parallel_shard_degree"} & {*options} else 2
    results = run_ranks(_tied_weights, world_size, cfg, rows("padded", 8), 4)
    embeddings = [r["tok_embeddings.weight"] for r in results if "tok_embeddings.weight" in r]
    heads = [r["output.weight"] for r in results if "output.weight" in r]
    assert len(embeddings) == len(heads) == world_size // 2
    for step in range(5):
        for weight in (*embeddings, *heads):
            assert np.array_equal(weight[step], embeddings[0][step])
    assert not np.array_equal(embeddings[0][0], embeddings[0][4]), "nothing was trained"


def test_a_schedule_from_a_csv_file_gives_the_gradients_of_one_rank(tmp_path):
    (tmp_path / "schedule.csv").write_text(
        "0F0,0F1,0F2,,0B0,0F3,0B1,0B2,0B3\n,1F0,1F1,1B0,1F2,1B1,1B2,1F3,1I3,1W3\n"
    )
    batch = rows("packed", 8)
    (expected,) = run_ranks(_reference, 1, small_config(tmp_path), batch)
    csv = ("--parallelism.pipeline_parallel_schedule_csv", str(tmp_path / "schedule.csv"))
    cfg = small_config(tmp_path, *PP, *csv, "--parallelism.pipeline_parallel_microbatch_size", "2", "--training.local_batch_size", "8")
    _agree(run_ranks(_reference, 2, cfg, batch), expected)


def test_stages_given_by_name_give_the_gradients_of_one_rank(tmp_path):
    path = tmp_path / "stages.toml"
    path.write_text(
        '[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["tok_embeddings", "layers.0"], '
        '["layers.1", "layers.2", "layers.3", "norm", "output"]]\n'
    )
    batch = rows("padded", 4)
    (expected,) = run_ranks(_reference, 1, small_config(tmp_path), batch)
    from titanlite.config import load_config, override

    names = load_config(path)[0].parallelism.module_fqns_per_model_part
    cfg = override(small_config(tmp_path, *PP, "--training.local_batch_size", "4"), {"parallelism.module_fqns_per_model_part": names})
    first, second = run_ranks(_reference, 2, cfg, batch)
    assert {name.split(".")[1] for name in first["gradients"] if name.startswith("layers")} == {"0"}
    _agree([first, second], expected)


def _agree(results: list[dict], expected: dict) -> None:
    """The stages have the whole between them, and agree with one rank: fp64, sums in another order."""
    merged = {k: v for r in results for k, v in r["gradients"].items()}
    assert worst_error(merged, expected["gradients"]) < 1e-12
    for result in results:
        assert abs(result["loss"] / expected["loss"] - 1) < 1e-12 and abs(result["norm"] / expected["norm"] - 1) < 1e-12


def _steps_of_two_shapes(cfg, one, other) -> list[float]:
    run = setup(cfg, join(cfg))
    losses = [forward_only(run.parts, run.mesh, batch, cross_entropy) for batch in (one, other)]
    losses = [0.0 if loss is None else loss.item() for loss in losses]
    counted = [train_step(run, microbatches_of(run, batch), run.loss_fn).loss for batch in (one, other, one)]
    return losses + counted


def test_another_number_of_microbatches_or_validation_in_between_changes_nothing_else(tmp_path):
    one, other = rows("packed", 8), rows("padded", 4)
    (expected,) = run_ranks(_steps_of_two_shapes, 1, small_config(tmp_path), one, other)
    for options in (PP, ZBV):
        results = run_ranks(_steps_of_two_shapes, 2, small_config(tmp_path, *options), one, other)
        forward = np.sum([r[:2] for r in results], axis=0)
        assert np.allclose(forward, expected[:2], rtol=1e-12, atol=0)
        for result in results:
            assert np.allclose(result[2:], expected[2:], rtol=1e-10, atol=0)  # after AdamW steps, whose division widens rounding


def _held(cfg) -> dict:
    run = setup(cfg, join(cfg))
    return {"parameters": sum(p.numel() for p in run.parameters()), "stages": [part.pipeline_stage.index for part in run.parts]}


def test_each_rank_holds_its_stages_only(tmp_path):
    whole = sum(p.numel() for p in _meta(tmp_path).parameters())
    for options, stages in ((PP, [[0], [1]]), (ZBV, [[0, 3], [1, 2]])):
        results = run_ranks(_held, 2, small_config(tmp_path, *options))
        assert [r["stages"] for r in results] == stages
        assert sum(r["parameters"] for r in results) == whole


def _meta(tmp_path):
    from titanlite.models import get_model

    return get_model(small_config(tmp_path).model, torch.float32)


def _dead_microbatch_labels(cfg, batch):
    """Loss and gradient norm where some ranks' microbatches have no labels at all."""
    run = setup(cfg, join(cfg))
    measured = train_step(run, microbatches_of(run, batch), run.loss_fn)
    return measured.loss, measured.grad_norm, dist.get_rank()


@functools.cache
def _unlabelled():
    batch = rows("padded", 8)
    labels = batch.labels.clone()
    labels[3:] = -100
    return batch._replace(labels=labels)


def test_microbatches_without_labels_are_right(tmp_path):
    ((loss, norm, _),) = run_ranks(_dead_microbatch_labels, 1, small_config(tmp_path), _unlabelled())
    for ours in run_ranks(_dead_microbatch_labels, 2, small_config(tmp_path, *PP), _unlabelled()):
        assert abs(ours[0] / loss - 1) < 1e-12 and abs(ours[1] / norm - 1) < 1e-12
