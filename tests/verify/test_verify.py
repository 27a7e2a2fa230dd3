"""`verify` accepts right layouts and refuses planted faults, naming where the two part."""

import importlib
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from titanlite.config import Config, load_config
from titanlite.models import FAMILIES
from titanlite.utils import ConfigError
from titanlite.verify.command import check_layout, verify_command
from titanlite.verify.compare import verify
from titanlite.verify.layouts import CHOICES, base_config, covering_layouts, parse_layout
from titanlite.verify.mutants import MUTANTS, find_mutant


@pytest.fixture(scope="module")
def cfg():
    return base_config(load_config("train_configs/debug.toml")[0])


def test_layouts_of_every_pass_agree_with_one_rank(cfg):
    texts = ["replicate=2", "zero1=2", "fsdp=2,recompute=op", "tp=2,chunk=50", "fsdp=2,tp=2,tied=true",
             "cp=2", "cp=2,method=ring", "cp=2,method=ulysses,balance=none", "cp=2,tp=2,method=ring",
             "pp=2", "pp=2,schedule=Interleaved1F1B,cp=2", "pp=2,schedule=ZBVZeroBubble,fsdp=2,tied=true", "pp=2,tp=2,chunk=50"]  # fmt: skip
    verdicts = list(verify([parse_layout(text, cfg) for text in texts]))
    assert [v.layout for v in verdicts if v.first_difference] == []
    assert {v.layout for v in verdicts} == set(texts)


def test_lower_precisions_agree_within_the_drift_of_one_ulp(cfg):
    verdicts = list(verify([parse_layout(f"tp=2,dtype={dtype}", cfg) for dtype in ("float32", "bfloat16")]))
    assert [v.layout for v in verdicts if v.first_difference] == []
    assert all(v.tolerance < 0.1 for v in verdicts), "a tolerance that would let a wrong term pass"


EXPERTS = ["ep=2", "ep=2,etp=2,tp=2,fsdp=2", "pp=2,ep=2,schedule=ZBVZeroBubble", "ep=4,cp=2,fsdp=2,recompute=full"]
MORE_EXPERTS = ["ep=2,hsdp=2x2,tied=true", "tp=2,recompute=op,accumulate=4", "ep=2,cp=2,method=ulysses,chunk=50", "ep=2,tp=2,compile=aot_eager"]


@pytest.mark.parametrize("texts", [EXPERTS, pytest.param(MORE_EXPERTS, marks=pytest.mark.full)], ids=["some", "more"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "minimax"])
def test_families_of_experts_agree_with_one_rank(family, texts):
    cfg = base_config(load_config(f"train_configs/{family}_debug.toml")[0])
    assert [v.layout for v in verify([parse_layout(text, cfg) for text in texts]) if v.first_difference] == []


def test_further_tokens_are_predicted_alike_under_every_pass():
    cfg = base_config(load_config("train_configs/deepseek_v3_debug.toml")[0])
    texts = ["fsdp=2,mtp=2,recompute=op", "pp=2,tp=2,mtp=2,chunk=50", "cp=2,ep=2,mtp=1,compile=aot_eager"]
    assert [v.layout for v in verify([parse_layout(text, cfg) for text in texts]) if v.first_difference] == []


def with_heads(monkeypatch, family: str, n_heads: int, n_kv_heads: int) -> Config:
    """Of the debug model, which the gangs' ranks, forked from here, then find."""
    toml = f"train_configs/{family}_debug.toml" if Path(f"train_configs/{family}_debug.toml").exists() else "train_configs/debug.toml"
    flavors = importlib.import_module(FAMILIES[family]).FLAVORS
    args = flavors["debugmodel"]
    monkeypatch.setitem(flavors, "debugmodel", replace(args, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=args.head_dim or 16))
    return base_config(load_config(toml, ["--model.name", family])[0])


def test_tensor_parallel_agrees_with_one_rank_where_heads_do_not_divide(monkeypatch):
    cfg = with_heads(monkeypatch, "llama3", 9, 3)
    texts = ["tp=2", "fsdp=2,tp=2,tied=true,recompute=op"]
    assert [v.layout for v in verify([parse_layout(text, cfg) for text in texts]) if v.first_difference] == []


@pytest.mark.full
@pytest.mark.parametrize(
    "family, kv_heads, texts",
    [
        ("llama3", 1, ["cp=2,tp=2,method=ulysses", "cp=2,tp=2,method=ring"]),
        ("qwen3", 1, ["tp=2,recompute=op,compile=aot_eager"]),
        ("gpt_oss", 1, ["cp=2,tp=2,etp=2"]),
        ("minimax", 1, ["cp=2,tp=2,method=ulysses"]),
        ("deepseek_v3", 3, ["pp=2,tp=2,mtp=2,chunk=50"]),
    ],
)
def test_every_kind_of_attention_may_have_heads_that_do_not_divide(monkeypatch, family, kv_heads, texts):
    """6 heads of one key-value head, which two context-parallel ranks can share and two tensor-parallel ones cannot; 3 of latents."""
    cfg = with_heads(monkeypatch, family, 6 if kv_heads == 1 else 3, kv_heads)
    assert [v.layout for v in verify([check_layout(parse_layout(text, cfg)) for text in texts]) if v.first_difference] == []


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_dense_families_agree_with_one_rank(family):
    cfg = base_config(load_config("train_configs/debug.toml", ["--model.name", family])[0])
    texts = ["tp=2,fsdp=2", "cp=2,tp=2", "pp=2,schedule=ZBVZeroBubble,tied=true", "tp=2,chunk=50,compile=aot_eager"]
    assert [v.layout for v in verify([parse_layout(text, cfg) for text in texts]) if v.first_difference] == []


