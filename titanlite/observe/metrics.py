"""Where a run's figures go: the console, metrics.jsonl and TensorBoard. Rank 0 only."""

import errno
import json
import math
import os
import re
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from titanlite.utils import ConfigError, logger

GIB = 1024**3

# Dense bf16 peak of one device in TFLOP/s, by words of its name (makers' data sheets). MFU is left out for others.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "GH200": 989.4,
    "B200": 2250.0,
    "GB200": 2500.0,
    "MI250X": 191.5,
    "MI300X": 1307.4,
    "MI325X": 1307.4,
    "L40S": 362.0,
}


def peak_tflops(device: torch.device) -> float | None:
    """The device's dense bf16 peak, or None where it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for words, peak in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held since the start: reserved by the allocator on a GPU, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class StepTimer:
    """Mean seconds a step, and of it waiting for data, since the last record; what lies between steps is not counted."""

    def __init__(self) -> None:
        self._began, self._steps, self._step_s, self._data_s = 0.0, 0, 0.0, 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def data_ready(self) -> None:
        self._data_s += time.perf_counter() - self._began

    def stop(self) -> None:
        self._steps += 1
        self._step_s += time.perf_counter() - self._began

    def take(self) -> tuple[float, float]:
        """(step_time_s, data_time_s), and starts anew."""
        means = self._step_s / self._steps, self._data_s / self._steps
        self._steps, self._step_s, self._data_s = 0, 0.0, 0.0
        return means


class MetricsLogger:
    """Writes one JSON object a line, whole lines only, so that a killed run leaves a readable file.

    A line that cannot be written is told and left out: training is worth more than its record.
    """

    def __init__(self, folder: Path, *, tensorboard_folder: Path | None, start_step: int, total_steps: int):
        self.total_steps = total_steps
        path = folder / "metrics.jsonl"
        _cut_torn_line(path)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.tensorboard = None
        if tensorboard_folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            try:
                self.tensorboard = SummaryWriter(str(tensorboard_folder), purge_step=start_step + 1)
            except OSError as e:
                raise ConfigError(
                    f"cannot write to {tensorboard_folder}: {e.strerror}; make room, or --metrics.no-enable_tensorboard",
                    "metrics.save_tb_folder",
                ) from e
        self.event("resume" if start_step else "start", step=start_step)

    def event(self, name: str, **facts: Any) -> None:
        """Something that happened, as an object with `event`."""
        self._write({"event": name, **facts, "time": time.time()})

    def step(self, record: dict[str, Any]) -> None:
        """One logged step: a line on the console, an object in metrics.jsonl, scalars in TensorBoard."""
        record = {**record, "time": time.time()}
        self._write(record)
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "time"):
                self._to_tensorboard("add_scalar", name, value, record["step"])
        logger.info(self._line(record))

    def close(self) -> None:
        os.close(self.file)
        self._to_tensorboard("close")

    def _to_tensorboard(self, method: str, *args: Any) -> None:
        if self.tensorboard is None:
            return
        try:
            getattr(self.tensorboard, method)(*args)
        except OSError as e:
            self.tensorboard = None  # its thread has ended
            logger.error(f"tensorboard_failed {e}: training goes on without it")

    def _write(self, record: dict[str, Any]) -> None:
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = (json.dumps(record) + "\n").encode()
        end = os.fstat(self.file).st_size
        try:
            if (written := os.write(self.file, line)) < len(line):
                os.ftruncate(self.file, end)
                raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were written")
        except OSError as e:
            logger.error(f"metrics_failed step={record['step']} {e}: metrics.jsonl lacks this line, training goes on")

    def _line(self, r: dict[str, Any]) -> str:
        left = timedelta(seconds=round((self.total_steps - r["step"]) * r["step_time_s"]))
        mfu = "n/a" if r["mfu"] is None else f"{r['mfu']:.1%}"
        line = (
            f"step {r['step']:>{len(str(self.total_steps))}}/{self.total_steps}  loss {r['loss']:8.4f}  "
            f"grad_norm {r['grad_norm']:8.4f}  lr {r['lr']:.2e}  tokens/s {r['tokens_per_s']:>9,.0f}  "
            f"TFLOP/s {r['tflops']:7.3f}  MFU {mfu:>5}  memory {r['memory_gib']:6.2f} GiB  ETA {left}"
        )
        line += f"  reward {r['reward']:.3f}" if r.get("reward") is not None else ""
        return line if r.get("validation_loss") is None else f"{line}  validation_loss {r['validation_loss']:.4f}"


def _cut_torn_line(path: Path) -> None:
    """A writer killed in the middle of a line leaves a part of it: cut that off."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        with path.open("r+b") as f:
            f.truncate(data.rfind(b"\n") + 1)
