"""A real model, SmolLM2-135M-Instruct: it is imported, answers, goes on training, is exported, and answers in transformers."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
QUESTION, ANSWER = "What is 3 + 4?", "7"
# One run goes from the one to the other: (layout, the step it ends at). Heads, 9 and 3 of keys, do not divide by two ranks.
LAYOUTS = (("data_parallel_shard", 4), ("tensor_parallel", 8))
RANKS, ROWS, SEQ_LEN = 2, 4, 160  # rows of a step, and of the held-out files


def python(*words: str) -> str:
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=False, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def titanlite(*words: str) -> str:
    return python("-m", "titanlite.cli", *words)


def answer(run: Path) -> dict:
    return json.loads(titanlite("generate", run, "--chat", "-p", QUESTION, "--temperature", 0, "--max_new_tokens", 16, "--json"))


def answer_in_transformers(folder: Path) -> tuple[list[int], list[int]]:
    """(ids of the question, ids of the answer)."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    question = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], **options)
    ids = model.generate(**question, max_new_tokens=16, do_sample=False)[0].tolist()
    n = question["input_ids"].shape[1]
    return ids[:n], [i for i in ids[n:] if i != tokenizer.eos_token_id]


@pytest.mark.full
def test_smollm2_answers_goes_on_training_under_fsdp2_and_tp2_and_answers_in_transformers(tmp_path):
    folder, run = tmp_path / "model", tmp_path / "run"
    python("scripts/get_smollm2.py", folder)
    data = ("--training.seq_len", SEQ_LEN, "--validation.seq_len", SEQ_LEN, "--validation.enable", "--validation.freq", 2, "--validation.steps", 1)
    rates = ("--optimizer.lr", 1e-4, "--lr_scheduler.warmup_steps", 1, "--lr_scheduler.decay_ratio", 0, "--comm.train_timeout_seconds", 600)
    titanlite("import", folder, run, *data, *rates, "--metrics.enable_tensorboard", "false", "--checkpoint.keep_latest_k", 2)
    before = answer(run)
    assert before["step"] == 0 and ANSWER in before["text"]
    assert (before["prompt_ids"], before["ids"]) == answer_in_transformers(folder)

    for layout, steps in LAYOUTS:
        degrees = {f"--parallelism.{name}_degree": RANKS if name == layout else 1 for name, _ in LAYOUTS}
        rows = ROWS // degrees["--parallelism.data_parallel_shard_degree"]
        sizes = ("--training.local_batch_size", rows, "--validation.local_batch_size", rows, "--training.steps", steps)
        titanlite("train", run / "config.toml", "--nproc", RANKS, *sizes, *itertools.chain(*degrees.items()))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, fsdp, tensor, last = (record["validation_loss"] for record in records if "validation_loss" in record)
    assert first > fsdp > tensor > last and last < first - 0.05, (first, fsdp, tensor, last)

    after = answer(run)
    assert after["step"] == steps and ANSWER in after["text"]
    titanlite("export", run, "-o", tmp_path / "out")
    assert (after["prompt_ids"], after["ids"]) == answer_in_transformers(tmp_path / "out")
    print(f"held-out loss {first:.3f} -> {fsdp:.3f} under FSDP2, {tensor:.3f} -> {last:.3f} under TP2, answers {after['text']!r}")
