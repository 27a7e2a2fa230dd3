"""A run that goes on under one layout after the other is the run that was never stopped."""

import json

import pytest

from tests.test_train import BASE, steps
from titanlite.checkpoint.integrity import read_manifest
from titanlite.checkpoint.state import model_state, optimizer_state
from titanlite.checkpoint.store import read_rank_states, save
from titanlite.config import load_config
from titanlite.resume import find_checkpoint, rank_state, setup_from
from titanlite.train import train
from titanlite.trainer import join
from titanlite.verify.gang import Gang

# In fp64: sums in another order differ by 1e-15, which AdamW's division may amplify a thousandfold a step.
OPTIONS = ["--training.dtype", "float64", "--training.mixed_precision_param", "float64", "--training.global_batch_size", "12", "--training.local_batch_size", "1", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "0", "--model.tie_embeddings", "true"]
LAYOUTS = {
    "one rank": (1, ""),
    "fsdp=2": (2, ""),
    "tp=2": (2, "tensor_parallel_degree 2"),
    "pp=2": (2, "pipeline_parallel_degree 2"),
    "cp=2": (2, "context_parallel_degree 2"),
    "hsdp=2x2": (4, "data_parallel_replicate_degree 2"),
    "fsdp=3": (3, ""),
    "fsdp=2, pp=2, zero bubble": (4, "pipeline_parallel_degree 2 pipeline_parallel_schedule ZBVZeroBubble"),
    "replicate=2, tp=2": (4, "data_parallel_replicate_degree 2 data_parallel_shard_degree 1 tensor_parallel_degree 2"),
}


@pytest.fixture(scope="module")
def run_as(tmp_path_factory):
    """Runs a function of (configuration) on the ranks of a layout, for run `name` up to `steps`."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(4000)))
    (folder / "base.toml").write_text(BASE.format(folder=folder))
    gangs = {ranks: Gang(ranks, timeout_s=120) for ranks in (1, 2, 3, 4)}

    def of(fn, layout, name, n_steps, *args):
        ranks, keys = LAYOUTS[layout]
        words = [f"--parallelism.{w}" if "_" in w else w for w in keys.split()]
        cfg, _ = load_config(folder / "base.toml", [*OPTIONS, "--job.name", name, "--training.steps", str(n_steps), *words])
        return gangs[ranks].run(fn, cfg, *args)[0]

    of.folder = folder / "outputs"
    yield of
    for gang in gangs.values():
        gang.close()


def _train(cfg):
    return train(cfg, {})


def _load_and_save(cfg, checkpoints, again):
    """Writes what this layout makes of the newest step into another folder, under this layout."""
    manifest = read_manifest(checkpoints / f"step-{find_checkpoint(cfg, checkpoints)}")
    run, positions = setup_from(cfg, join(cfg), checkpoints, manifest["step"], 12, manifest["data"])
    mine = positions.chunk(run.mesh.degrees.batch)[run.mesh.batch_rank]
    state = model_state(run.parts) | optimizer_state(run.optimizer, run.parts)
    save(again, run.step, state, extra={}, keep_latest_k=0, rank_state=rank_state(run.mesh, mine))


@pytest.fixture(scope="module")
def straight(run_as):
    assert run_as(_train, "one rank", "straight", len(LAYOUTS)) == 0
    return run_as.folder / "straight"


@pytest.fixture(scope="module")
def elastic(run_as, straight):
    """A run of one step under each layout."""
    for n, layout in enumerate(LAYOUTS, 1):
        assert run_as(_train, layout, "elastic", n) == 0
    return run_as.folder / "elastic"


def test_losses_gradient_norms_rates_and_counts_are_those_of_one_rank(straight, elastic):
    expected = steps(straight)
    assert [s[0] for s in expected] == list(range(1, len(LAYOUTS) + 1))
    for ours, theirs in zip(steps(elastic), expected, strict=True):
        assert ours[3:5] == theirs[3:5]
        assert ours[1:3] == pytest.approx(theirs[1:3], rel=1e-10)


def _rows(run, step):
    path = run / "checkpoint" / f"step-{step}"
    states = read_rank_states(path, read_manifest(path))
    return sorted((int(row), place) for one in states.values() for row, place in one["rows"].items())


def test_every_row_of_every_step_is_read_once_and_in_the_same_order(straight, elastic):
    for step in range(1, len(LAYOUTS) + 1):
        assert dict(_rows(elastic, step)) == dict(_rows(straight, step))
        assert [row for row, _ in dict(_rows(elastic, step)).items()] == list(range(12))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_has_the_same_fingerprint_after_loading_and_saving_under(run_as, elastic, tmp_path, layout):
    run_as(_load_and_save, layout, "elastic", len(LAYOUTS), elastic / "checkpoint", tmp_path)
    name = f"step-{len(LAYOUTS)}"
    first, again = (json.loads((f / name / "MANIFEST.json").read_text()) for f in (elastic / "checkpoint", tmp_path))
    assert again["tensors"] == first["tensors"] and len(first["tensors"]) > 20
    assert again["world_size"] == LAYOUTS[layout][0]
