"""Import and export of a Hugging Face folder, over plain safetensors and DCP, in time and memory.

    python benchmarks/hf.py

Plain import loads every file with safetensors and saves all of it with DCP; plain export loads with DCP and saves as many files with
safetensors. Each takes a process of its own, and all wait until the disk has every byte; `time` is the median over the rounds of
titanlite's time over the plain one's just before or after. `memory` is what a process holds at most beyond what it held at its start, mapped files
included, over the largest file. Export is without its check of logits, for which the model must fit in memory twice, one after the other.
"""

import argparse
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[1]))

from titanlite.checkpoint.folder import fsync
from titanlite.config import Config, load_config, override
from titanlite.huggingface import export_command, import_command
from titanlite.models import get_hf, get_model
from titanlite.models.hf import config_from

TIME_TARGET, MEMORY_TARGET = 1.3, 1.2
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8192}


def build_folder(folder: Path, gib: float, dtype: torch.dtype, n_files: int) -> None:
    """A random Llama of about `gib` GiB."""
    hf = get_hf(Config().model)
    folder.mkdir()
    one_layer = 2048 * (2 * 2048 + 2 * 512 + 3 * 5632)
    n_layers = max(1, round((gib * 2**30 / dtype.itemsize - 2 * 8192 * 2048) / one_layer))
    config = {"model_type": hf.model_type, "num_hidden_layers": n_layers, "max_position_embeddings": 64, **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    cfg = override(Config(), {"model.name": "hf", "model.hf_assets_path": str(folder)}).model
    model = get_model(cfg, dtype)
    config_from(model.args, hf)
    shapes = {twin.name: twin.shape(list(t.shape)) for name, t in model.state_dict().items() for twin in hf.twins(name, model.args)}
    size = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    files: list[dict[str, list[int]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if filled >= len(files) * size / n_files:
            files.append({})
        files[-1][name] = shape
        filled += torch.Size(shape).numel() * dtype.itemsize
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for name, tensors in zip(names, files):
        save_file({key: torch.randn(shape).to(dtype) for key, shape in tensors.items()}, folder / name, {"format": "pt"})
    weight_map = {key: name for name, tensors in zip(names, files) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))


def import_plain(source: Path, to: Path, dtype: str) -> None:
    state = {}
    for path in sorted(source.glob("*.safetensors")):
        state |= load_file(path)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(to), no_dist=True)


def import_ours(source: Path, to: Path, dtype: str) -> None:
    import_command(str(source), to, override(Config(), {"training.dtype": dtype}))


def export_plain(source: Path, to: Path, dtype: str) -> None:
    """`source` is what import_plain made."""
    reader = dcp.FileSystemReader(source)
    state = {key: torch.empty(t.size, dtype=t.properties.dtype) for key, t in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    to.mkdir()
    limit = max(path.stat().st_size for path in (source.parent / "model").glob("*.safetensors"))
    files: list[dict[str, torch.Tensor]] = [{}]
    for key, tensor in state.items():
        if sum(t.nbytes for t in files[-1].values()) + tensor.nbytes > limit:
            files.append({})
        files[-1][key] = tensor
    for i, tensors in enumerate(files):
        save_file(tensors, to / f"{i}.safetensors")
        fsync(to / f"{i}.safetensors")


def export_ours(source: Path, to: Path, dtype: str) -> None:
    cfg, _ = load_config(source / "config.toml")
    limit = max(path.stat().st_size for path in (source.parent / "model").glob("*.safetensors"))
    export_command(source, cfg, to, step=0, dtype=dtype, shard_bytes=limit, check=False)


def measured(fn: Callable[[Path, Path, str], None], source: Path, to: Path, dtype: str) -> tuple[float, int]:
    """(seconds, bytes) of a call; what it makes is flushed to the disk."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled|Detected an existing")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dcp.save({"warm": torch.zeros(1)}, storage_writer=dcp.FileSystemWriter(to.parent / "warm"), no_dist=True)  # imports
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before = _status("VmRSS")
    began = time.perf_counter()
    fn(source, to, dtype)
    return time.perf_counter() - began, _status("VmHWM") - before


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def in_a_process(*args) -> tuple[float, int]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, *args).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write, and delete again (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        build_folder(folder / "model", args.gib, getattr(torch, args.dtype), args.files)
        sizes = [path.stat().st_size for path in (folder / "model").glob("*.safetensors")]
        os.sync()
        print(f"{sum(sizes) / 2**30:.2f} GiB of {args.dtype} in {len(sizes)} files, the largest of {max(sizes) / 2**20:.0f} MiB; {args.rounds} rounds")
        print(f"{'':<8}{'plain s':>10}{'titanlite s':>14}{'time':>8}{'target':>8}{'plain MiB':>12}{'titanlite MiB':>15}{'memory':>8}{'target':>8}")
        pairs = {
            "import": ((import_plain, "model", "plain"), (import_ours, "model", "run")),
            "export": ((export_plain, "plain", "out"), (export_ours, "run", "out")),
        }
        for kind, both in pairs.items():
            found: dict[Callable, list[tuple[float, int]]] = {both[0][0]: [], both[1][0]: []}
            for i in range(args.rounds):
                for fn, source, to in both[:: -1 if i % 2 else 1]:  # each goes first in turn
                    shutil.rmtree(folder / to, ignore_errors=True)
                    os.sync()
                    found[fn].append(in_a_process(fn, folder / source, folder / to, args.dtype))
            plain, ours = (found[fn] for fn, _, _ in both)
            ratio = statistics.median(o[0] / p[0] for p, o in zip(plain, ours))
            memory = max(o[1] for o in ours)
            print(
                f"{kind:<8}{min(p[0] for p in plain):>10.2f}{min(o[0] for o in ours):>14.2f}{ratio:>8.2f}{TIME_TARGET:>8}"
                f"{max(p[1] for p in plain) / 2**20:>12.0f}{memory / 2**20:>15.0f}{memory / max(sizes):>8.2f}{MEMORY_TARGET:>8}",
                flush=True,
            )


if __name__ == "__main__":
    main()
