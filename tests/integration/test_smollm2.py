"""A real model, SmolLM2-135M-Instruct: it is imported, answers, goes on training, is exported, and answers in transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
QUESTION, ANSWER = "What is 3 + 4?", "7"
STEPS = 10
# Heads and their keys, 9 and 3, divide by 3 and not by 2.
LAYOUTS = {"fsdp": (2, "data_parallel_shard_degree"), "tensor": (3, "tensor_parallel_degree")}


def python(*words: str) -> str:
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=False, capture_output=True, text=True, timeout=600)
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    python("scripts/get_smollm2.py", folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_smollm2_answers_goes_on_training_and_answers_in_transformers(layout, folder, tmp_path):
    """On two cores in a few minutes each. Losses are of the same held-out files, before anything to speak of is learnt and after."""
    run, (ranks, key) = tmp_path / "run", LAYOUTS[layout]
    data = ("--training.seq_len", 240, "--training.local_batch_size", 4 if layout == "tensor" else 2, "--validation.enable", "--validation.freq", 100)
    data += ("--validation.seq_len", 240, "--validation.local_batch_size", 4 if layout == "tensor" else 2, "--validation.steps", 2)
    rates = ("--optimizer.lr", 1e-4, "--lr_scheduler.warmup_steps", 4, "--lr_scheduler.total_steps", STEPS, "--comm.train_timeout_seconds", 600)
    titanlite("import", folder, run, *data, *rates, "--metrics.enable_tensorboard", "false", "--checkpoint.keep_latest_k", 2, f"--parallelism.{key}", ranks)
    before = answer(run)
    assert before["step"] == 0 and ANSWER in before["text"]
    assert (before["prompt_ids"], before["ids"]) == answer_in_transformers(folder)

    for steps in (1, STEPS):
        titanlite("train", run / "config.toml", "--nproc", ranks, "--training.steps", steps)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = (record["validation_loss"] for record in records if "validation_loss" in record)
    assert last < first - 0.05, (first, last)

    after = answer(run)
    assert after["step"] == STEPS and ANSWER in after["text"]
    titanlite("export", run, "-o", tmp_path / "out")
    assert (after["prompt_ids"], after["ids"]) == answer_in_transformers(tmp_path / "out")
    print(f"{layout}: held-out loss {first:.3f} -> {last:.3f}, answers {after['text']!r}")
