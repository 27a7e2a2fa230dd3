"""Writes a committed step as a Hugging Face folder, tensor by tensor: names, safetensors shards with index, config.json, tokenizer."""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.folder import fsync
from titanlite.checkpoint.hf_folder import DTYPES, INDEX, ONE_FILE, twins_of
from titanlite.checkpoint.streaming import Step
from titanlite.config import Config
from titanlite.data.tokenizer_files import export_tokenizer
from titanlite.models import get_args, get_hf, hf_folder
from titanlite.models.hf import config_from, read_config
from titanlite.models.hf_weights import Twin
from titanlite.parallel.collective import Group, on_all_ranks, on_rank_0, rank_in, size_of
from titanlite.utils import ConfigError, logger

NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 10**9
KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")  # of the config.json that a run began with


@dataclass(frozen=True)
class Written:
    """A tensor to be written, and the parts of ours that make it."""

    name: str
    shape: list[int]
    dtype: torch.dtype
    parts: list[tuple[str, Twin]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export_step(
    cfg: Config,
    run_folder: Path,
    path: Path,
    to: Path,
    *,
    dtype: torch.dtype,
    shard_bytes: int,
    check: Callable[[Path], None] | None = None,
    process_group: Group = None,
) -> None:
    """Writes the model of the step in `path` to the new folder `to`, which appears when it is complete. Collective: ranks share the files.

    `check` may look at the folder before, on rank 0, and raise. Raises ConfigError where `to` exists, DamagedStep where the step is not as written.
    """
    place = on_rank_0(lambda: _open(to), process_group)
    done = False
    try:
        step = on_all_ranks(lambda: Step(path), process_group, errors=OSError)
        shards = plan_shards(written_tensors(cfg, step, dtype), shard_bytes)
        mine = list(shards.items())[rank_in(process_group) :: size_of(process_group)]
        on_all_ranks(lambda: [write_shard(place / name, tensors, step) for name, tensors in mine], process_group, errors=OSError)
        on_rank_0(lambda: _finish(cfg, run_folder, place, shards, dtype, check), process_group)
        on_rank_0(lambda: place.rename(to), process_group)
        done = True
    finally:
        if not done and rank_in(process_group) == 0:
            shutil.rmtree(place, ignore_errors=True)
    on_rank_0(lambda: fsync(to.parent), process_group)
    size = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    logger.info(f"exported={to} step={step.manifest['step']} files={len(shards)} bytes={size:,} dtype={str(dtype).removeprefix('torch.')}")


def _open(to: Path) -> Path:
    """A new folder beside `to`, for what is not complete."""
    if to.exists():
        raise ConfigError(f"{to} exists already: give another folder, or remove it")
    place = to.with_name(f".{to.name}-{uuid.uuid4().hex[:8]}")
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {place}: {error.strerror}") from error
    return place


def written_tensors(cfg: Config, step: Step, dtype: torch.dtype) -> list[Written]:
    """In the order of our tensors, so that each of these is read once."""
    twins, found = twins_of(cfg.model), {}
    for key, described in sorted(step.manifest["tensors"].items(), key=lambda item: [(len(part), part) for part in item[0].split(".")]):
        kind, _, name = key.partition(".")
        for twin in twins(name) if kind == "model" else ():
            shape = twin.shape(described["shape"])
            found.setdefault(twin.name, Written(twin.name, shape, torch.float32 if twin.fp32 else dtype, [])).parts.append((key, twin))
    return list(found.values())


def plan_shards(tensors: list[Written], shard_bytes: int) -> dict[str, list[Written]]:
    """File name -> its tensors, as many as go into `shard_bytes`, or one."""
    shards: list[list[Written]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    if len(shards) == 1:
        return {ONE_FILE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def write_shard(path: Path, tensors: list[Written], step: Step) -> None:
    """One safetensors file: the length of the header, the header, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in sorted(tensors, key=lambda t: -t.dtype.itemsize):  # each begins where its dtype may
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [end, end := end + tensor.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, values in zip(tensors, _values(tensors, step)):
            file.seek(8 + len(text) + header[tensor.name]["data_offsets"][0])
            data = memoryview(values.flatten().view(torch.uint8).numpy())
            while data:
                data = data[file.write(data) :]
    fsync(path)


def _values(tensors: list[Written], step: Step) -> Iterator[Tensor]:
    """The values of each, of which none is kept; ours only as long as further ones need them."""
    last_use = {key: i for i, tensor in enumerate(tensors) for key, _ in tensor.parts}
    ours: dict[str, Tensor] = {}
    for i, tensor in enumerate(tensors):
        for key, _ in tensor.parts:
            if key not in ours:
                ours[key] = step.tensor(key)
        key, twin = tensor.parts[0]
        if twin.is_plain and ours[key].dtype == tensor.dtype:
            values = ours[key] if twin.expert is None else ours[key][twin.expert]
        else:
            values = torch.empty(tensor.shape, dtype=tensor.dtype)
            for key, twin in tensor.parts:
                for part, theirs in twin.pairs(ours[key], values):
                    theirs.copy_(part)
        yield values
        for key in [key for key, _ in tensor.parts if last_use[key] == i]:
            del ours[key]


def _finish(
    cfg: Config, run_folder: Path, place: Path, shards: dict[str, list[Written]], dtype: torch.dtype, check: Callable[[Path], None] | None
) -> None:
    config = config_from(get_args(cfg.model), get_hf(cfg.model))
    marks = export_tokenizer(cfg.model, run_folder, place)
    scaling = config["rope_scaling"] or {}
    longest = round(scaling.get("factor", 1) * scaling.get("original_max_position_embeddings", 0))
    config |= {"max_position_embeddings": max(cfg.training.seq_len, longest), **marks}
    if cfg.model.name == "hf":
        began_with = read_config(hf_folder(cfg.model))
        config |= {key: began_with[key] for key in KEPT if key in began_with}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)},
        "weight_map": {tensor.name: name for name, tensors in shards.items() for tensor in tensors},
    }
    for name, content in (("config.json", config), (INDEX, index)):
        (place / name).write_text(json.dumps(content, indent=2) + "\n")
    for file in place.iterdir():
        fsync(file)
    if check:
        check(place)
    fsync(place)
