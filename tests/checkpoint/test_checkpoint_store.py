import errno
import json
import logging
import os
import resource
import subprocess
import types
import zlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.small_model import build, full_state, train
from tests.ranks import run_ranks
from titanlite.checkpoint import store
from titanlite.checkpoint.folder import list_steps
from titanlite.checkpoint.integrity import DamagedStep, read_manifest
from titanlite.checkpoint.state import init_optimizer_state, model_state, optimizer_state
from titanlite.checkpoint.store import load, read_rank_states, save
from titanlite.utils import ConfigError, logger


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, "titanlite")
    return caplog


def save_steps(folder, *steps, keep_latest_k=0, **extra):
    for step in steps:
        state = {"model.w": torch.full((3,), float(step)), "train.step": torch.tensor(step)}
        save(folder, step, state, extra=extra, keep_latest_k=keep_latest_k)


def loaded(folder, step):
    state = {"model.w": torch.zeros(3), "train.step": torch.tensor(0)}
    load(folder, step, state)
    return state["model.w"].tolist(), state["train.step"].item()


def test_fsdp_on_2_ranks_loads_exactly_on_1_and_4_ranks(tmp_path):
    def train_and_save():
        model, optimizer = build(seed=1)
        train(model, optimizer, 3)
        save(tmp_path, 3, model_state([model]) | optimizer_state(optimizer, [model]), extra={}, keep_latest_k=0)
        return full_state(model, optimizer)

    def load_elsewhere():
        model, optimizer = build(seed=2)
        init_optimizer_state(optimizer)
        state = model_state([model]) | optimizer_state(optimizer, [model])
        load(tmp_path, 3, state)
        return full_state(model, optimizer)

    saved = run_ranks(train_and_save, 2)[0]
    assert saved["optimizer.gate.weight.step"] == 3
    assert json.loads((tmp_path / "step-3" / "MANIFEST.json").read_text())["world_size"] == 2
    for world_size in (1, 4):
        assert run_ranks(load_elsewhere, world_size) == [saved] * world_size


def test_every_resume_of_several_equals_the_run_that_was_never_stopped(tmp_path):
    def straight():
        model, optimizer = build(seed=1)
        for _ in range(4):
            train(model, optimizer, 2)
        return full_state(model, optimizer)

    def stopped():
        model, optimizer = build(seed=1)
        init_optimizer_state(optimizer)
        for step in range(4):
            train(model, optimizer, 2)
            state = model_state([model]) | optimizer_state(optimizer, [model])
            save(tmp_path, step, state, extra={}, keep_latest_k=2)
            train(model, optimizer, 5)  # lost when the run stops
            places = {name: (id(tensor), local(tensor).data_ptr()) for name, tensor in state.items()}
            load(tmp_path, step, state)
            assert places == {name: (id(tensor), local(tensor).data_ptr()) for name, tensor in state.items()}
        return full_state(model, optimizer)

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    assert run_ranks(stopped, 2) == run_ranks(straight, 2)


