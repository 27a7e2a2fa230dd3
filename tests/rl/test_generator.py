"""The generator draws what the whole model says, whatever is batched with what."""

import math

import numpy as np
import pytest
import torch

from titanlite.config import Model
from titanlite.losses import label_logprobs
from titanlite.models import get_model, get_plan
from titanlite.parallel.parallelize import allocate
from titanlite.rl.generator import EmbeddedGenerator, Request, uniforms

END = 256


def build(family: str, dtype: torch.dtype = torch.float32):
    cfg = Model(name=family)
    model = get_model(cfg, dtype)
    allocate(model, get_plan(cfg), torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts.w" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
            else:
                model.init_parameter(name, parameter, torch.Generator().manual_seed(len(name)))
        model.output.weight.mul_(2)  # so that not all tokens are alike
    return model.eval()


def requests(n: int = 5, most: int = 24) -> list[Request]:
    generator = np.random.default_rng(0)
    return [Request(i, tuple(generator.integers(0, 256, 3 + 7 * i).tolist()), tuple(range(1 + i % 3)), most - 4 * i) for i in range(n)]


def drawn(model, n_slots: int = 4, chunk_tokens: int = 512, seed: int = 0, wanted: list[Request] | None = None) -> dict:
    generator = EmbeddedGenerator(model, end_id=END, n_slots=n_slots, max_length=64, chunk_tokens=chunk_tokens)
    samples = generator.generate(wanted or requests(), temperature=0.8, seed=seed, version=3)
    return {(s.ordinal, s.sample): s for s in samples}


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "deepseek_v3", "gpt_oss", "minimax"])
def test_every_token_has_the_logprob_of_the_whole_forward(family):
    model = build(family)
    samples = drawn(build(family), n_slots=3, chunk_tokens=5)
    assert len(samples) == sum(len(r.samples) for r in requests())
    for (ordinal, _), sample in samples.items():
        assert sample.version == 3 and sample.prompt == requests()[ordinal].prompt
        assert len(sample.ids) == requests()[ordinal].max_new_tokens or sample.ended
        whole = torch.tensor([sample.prompt + sample.ids])
        logits = model(whole[:, :-1], torch.arange(whole.shape[1] - 1)[None])[:, len(sample.prompt) - 1 :]
        logprobs, _ = label_logprobs(logits, whole[:, len(sample.prompt) :], 0.8)
        # fp32 sums of some hundred terms, in other orders; a wrong key is off by 1e-2 and more.
        torch.testing.assert_close(torch.tensor([sample.logprobs]), logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_slots, chunk_tokens", [(1, 512), (2, 1), (7, 4), (64, 3)])
def test_what_is_drawn_does_not_depend_on_slots_and_chunks(n_slots, chunk_tokens):
    expected = drawn(build("llama3", torch.float64))
    found = drawn(build("llama3", torch.float64), n_slots, chunk_tokens)
    assert {key: sample.ids for key, sample in found.items()} == {key: sample.ids for key, sample in expected.items()}


@pytest.mark.parametrize("family", ["llama3", "minimax"])
def test_prompts_that_begin_alike_are_drawn_from_as_if_each_stood_alone(family):
    common = tuple(range(20, 40))
    wanted = [Request(i, prompt, (0, 1), 8) for i, prompt in enumerate([common, (*common, 1), (*common, 1, 2), common, common[:5], (9, *common)])]
    together = drawn(build(family, torch.float64), wanted=wanted)
    for request in wanted:
        alone = drawn(build(family, torch.float64), wanted=[request])
        assert all(together[key].ids == sample.ids for key, sample in alone.items())


def test_temperature_0_takes_the_likeliest_token():
    model = build("llama3", torch.float64)
    generator = EmbeddedGenerator(build("llama3", torch.float64), end_id=END, n_slots=4, max_length=64)
    for sample in generator.generate(requests(), temperature=0, seed=0, version=0):
        whole = torch.tensor([sample.prompt + sample.ids])
        logits = model(whole[:, :-1], torch.arange(whole.shape[1] - 1)[None])[0, len(sample.prompt) - 1 :]
        assert logits.argmax(-1).tolist() == list(sample.ids)
        logprobs, _ = label_logprobs(logits[None], whole[:, len(sample.prompt) :], 1.0)
        torch.testing.assert_close(torch.tensor([sample.logprobs], dtype=torch.float64), logprobs, rtol=0, atol=1e-6)


def test_a_prompts_samples_differ_and_so_do_seeds():
    wanted = [Request(7, (1, 2, 3), tuple(range(6)), 8)]
    first, again, other = (drawn(build("llama3"), seed=seed, wanted=wanted) for seed in (0, 0, 1))
    assert first == again and len({s.ids for s in first.values()}) == 6
    assert {s.ids for s in first.values()}.isdisjoint(s.ids for s in other.values())


def test_a_groups_prompt_is_computed_once():
    model, seen = build("llama3"), []
    model.tok_embeddings.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].numel()))
    drawn(model, n_slots=8, wanted=[Request(0, tuple(range(40)), tuple(range(8)), 3)])
    assert seen[0] == 40 and sum(seen[1:]) <= 8 * 2