def test_an_expert_fault_needs_a_model_of_experts(cfg):
    with pytest.raises(ConfigError, match="swapped_experts is a fault with experts, which llama3 has not: use train_configs/deepseek_v3_debug.toml"):
        verify_command(cfg, None, full=False, plant="swapped_experts")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found_where_it_is(cfg, name):
    mutant = MUTANTS[name]
    if mutant.experts:
        cfg = base_config(load_config(f"train_configs/{mutant.experts}_debug.toml")[0])
    (verdict,) = verify([parse_layout(mutant.layout, cfg)], plant=name)
    expected = f"first in {mutant.found}" if mutant.found else "it fails"
    assert verdict.first_difference.startswith(expected), verdict


def test_a_rank_that_dies_is_a_layout_that_differs_and_the_next_one_still_runs(cfg, monkeypatch):
    monkeypatch.setitem(MUTANTS, "death", find_mutant("half_loss").__class__("", "fsdp=2", "", _death))
    first, second = verify([parse_layout("fsdp=2", cfg), parse_layout("tp=2", cfg)], plant="death")
    assert "died" in first.first_difference and "died" in second.first_difference


def _death():
    import os

    os._exit(7)


def _chosen(text: str) -> tuple[str, ...]:
    """What a layout has of each line of choices."""
    items = {"", *text.split(",")}
    return tuple(max((choice for choice in line if set(choice.split(",")) <= items), key=len) for line in CHOICES)


@pytest.mark.parametrize("strength", [2, 3])
def test_the_sets_hold_every_choice_alone_and_every_legal_combination(strength):
    refused = {"pp=2,schedule=ZBVZeroBubble", "compile=aot_eager"}
    ranks = lambda text: 0 if refused <= {*_chosen(text)} else 2  # noqa: E731
    layouts = [_chosen(text) for text in covering_layouts(strength, ranks)]
    assert not any(refused <= {*layout} for layout in layouts)
    for line in CHOICES:
        assert all(_chosen(choice) in layouts for choice in line if choice)
    held = {tuple(pairs) for layout in layouts for pairs in itertools.combinations(enumerate(layout), strength)}
    for lines in itertools.combinations(range(len(CHOICES)), strength):
        for combination in itertools.product(*(CHOICES[line] for line in lines)):
            assert tuple(zip(lines, combination)) in held or refused <= {*combination}


@pytest.mark.parametrize(
    "text, message",
    [
        ("tpp=2", "unknown key 'tpp'; did you mean 'tp'?"),
        ("tp=two", "tp='two': expected a number of ranks"),
        ("tp=0", "tp='0': expected a number of ranks"),
        ("hsdp=2", "hsdp='2': expected REPLICATExSHARD"),
        ("tp=2,tp=2", "tp is given twice"),
        ("fsdp=2,hsdp=2x2", "fsdp and hsdp are forms of data parallel: use one"),
        ("fsdp=3", "3 data-parallel ranks * 2 microbatches must divide the 16 rows"),
        ("tp=3", "parallelism.tensor_parallel_degree=3 must divide llama3 debugmodel's hidden_dim=352: use one of [1, 2, 4"),
        ("fsdp=4,tp=2", "model.vocab_size=257 must divide by parallelism.tensor_parallel_degree=2 where parameters are sharded "
         "over more than 2 ranks (here 4): use 258"),
        ("cp=32", "training.seq_len=32 must divide by 2 (head and tail) * parallelism.context_parallel_degree=32 = 64: use 64"),
        ("pp=2,schedule=1f1b", "schedule='1f1b': expected one of GPipe, 1F1B, Interleaved1F1B"),
        ("pp=8,accumulate=8", "4 blocks and 1 + 1 that the first and last stage have less"),
        ("pp=4,accumulate=2", "needs at least 4 microbatches a step"),
        ("cp=2,method=ulyses", "method='ulyses': expected allgather, ring or ulysses"),
        ("cp=8,method=ulysses", "it must divide the 4 heads and fit the 2 key-value heads"),
        ("chunk=8,reshard=always", "training.loss_chunk_tokens=8 needs the head's weight"),
        ("zero1=2,reshard=always", "data_parallel_sharding='zero1' keeps parameters gathered"),
        ("fsdp=8,tp=2,accumulate=1,hsdp=2x2", "use one"),
    ],
)
def test_a_wrong_layout_is_one_message(cfg, text, message):
    with pytest.raises(ConfigError) as error:
        check_layout(parse_layout(text, cfg))
    assert message in str(error.value)


def test_a_layout_larger_than_the_machine_is_refused(cfg, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"has 16 ranks; this machine can run 8 \(8 a core\)"):
        check_layout(parse_layout("fsdp=16,accumulate=1", cfg))


def test_an_unknown_fault_is_answered_with_the_nearest(cfg):
    with pytest.raises(ConfigError, match="did you mean 'half_loss'"):
        verify_command(cfg, None, full=False, plant="half_los")


@pytest.mark.full
def test_every_pair_of_passes_agrees_with_one_rank(cfg, capsys):
    assert verify_command(cfg, None, full=False, plant=None) == 0, capsys.readouterr().out