def test_ranks_of_a_pipeline_save_and_load_their_own_keys(tmp_path):
    def stages():
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))["fsdp"]
        whole = torch.arange(10.0) + 100 * (rank // 2)
        state = {f"model.layer{rank // 2}": distribute_tensor(whole, mesh, [Shard(0)]), "train.step": torch.tensor(4)}
        save(tmp_path, 1, state, extra={}, keep_latest_k=0)
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        load(tmp_path, 1, state)
        try:
            load(tmp_path, 1, {"model.layer0": torch.zeros(10)})
        except ConfigError as error:
            refusal = str(error)
        return torch.equal(state[f"model.layer{rank // 2}"].full_tensor(), whole), state["train.step"].item(), refusal

    results = run_ranks(stages, 4)
    assert {result[:2] for result in results} == {(True, 4)}
    assert all("1 tensors differ" in refusal and "model.layer1" in refusal for *_, refusal in results)


def test_the_manifest_names_every_file_with_its_size_and_what_the_caller_adds(tmp_path):
    save_steps(tmp_path, 5, tokens=123)
    manifest = load(tmp_path, 5, {"train.step": torch.tensor(0)})
    path = tmp_path / "step-5"
    files = {p.name: p for p in path.iterdir() if not p.name.startswith("MANIFEST")}
    assert manifest["files"] == {
        name: {"size": p.stat().st_size, "crc32": f"{zlib.crc32(p.read_bytes()):08x}"} for name, p in files.items()
    }
    assert {key: manifest[key] for key in ("schema", "step", "world_size", "tokens")} == {
        "schema": 3, "step": 5, "world_size": 1, "tokens": 123,
    }  # fmt: skip
    assert {key: (t["dtype"], t["shape"]) for key, t in manifest["tensors"].items()} == {
        "model.w": ("float32", [3]), "train.step": ("int64", []),
    }  # fmt: skip


def test_a_temporary_folder_does_not_count_and_the_next_save_removes_it(tmp_path):
    save_steps(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / ".tmp-step-2")
    (tmp_path / ".tmp-step-9").mkdir()
    assert list_steps(tmp_path) == []
    save_steps(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-2"]


def damage_size(path):
    next(path.glob("*.distcp")).write_bytes(b"short")


def damage_missing_file(path):
    (path / ".metadata").unlink()


def damage_no_manifest(path):
    (path / "MANIFEST.json").unlink()


def damage_cut_manifest(path):
    (path / "MANIFEST.json").write_text('{"schema": 1, "files": {')


def damage_other_json(path):
    (path / "MANIFEST.json").write_text("[1]")


@pytest.mark.parametrize(
    "damage", [damage_size, damage_missing_file, damage_no_manifest, damage_cut_manifest, damage_other_json]
)
def test_a_step_that_is_not_whole_is_ignored_refused_kept_and_replaced(tmp_path, damage, log):
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-2")
    assert list_steps(tmp_path) == [1]
    assert "step-2 is ignored" in log.text
    with pytest.raises(DamagedStep, match="step-2 is not a whole checkpoint"):
        loaded(tmp_path, 2)
    save_steps(tmp_path, 2)
    assert list_steps(tmp_path) == [1, 2] and loaded(tmp_path, 2) == ([2.0] * 3, 2)
    assert sorted(os.listdir(tmp_path)) == ["bad-step-2-1", "step-1", "step-2"]


def test_a_folder_that_does_not_exist_holds_no_steps(tmp_path):
    assert list_steps(tmp_path / "none") == []


def test_steps_are_in_the_order_of_numbers(tmp_path):
    save_steps(tmp_path, 10, 9, 100)
    assert list_steps(tmp_path) == [9, 10, 100]


def test_retention_keeps_the_newest_whole_steps(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    damage_size(tmp_path / "step-3")
    save_steps(tmp_path, 4, keep_latest_k=2)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3", "step-4"]


def test_retention_never_deletes_the_step_just_written(tmp_path):
    save_steps(tmp_path, 5, 6)
    save_steps(tmp_path, 2, keep_latest_k=1)
    assert list_steps(tmp_path) == [2, 6]


def test_retention_of_0_keeps_all(tmp_path):
    save_steps(tmp_path, 1, 2, 3, keep_latest_k=0)
    assert list_steps(tmp_path) == [1, 2, 3]


def test_a_committed_step_is_not_written_again(tmp_path, log):
    save_steps(tmp_path, 1)
    save(tmp_path, 1, {"model.w": torch.zeros(3)}, extra={}, keep_latest_k=0)
    assert "step-1 exists already" in log.text
    assert loaded(tmp_path, 1) == ([1.0] * 3, 1)


def write_too_much(folder, *, limit_bytes=None):
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    mesh = init_device_mesh("cpu", (2,))
    small, large = (distribute_tensor(torch.ones(n), mesh, [Shard(0)]) for n in (1_000, 1_000_000))
    save(folder, 1, {"model.w": small}, extra={}, keep_latest_k=1)
    try:
        save(folder, 2, {"model.w": large}, extra={}, keep_latest_k=1)
    except OSError as error:
        save(folder, 3, {"model.w": small}, extra={}, keep_latest_k=2)
        return str(error)


def test_a_file_that_cannot_grow_raises_on_every_rank_and_leaves_no_half_step(tmp_path):
    errors = run_ranks(lambda: write_too_much(tmp_path, limit_bytes=1_000_000), 2)
    assert errors[0] == errors[1] and "cannot write" in errors[0]
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_raises_on_every_rank_and_leaves_no_half_step(tmp_path, monkeypatch, foreseen):
    if not foreseen:  # what was free when the save began is gone
        monkeypatch.setattr(store, "_check_space", lambda path, needed: None)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("a small file system needs the right to mount")
    try:
        errors = run_ranks(write_too_much, 2, tmp_path)
        assert errors[0] == errors[1] and ("a step takes 3.8 MiB" if foreseen else "cannot write") in errors[0]
        assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def lose_bytes(path, metadata):
    file = next(path.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)


def lose_file(path, metadata):
    for file in path.glob("*.distcp"):
        file.unlink()


def lose_part(path, metadata):
    metadata.storage_data.popitem()


@pytest.mark.parametrize("lose", [lose_bytes, lose_file, lose_part])
def test_what_dcp_lost_without_an_error_stops_the_commit(tmp_path, monkeypatch, lose):
    read = FileSystemReader.read_metadata

    def read_after_loss(self, *args, **kwargs):
        metadata = read(self, *args, **kwargs)
        lose(self.path, metadata)
        return metadata

    monkeypatch.setattr(FileSystemReader, "read_metadata", read_after_loss)
    with pytest.raises(OSError, match=r"\.tmp-step-1"):
        save_steps(tmp_path, 1)
    assert os.listdir(tmp_path) == []


def test_a_failure_of_rank_0_alone_raises_on_every_rank(tmp_path):
    def save_what_is_no_json():
        with pytest.raises(TypeError):
            save(tmp_path, 1, {"model.w": torch.zeros(3)}, extra={"bad": object()}, keep_latest_k=0)

    run_ranks(save_what_is_no_json, 2)
    assert os.listdir(tmp_path) == []


def test_bytes_that_are_not_what_was_written_are_told_by_the_files_name(tmp_path):
    save_steps(tmp_path, 1)
    file = next((tmp_path / "step-1").glob("*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DamagedStep, match="distcp has checksum"):
        loaded(tmp_path, 1)


def test_a_damaged_index_is_refused(tmp_path):
    save_steps(tmp_path, 1)
    index = tmp_path / "step-1" / ".metadata"
    index.write_bytes(b"\x80" * index.stat().st_size)
    with pytest.raises(DamagedStep, match="step-1 is not a whole checkpoint"):
        loaded(tmp_path, 1)


def test_model_keys_can_be_loaded_alone(tmp_path):
    save_steps(tmp_path, 7)
    state = {"model.w": torch.zeros(3)}
    load(tmp_path, 7, state)
    assert state["model.w"].tolist() == [7.0] * 3


OTHER_MODELS = {
    "another shape": ({"model.w": torch.zeros(4)}, "model.w: float32 [3] in the checkpoint, float32 [4] in this run"),
    "another dtype": (
        {"model.w": torch.zeros(3, dtype=torch.bfloat16)},
        "model.w: float32 [3] in the checkpoint, bfloat16 [3] in this run",
    ),
    "a tensor more": (
        {"model.w": torch.zeros(3), "model.v": torch.zeros(2)},
        "model.v: absent in the checkpoint, float32 [2] in this run",
    ),
    "a tensor less": ({"model.v": torch.zeros(2)}, "model.w: float32 [3] in the checkpoint, absent in this run"),
}


@pytest.mark.parametrize("difference", OTHER_MODELS)
def test_another_model_is_refused_before_any_tensor_changes_with(tmp_path, difference):
    save_steps(tmp_path, 1)
    others, message = OTHER_MODELS[difference]
    state = others | {"train.step": torch.tensor(0)}
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, 1, state)
    assert message in str(refusal.value) and "--job.name" in str(refusal.value)
    assert not any(tensor.any() for tensor in state.values())


def test_a_disk_too_small_for_the_step_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=100))
    state = {"model.w": torch.zeros(26), "train.step": torch.tensor(1)}  # 104 and 8 bytes
    with pytest.raises(OSError, match="a step takes 0.0 MiB, 0.0 MiB are free") as error:
        save(tmp_path, 1, state, extra={}, keep_latest_k=0)
    assert error.value.errno == errno.ENOSPC and os.listdir(tmp_path) == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=112))
    save(tmp_path, 1, state, extra={}, keep_latest_k=0)
    assert list_steps(tmp_path) == [1]


