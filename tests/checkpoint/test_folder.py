"""What a run's folder of steps holds and sets aside, in a file system and in a store without renames."""

import json
import logging
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from upath import UPath

from tests.ranks import run_ranks
from titanlite.checkpoint import store
from titanlite.checkpoint.folder import (
    abandon_after,
    checkpoint_folder,
    list_steps,
    quarantine,
    set_strangers_aside,
    step_folders,
)
from titanlite.checkpoint.integrity import problems_of, read_manifest
from titanlite.checkpoint.store import load, save
from titanlite.cli import main
from titanlite.config import Config, override
from titanlite.utils import ConfigError, logger


@pytest.fixture(autouse=True)
def log(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, "titanlite")
    return caplog


def save_steps(folder, *steps, keep_latest_k=0):
    for step in steps:
        save(folder, step, {"model.w": torch.full((3,), float(step))}, extra={}, keep_latest_k=keep_latest_k)


def loaded(folder, step):
    state = {"model.w": torch.zeros(3)}
    load(folder, step, state)
    return state["model.w"].tolist()


def manifest(folder, step):
    return read_manifest(folder / f"step-{step}")


# Lineage


def test_a_step_names_the_one_before_it_as_its_parent(tmp_path):
    save_steps(tmp_path, 5, 10, 15)
    uuids = [manifest(tmp_path, step)["uuid"] for step in (5, 10, 15)]
    assert len(set(uuids)) == 3
    assert [manifest(tmp_path, step)["parent"] for step in (5, 10, 15)] == [
        None, {"step": 5, "uuid": uuids[0]}, {"step": 10, "uuid": uuids[1]},
    ]  # fmt: skip


def test_a_lineage_whose_older_steps_are_deleted_or_quarantined_is_left_alone(tmp_path):
    save_steps(tmp_path, 5, 10, 15, 20, 25, keep_latest_k=3)
    quarantine(tmp_path, 20, ["for the test"])
    set_strangers_aside(tmp_path)
    assert list_steps(tmp_path) == [15, 25]


def test_steps_that_were_gone_back_from_stay_abandoned_when_somebody_puts_them_back(tmp_path, log):
    save_steps(tmp_path, 5, 10, 15)
    abandon_after(tmp_path, 5)
    assert step_folders(tmp_path) == [5] and sorted(os.listdir(tmp_path / "abandoned")) == ["step-10-1", "step-15-1"]
    save_steps(tmp_path, 12)
    shutil.copytree(tmp_path / "abandoned" / "step-10-1", tmp_path / "step-10")  # between a step and its parent
    shutil.move(tmp_path / "abandoned" / "step-15-1", tmp_path / "step-15")  # whose parent is abandoned
    set_strangers_aside(tmp_path)
    assert step_folders(tmp_path) == [5, 12]
    assert "step-15 is moved to abandoned/step-15-1: it descends from another step-10" in log.text


def test_a_step_whose_parents_place_another_has_taken_is_a_stranger(tmp_path):
    save_steps(tmp_path / "a", 5, 10)
    save_steps(tmp_path / "b", 5, 10, 15)
    shutil.copytree(tmp_path / "b" / "step-15", tmp_path / "a" / "step-15")
    set_strangers_aside(tmp_path / "a")
    assert step_folders(tmp_path / "a") == [5, 10]


def test_a_damaged_step_is_no_stranger_it_is_for_quarantine(tmp_path):
    save_steps(tmp_path, 5, 10)
    (tmp_path / "step-10" / "MANIFEST.json").write_text("{")
    set_strangers_aside(tmp_path)
    assert step_folders(tmp_path) == [5, 10]


# Retention