def test_slots_are_refilled_as_soon_as_a_sample_ends():
    model, seen = build("llama3"), []
    model.tok_embeddings.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].shape))
    lengths = [2, 2, 2, 30, 4, 4, 4, 4, 4, 4]
    drawn(model, n_slots=4, wanted=[Request(i, (i, 9), (0,), n) for i, n in enumerate(lengths)])
    steps = [shape for shape in seen if shape[1] == 1]
    assert len(steps) < 35 and sum(shape[0] for shape in steps) == sum(n - 1 for n in lengths)  # nobody's token is computed


def test_draws_follow_the_distribution():
    """A head that knows its token's distribution: frequencies of 4,000 draws lie within 5 standard errors."""
    model = build("llama3")
    wanted = [Request(i, (65,), tuple(range(1000)), 1) for i in range(4)]
    found = drawn(model, n_slots=64, wanted=wanted)
    logits = build("llama3")(torch.tensor([[65]]), torch.tensor([[0]]))[0, 0]
    p = (logits / 0.8).softmax(-1).double()
    counts = torch.bincount(torch.tensor([s.ids[0] for s in found.values()]), minlength=len(p)).double()
    assert (((counts - 4000 * p).abs() - 5 * (4000 * p * (1 - p)).sqrt() - 1) < 0).all()


def test_counters_make_even_numbers():
    u = uniforms(0, np.arange(10_000, dtype=np.uint64), np.full(10_000, 3, np.uint64), np.full(10_000, 5, np.uint64))
    assert ((u >= 0) & (u < 1)).all() and abs(u.mean() - 0.5) < 5 / math.sqrt(12 * 10_000) and len(set(u)) == 10_000
    one = [uniforms(*(np.array([x], np.uint64) if i else x for i, x in enumerate(c)))[0] for c in ((1, 2, 3, 4), (1, 2, 4, 3), (1, 3, 2, 4), (2, 1, 3, 4))]
    assert len(set(one)) == 4


@pytest.mark.parametrize(
    "request_, temperature, message",
    [
        (Request(4, (1,) * 60, (0,), 5), 1.0, "prompt 4 has 60 tokens and asks for 5 more: slots hold 64"),
        (Request(4, (), (0,), 5), 1.0, "prompt 4 has 0 tokens"),
        (Request(4, (1,), (0,), 5), -1.0, "temperature=-1.0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(request_, temperature, message):
    generator = EmbeddedGenerator(build("llama3"), end_id=END, n_slots=2, max_length=64)
    with pytest.raises(ValueError, match=message):
        list(generator.generate([request_], temperature=temperature, seed=0, version=0))