def test_parameters_that_were_frozen_begin_with_fresh_optimizer_state_and_those_frozen_now_leave_theirs(tmp_path, log):
    weights = {"model.a": torch.ones(2), "model.b": torch.ones(3)}
    old = weights | {f"optimizer.a.{key}": torch.full((2,), 7.0) for key in ("exp_avg", "exp_avg_sq")}
    save(tmp_path, 1, old, extra={}, keep_latest_k=0)
    new = {key: torch.zeros_like(value) for key, value in weights.items()} | {
        f"optimizer.b.{key}": torch.zeros(3) for key in ("exp_avg", "exp_avg_sq")
    }
    load(tmp_path, 1, new)
    assert new["model.a"].all() and new["model.b"].all() and not new["optimizer.b.exp_avg"].any()
    assert "optimizer state starts anew for b, is left out for a" in log.text


def test_another_optimizer_is_no_frozen_parameter(tmp_path):
    save(tmp_path, 1, {"model.a": torch.ones(2), "optimizer.a.exp_avg": torch.ones(2)}, extra={}, keep_latest_k=0)
    with pytest.raises(ConfigError, match="optimizer.a.exp_avg: float32 .2. in the checkpoint, absent in this run"):
        load(tmp_path, 1, {"model.a": torch.zeros(2), "optimizer.a.momentum_buffer": torch.zeros(2)})