def test_a_pinned_step_is_never_deleted(tmp_path, capsys):
    save_steps(tmp_path, 1, 2)
    assert main(["checkpoint", "pin", str(tmp_path), "1"]) == 0
    save_steps(tmp_path, 3, 4, keep_latest_k=1)
    assert list_steps(tmp_path) == [1, 4]
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert [line.endswith("pinned") for line in capsys.readouterr().out.splitlines()[-3:-1]] == [True, False]
    save_steps(tmp_path, 5)
    assert main(["checkpoint", "prune", str(tmp_path)]) == 0
    assert list_steps(tmp_path) == [1, 5]
    assert main(["checkpoint", "unpin", str(tmp_path), "1"]) == 0
    assert main(["checkpoint", "prune", str(tmp_path)]) == 0
    assert list_steps(tmp_path) == [5]
    assert main(["checkpoint", "pin", str(tmp_path), "7"]) == 2


# Remote stores


@pytest.fixture
def bucket(request):
    return UPath(f"memory://bucket/{request.node.name}")


def test_a_remote_folder_is_the_url_and_the_runs_name(tmp_path):
    cfg = override(Config(), {"job.name": "run", "checkpoint.folder": "memory://bucket/runs"})
    assert str(checkpoint_folder(cfg, tmp_path)) == "memory://bucket/runs/run"
    assert checkpoint_folder(override(cfg, {"checkpoint.folder": "steps"}), tmp_path) == tmp_path / "steps"
    with pytest.raises(ConfigError, match="checkpoint.folder='nope://x'"):
        checkpoint_folder(override(cfg, {"checkpoint.folder": "nope://x"}), tmp_path)


def test_a_remote_store_saves_loads_verifies_retains_and_sets_aside(bucket):
    save_steps(bucket, 1, 2, 3, keep_latest_k=2)
    assert list_steps(bucket) == [2, 3] and loaded(bucket, 3) == [3.0] * 3 and problems_of(bucket / "step-3") == []
    save_steps(bucket, 3)  # committed: not written again
    data = bucket / "step-3" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[::-1])
    assert "has checksum" in problems_of(bucket / "step-3")[0]
    quarantine(bucket, 3, ["for the test"])
    abandon_after(bucket, 1)
    assert step_folders(bucket) == []
    assert {p.name for p in bucket.iterdir()} == {"quarantine-step-3-1", "quarantine-step-3-1.txt", "abandoned"}
    assert problems_of(bucket / "abandoned" / "step-2-1") == []


def test_a_remote_step_without_a_manifest_was_never_committed_and_is_written_over(bucket):
    save_steps(bucket, 1)
    (bucket / "step-2" / "__0_0.distcp").write_bytes(b"cut")
    assert step_folders(bucket) == [1]
    save_steps(bucket, 2)
    assert list_steps(bucket) == [1, 2] and loaded(bucket, 2) == [2.0] * 3


def test_a_remote_save_that_fails_leaves_nothing(bucket, monkeypatch):
    def fail(*_):
        raise OSError("for the test")

    monkeypatch.setattr(store, "seal_manifest", fail)
    with pytest.raises(OSError, match="for the test"):
        save_steps(bucket, 1)
    assert not (bucket / "step-1").exists()


def test_ranks_save_into_and_load_from_a_remote_store_together(tmp_path):
    folder = UPath(f"local://{tmp_path}/store")  # a file system through fsspec, without its renames

    def write_and_read():
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
        save(folder, 1, {"model.w": tensor}, extra={}, keep_latest_k=1, rank_state={"rank": dist.get_rank()})
        save(folder, 2, {"model.w": tensor}, extra={}, keep_latest_k=1, rank_state={"rank": dist.get_rank()})
        tensor.to_local().zero_()
        load(folder, 2, {"model.w": tensor})
        return tensor.full_tensor().tolist(), problems_of(folder / "step-2")

    assert run_ranks(write_and_read, 2) == [(list(map(float, range(10))), [])] * 2
    assert json.loads((tmp_path / "store" / "step-2" / "MANIFEST.json").read_text())["world_size"] == 2
    assert list_steps(folder) == [2]
