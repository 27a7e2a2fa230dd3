"""Tokens a second of CPU time that the loader gives: from tokens on disk, from JSONL with a BPE tokenizer in workers, by `titanlite tokenize`.

    python benchmarks/loader.py [--seconds 5]
    titanlite train train_configs/debug.toml --training.steps 100 && python benchmarks/loader.py --run outputs/debug

The corpus is Python's standard library, the tokenizer is trained on it first (2,048 tokens). CPU time, of this process and its
workers, so that whoever else uses the cores does not count. Ratios are of what was measured in the same run.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from titanlite.config import Config, Data, DataLoader, DataSource, Model, Training, override  # noqa: E402
from titanlite.data.build import build_source  # noqa: E402
from titanlite.data.loader import build_train_loader  # noqa: E402
from titanlite.data.tokenize import tokenize_command  # noqa: E402
from titanlite.data.tokenizer import build_tokenizer  # noqa: E402

ROWS, SEQ_LEN = 16, 2048
TARGETS = {"memmap": 2e6, "jsonl": 0.4e6, "tokenize": 0.9, "wait": 0.01}


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    times = os.times()
    return sum(times[:4])


def loader_tokens_per_cpu_s(source, tokenizer, seconds: float, *, packing: str, workers: int) -> float:
    """Labels trained on a second of CPU time, over all processes of the loader."""
    cfg = Training(local_batch_size=ROWS, seq_len=SEQ_LEN, dataloader=DataLoader(num_workers=workers))
    before, until, tokens = cpu_s(), time.monotonic() + seconds, 0
    loader = build_train_loader(cfg, Data(packing=packing), [source], tokenizer, seed=0, dp_rank=0, dp_degree=1, global_batch_size=ROWS)
    while time.monotonic() < until:
        tokens += sum(int((batch.labels >= 0).sum()) for batch in next(loader))
    loader.close()
    return tokens / (cpu_s() - before)


def tokenize_over_library(cfg: Config, folder: Path, texts: list[str], tokenizer) -> float:
    """Tokens a second of CPU time on 2 cores: `titanlite tokenize`, its reading and writing included, over the library's own batch of texts in memory."""

    def library() -> None:
        os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "2"}
        for one in tokenizer.backend.encode_batch(texts, add_special_tokens=False):
            _ = one.ids

    before, child = cpu_s(), multiprocessing.get_context("fork").Process(target=library)
    child.start()
    child.join()
    between = cpu_s()
    tokenize_command(cfg, folder, workers=2)
    return (between - before) / (cpu_s() - between)  # of the same tokens


def data_wait(run: Path) -> float:
    """Share of a step that it waits for data, the median of a run's records."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(r["data_time_s"] / r["step_time_s"] for r in records if "data_time_s" in r)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5, help="of each measurement of the loader")
    parser.add_argument("--run", type=Path, help="a run's folder: tell only of its wait for data")
    args = parser.parse_args()
    if args.run:
        print(f"data wait / step {data_wait(args.run):.4f} (at most {TARGETS['wait']})")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stdlib = build_source(DataSource("stdlib"))
        texts = [stdlib[i] for i in range(len(stdlib))]
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        model = Model(tokenizer="bpe", vocab_size=2048)
        tokenizer = build_tokenizer(model, folder, [stdlib])
        cfg = override(Config(), {"training.dataset": "jsonl", "training.dataset_path": str(folder / "a.jsonl"), "model.hf_assets_path": name})
        jsonl = build_source(DataSource("jsonl", str(folder / "a.jsonl")))
        ratios = [tokenize_over_library(cfg, folder / f"tokens{i}", texts, tokenizer) for i in range(3)]
        tokens = build_source(DataSource("tokens", str(folder / "tokens0")))
        print(f"documents={len(tokens)} tokens={int(tokens.lengths.sum())} a document {np.mean(tokens.lengths):.0f}")
        for packing in ("split", "best_fit"):
            speed = loader_tokens_per_cpu_s(tokens, tokenizer, args.seconds, packing=packing, workers=0)
            print(f"memmap {packing:<8} {speed / 1e6:6.2f} M tokens / CPU s (at least {TARGETS['memmap'] / 1e6})")
        speed = loader_tokens_per_cpu_s(jsonl, tokenizer, args.seconds, packing="split", workers=2)
        print(f"jsonl, bpe, 2 workers {speed / 1e6:.2f} M tokens / CPU s (at least {TARGETS['jsonl'] / 1e6})")
        print(f"titanlite tokenize / tokenizers' encode_batch {statistics.median(ratios):.2f} (at least {TARGETS['tokenize']})")


if __name__ == "__main__":
    main()