@pytest.mark.parametrize("exclude", [["model.new", "model.old"], ["model.[no]*"], ["model.new", "model.old", "optimizer"]])
def test_added_and_removed_parameters_are_refused_unless_they_are_excluded(tmp_path, exclude):
    saved = {"model.a": torch.ones(2), "model.old": torch.ones(3), "optimizer.a.step": torch.ones(())}
    save(tmp_path, 1, saved, extra={}, keep_latest_k=0)
    state = {"model.a": torch.zeros(2), "model.new": torch.full((4,), 5.0), "optimizer.a.step": torch.zeros(())}
    with pytest.raises(ConfigError, match="2 tensors differ(.|\n)*checkpoint.exclude_from_loading"):
        load(tmp_path, 1, state)
    load(tmp_path, 1, state, exclude=exclude)
    assert state["model.a"].all() and (state["model.new"] == 5).all()
    assert state["optimizer.a.step"] == ("optimizer" not in exclude)


def test_each_ranks_own_state_comes_back_on_any_number_of_ranks(tmp_path):
    def write():
        save(tmp_path, 1, {"model.w": torch.ones(1)}, extra={}, keep_latest_k=0, rank_state={"mine": dist.get_rank()})

    def read():
        return read_rank_states(tmp_path / "step-1", read_manifest(tmp_path / "step-1"))

    run_ranks(write, 3)
    assert sorted(p.name for p in (tmp_path / "step-1" / "rank_state").iterdir()) == ["0.json", "1.json", "2.json"]
    for ranks in (1, 2, 4):
        assert run_ranks(read, ranks) == [{0: {"mine": 0}, 1: {"mine": 1}, 2: {"mine": 2}}] * ranks


def test_a_rank_that_alone_cannot_write_its_own_state_fails_the_save_of_all(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    def write():
        if dist.get_rank() == 1:
            type(tmp_path).write_bytes = full
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, 1, {"model.w": torch.ones(1)}, extra={}, keep_latest_k=0, rank_state={})

    run_ranks(write, 2)
    assert os.listdir(tmp_path) == []
