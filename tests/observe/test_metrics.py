import json
import logging
import math
import re
import resource
import struct
from types import SimpleNamespace

import pytest
import torch

from titanlite.observe import metrics
from titanlite.observe.metrics import MetricsLogger, StepTimer, peak_memory_bytes, peak_tflops
from titanlite.trainer import StepMetrics, step_record
from titanlite.utils import ConfigError

FIELDS = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "tflops", "mfu", "memory_gib", "step_time_s", "data_time_s"]


def record(step: int, heldout_loss=None, *, loss=1 / 3, world_size=2, device="cpu"):
    mesh = SimpleNamespace(world_size=world_size, device=torch.device(device))
    run = SimpleNamespace(step=step, tokens=4096 * step, flops_per_token=5_000_000_000, mesh=mesh)
    return step_record(run, StepMetrics(loss, 0.1, 1e-8, 4096, False), 0.5, 0.125, heldout_loss)


@pytest.fixture
def opened(tmp_path):
    """Opens the run's figures; closes what is open at the end."""
    loggers = []

    def open_metrics(start_step=0, total_steps=1000, tensorboard=False):
        folder = tmp_path / "tb" if tensorboard else None
        logger = MetricsLogger(tmp_path, tensorboard_folder=folder, start_step=start_step, total_steps=total_steps)
        loggers.append(logger)
        return logger

    yield open_metrics
    for logger in loggers:
        logger.close()


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# metrics.jsonl


def test_a_step_is_an_object_with_the_fields_that_tools_rely_on(opened, tmp_path):
    opened().step(record(3))
    start, step = lines_of(tmp_path)
    assert list(step) == [*FIELDS, "time"]
    assert start["event"] == "start" and "loss" not in start
    opened().step(record(4, heldout_loss=1.25))
    assert lines_of(tmp_path)[-1]["validation_loss"] == 1.25


def test_figures_follow_from_tokens_and_seconds():
    found = record(3)
    assert found["tokens"] == 3 * 4096 and found["tokens_per_s"] == 4096 / 0.5
    assert found["tflops"] == pytest.approx(8192 * 5e9 / 2 / 1e12)  # of one of two devices
    assert (found["step_time_s"], found["data_time_s"]) == (0.5, 0.125)
    assert found["memory_gib"] == pytest.approx(peak_memory_bytes(torch.device("cpu")) / 2**30, rel=0.1)


def test_numbers_keep_their_full_precision(opened, tmp_path):
    opened().step(record(1, loss=math.pi))
    step = lines_of(tmp_path)[-1]
    assert (step["loss"], step["grad_norm"], step["lr"]) == (math.pi, 0.1, 1e-8)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_null(opened, tmp_path, loss):
    opened().step(record(1, heldout_loss=loss))
    assert lines_of(tmp_path)[-1]["validation_loss"] is None
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_resumed_run_goes_on_in_the_same_file(opened, tmp_path):
    opened().step(record(1))
    again = opened(start_step=1)
    again.step(record(2))
    again.event("done", step=2)
    assert [line.get("event", line["step"]) for line in lines_of(tmp_path)] == ["start", 1, "resume", 2, "done"]
    assert lines_of(tmp_path)[2]["step"] == 1


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', "{", "\x00\x00"])
def test_a_torn_last_line_is_cut_off(opened, tmp_path, torn):
    opened().step(record(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    opened(start_step=1).step(record(2))
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 1, 1, 2]


def test_a_line_that_the_disk_takes_in_part_is_left_out_whole_and_later_ones_are_written(opened, tmp_path, caplog):
    logger = opened()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, unlimited[1]))
    try:
        logger.step(record(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "metrics_failed step=1" in caplog.text and "10 of" in caplog.text
    logger.step(record(2))
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 2]


def test_a_file_that_is_one_torn_line_starts_anew(opened, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "lo')
    opened()
    assert [line["event"] for line in lines_of(tmp_path)] == ["start"]


# The console


def test_console_lines_are_aligned_and_hold_every_figure(opened, caplog):
    logger = opened(total_steps=1000)
    with caplog.at_level(logging.INFO, "titanlite"):
        logger.step(record(1, loss=12.345678))
        logger.step(record(1000, loss=0.5, heldout_loss=1.25))
    first, last = caplog.messages
    names = ("step", "loss", "grad_norm", "lr", "tokens/s", "TFLOP/s", "MFU", "memory", "ETA")
    assert [first.index(f"{name} ") for name in names] == [last.index(f"{name} ") for name in names]
    assert re.match(r"step    1/1000  loss  12\.3457  grad_norm   0\.1000  lr 1\.00e-08  tokens/s     8,192  ", first)
    assert "MFU   n/a" in first and first.endswith("ETA 0:08:20")  # 999 steps of half a second
    assert last.endswith("ETA 0:00:00  validation_loss 1.2500")


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H20", None),
        ("NVIDIA A10", None),
        ("NVIDIA A1000", None),
    ],
)
def test_a_device_has_its_own_peak_or_none(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda", 0)) == peak


def test_mfu_is_the_share_of_the_peak_and_null_where_the_peak_is_unknown(monkeypatch):
    assert record(1)["mfu"] is None
    monkeypatch.setattr("titanlite.trainer.peak_tflops", lambda device: 40.96)
    assert record(1)["mfu"] == pytest.approx(0.5)


def test_the_timer_gives_means_since_the_last_record_without_what_lies_between_steps(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 10.0, 13.0, 15.0, 20.0, 20.5, 21.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    timer = StepTimer()
    for _ in range(2):
        timer.start(), timer.data_ready(), timer.stop()
    assert timer.take() == ((4.0 + 5.0) / 2, (1.0 + 3.0) / 2)
    timer.start(), timer.data_ready(), timer.stop()
    assert timer.take() == (1.0, 0.5)


# TensorBoard


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def as_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def test_tensorboard_shows_every_number_of_a_step(opened, tmp_path):
    logger = opened(tensorboard=True)
    logger.step(record(1))
    logger.step(record(2, heldout_loss=1.5))
    logger.tensorboard.flush()
    assert scalars(tmp_path, "loss") == [(1, as_float32(1 / 3)), (2, as_float32(1 / 3))]
    assert scalars(tmp_path, "validation_loss") == [(2, 1.5)]
    for name in set(FIELDS) - {"step", "mfu"}:
        assert len(scalars(tmp_path, name)) == 2, name


def test_a_resume_takes_steps_after_it_out_of_tensorboard(opened, tmp_path):
    before = opened(tensorboard=True)
    for step in range(1, 11):
        before.step(record(step, loss=float(step)))
    before.tensorboard.flush()
    after = opened(start_step=6, tensorboard=True)
    for step in (7, 8):
        after.step(record(step, loss=float(-step)))
    after.tensorboard.flush()
    assert scalars(tmp_path, "loss") == [(s, float(s)) for s in range(1, 7)] + [(7, -7.0), (8, -8.0)]


def test_a_folder_that_cannot_be_written_is_a_mistake_with_its_name(opened, tmp_path):
    (tmp_path / "tb").write_text("a file")
    with pytest.raises(ConfigError, match=f"cannot write to {tmp_path}/tb: .*--metrics.no-enable_tensorboard") as caught:
        opened(tensorboard=True)
    assert caught.value.keys == ("metrics.save_tb_folder",)
