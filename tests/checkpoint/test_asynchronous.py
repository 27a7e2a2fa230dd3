"""Saves in a thread or a process hold the values of their start, and their failures are every rank's."""

import multiprocessing
import os
import select
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.checkpoint.small_model import build, full_state, train
from tests.ranks import run_ranks
from titanlite.checkpoint import asynchronous
from titanlite.checkpoint.asynchronous import ProcessSaver, Staging, ThreadSaver, tensors_in
from titanlite.checkpoint.folder import list_steps
from titanlite.checkpoint.state import model_state, optimizer_state
from titanlite.checkpoint.store import load, save


@pytest.mark.parametrize("kind", [ThreadSaver, ProcessSaver])
def test_an_asynchronous_save_holds_the_values_of_its_start(tmp_path, kind):
    def save_and_go_on():
        allow_children()
        model, optimizer = build(seed=1)
        saver, counts = kind(dist.new_group(backend="gloo")), {"tokens": [0]}
        expected = []
        for step in (1, 2, 3):
            train(model, optimizer, 1)
            expected.append(full_state(model, optimizer))
            state = model_state([model]) | optimizer_state(optimizer, [model])
            saver.start(tmp_path, step, state, extra=counts, keep_latest_k=0, rank_state={"rank": dist.get_rank()})
            train(model, optimizer, 1)  # collectives of the default group while the thread uses its own
            counts["tokens"][0] += 1
        assert saver.wait() and not saver.wait()
        saver.close()
        for step in (1, 2, 3):
            manifest = load(tmp_path, step, state)
            assert full_state(model, optimizer) == expected[step - 1]
            assert manifest["tokens"] == [step - 1]

    run_ranks(save_and_go_on, 2)
    assert list_steps(tmp_path) == [1, 2, 3]


def allow_children():
    """A gang's ranks are daemons, which multiprocessing lets have none."""
    multiprocessing.current_process()._config["daemon"] = False


def test_a_killed_writer_fails_that_save_on_every_rank_and_the_next_one_works(tmp_path):
    def save_twice():
        allow_children()
        saver, weights = ProcessSaver(dist.new_group(backend="gloo")), torch.ones(3)
        outcomes = []
        for step, killed in ((1, 1), (2, None), (3, 0), (4, None), (5, 1), (6, None)):  # the first one while it starts
            if killed == dist.get_rank():
                os.kill(saver._process.pid, signal.SIGKILL)
            saver.start(tmp_path, step, {"model.w": weights}, extra={}, keep_latest_k=0)
            try:
                outcomes.append(saver.wait())
            except OSError:
                outcomes.append("failed")
        saver.close()
        return outcomes

    assert run_ranks(save_twice, 2) == [["failed", True] * 3] * 2
    assert list_steps(tmp_path) == [2, 4, 6]


def test_a_writer_does_not_outlive_its_rank(tmp_path):
    ours, theirs = multiprocessing.Pipe()

    def rank():
        saver = ProcessSaver(None)
        saver.start(tmp_path, 1, {"model.w": torch.ones(3)}, extra={}, keep_latest_k=0)
        saver.wait()  # it is at work
        theirs.send(saver._process.pid)
        signal.pause()

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    assert ours.poll(60)
    writer = os.pidfd_open(ours.recv())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    poll = select.poll()
    poll.register(writer)
    assert poll.poll(20_000), "the writer lives on"


def test_a_process_reports_what_it_could_not_write(tmp_path):
    saver = ProcessSaver(None)
    (tmp_path / "file").touch()
    saver.start(tmp_path / "file", 1, {"model.w": torch.ones(3)}, extra={}, keep_latest_k=0)
    with pytest.raises(OSError, match="file"):
        saver.wait()
    saver.close()


def test_an_asynchronous_save_keeps_its_values_and_the_next_one_waits_for_it(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(asynchronous, "save", lambda *args, **options: go.wait(20) and save(*args, **options))
    saver, weights = ThreadSaver(None), torch.ones(3)

    def start(step):
        saver.start(tmp_path, step, {"model.w": weights}, extra={}, keep_latest_k=0)

    start(1)
    weights.fill_(2)
    second = threading.Thread(target=start, args=(2,))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    go.set()
    second.join()
    saver.wait()
    for step in (1, 2):
        load(tmp_path, step, {"model.w": weights})
        assert weights.tolist() == [step] * 3


def test_closing_waits_for_what_is_being_written(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(asynchronous, "save", lambda *args, **options: go.wait(20) and save(*args, **options))
    saver = ThreadSaver(None)
    saver.start(tmp_path, 1, {"model.w": torch.ones(3)}, extra={}, keep_latest_k=0)
    threading.Timer(0.2, go.set).start()
    saver.close()
    assert list_steps(tmp_path) == [1]


def test_an_asynchronous_failure_is_raised_once_by_the_next_wait(tmp_path):
    saver = ThreadSaver(None)
    (tmp_path / "file").touch()
    saver.start(tmp_path / "file", 1, {"model.w": torch.ones(3)}, extra={}, keep_latest_k=0)
    with pytest.raises(OSError, match="file"):
        saver.wait()
    saver.start(tmp_path, 1, {"model.w": torch.ones(3)}, extra={}, keep_latest_k=0)
    saver.wait()
    assert list_steps(tmp_path) == [1]


def test_a_staged_copy_has_every_dtype_shape_and_layout_of_its_state():
    def stage():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        whole = torch.randn(5, 6)
        state = {
            "both": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
            "one": distribute_tensor(whole.bfloat16(), mesh["b"], [Shard(0)]),
            "copies": distribute_tensor(whole.double(), mesh, [Replicate(), Replicate()]),
            "none here": distribute_tensor(torch.ones(1), mesh["a"], [Shard(0)]),
            "transposed": torch.randn(3, 4).t(),
            "number": torch.tensor(3),
            "flag": torch.tensor([True, False]),
        }
        staging = Staging(shared=False)
        for _ in range(2):  # the second time into the same memory
            found = tensors_in(staging.copy(state), staging.pieces)
            for key, tensor in state.items():
                ours, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in (found[key], tensor))
                assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and found[key].shape == tensor.shape
                if isinstance(tensor, DTensor):
                    assert found[key].placements == tensor.placements
                    assert found[key].device_mesh.get_coordinate() == tensor.device_mesh.get_coordinate()
            state["number"].fill_(4)
        return True

    assert run_ranks(stage, 4) == [True] * 4
