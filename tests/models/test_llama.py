import dataclasses
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titanlite.models.layers import AttentionCore, Rope, RopeScaling, rope_frequencies
from titanlite.models.llama.model import FLAVORS, Llama, LlamaArgs, flops_per_token

TINY = LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61, rope_theta=10000.0)
# fp64 sums of some hundred terms of order one; a wrong mask or rotation is off by 1e-2 and more.
EXACT = {"rtol": 0, "atol": 1e-13}


def build(args: LlamaArgs = TINY, dtype=torch.float64) -> Llama:
    torch.manual_seed(0)
    model = Llama(args).to(dtype)
    for module in model.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers(torch.device("cpu"))
    return model


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(math.prod(shape)))


def packed(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """positions and documents [1, S] of documents of these lengths in one row."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    return positions, documents


# Attention


def reference_attention(q, k, v, visible):
    """Softmax written out, one query at a time; `visible(b, i, j)` says whether query i sees key j."""
    B, S, H, E = q.shape
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            kv = h // (H // k.shape[2])
            for i in range(S):
                seen = [j for j in range(S) if visible(b, i, j)]
                scores = torch.stack([q[b, i, h] @ k[b, j, kv] for j in seen]) / math.sqrt(E)
                weights = scores.exp() / scores.exp().sum()
                out[b, i, h] = sum(w * v[b, j, kv] for w, j in zip(weights, seen))
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_attention_equals_softmax_written_out(kv_heads):
    q, k, v = draw(2, 9, 4, 6), draw(2, 9, kv_heads, 6), draw(2, 9, kv_heads, 6) + 1
    out = AttentionCore()(q, k, v, torch.arange(9).expand(2, 9), None)
    torch.testing.assert_close(out, reference_attention(q, k, v, lambda b, i, j: j <= i), **EXACT)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_in_packed_rows_stays_within_documents(kv_heads):
    q, k, v = draw(2, 9, 4, 6), draw(2, 9, kv_heads, 6), draw(2, 9, kv_heads, 6) + 1
    positions, documents = (torch.cat(pair) for pair in zip(packed(4, 1, 4), packed(2, 7)))
    out = AttentionCore()(q, k, v, positions, documents)
    expected = reference_attention(q, k, v, lambda b, i, j: j <= i and documents[b, i] == documents[b, j])
    torch.testing.assert_close(out, expected, **EXACT)


def test_documents_of_one_segment_give_what_no_documents_give():
    q, k, v = draw(1, 9, 4, 6), draw(1, 9, 2, 6), draw(1, 9, 2, 6) + 1
    positions, documents = packed(9)
    out = AttentionCore()(q, k, v, positions, documents)
    torch.testing.assert_close(out, AttentionCore()(q, k, v, positions, None), **EXACT)


def test_packed_documents_get_the_logits_they_get_alone():
    model, lengths = build(), (5, 1, 8)
    tokens = torch.randint(0, TINY.vocab_size, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    together = model(tokens, *packed(*lengths))
    alone = [model(part, torch.arange(part.shape[1])[None]) for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), **EXACT)


def test_no_logit_depends_on_a_later_token():
    model = build()
    tokens = torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 7] += 1
    positions = torch.arange(12)[None]
    before, after = model(tokens, positions), model(changed, positions)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7], after[:, 7])


# Rotary positions


def test_rope_is_the_complex_rotation_of_metas_reference_code():
    rope = Rope(8, 10000.0, None).double()
    rope.init_buffers(torch.device("cpu"))
    x, positions = draw(2, 5, 3, 8), torch.tensor([[0, 1, 2, 3, 4], [7, 0, 131071, 3, 2]])
    angles = positions[..., None].double() * (1.0 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8)).double()
    turns = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)
    torch.testing.assert_close(rope(x, positions), expected, **EXACT)


@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling(factor=32.0), RopeScaling(4.0, 2.0, 8.0, 4096)])
def test_rope_scaling_is_the_published_piecewise_formula(scaling):
    def published(freq: float) -> float:
        wavelength = 2 * math.pi / freq
        if wavelength < scaling.original_max_position / scaling.high_freq_factor:
            return freq
        if wavelength > scaling.original_max_position / scaling.low_freq_factor:
            return freq / scaling.factor
        smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1 - smooth) * freq / scaling.factor + smooth * freq

    plain = rope_frequencies(128, 500000.0)
    scaled = scaling.frequencies(128, 500000.0)
    expected = torch.tensor([published(f) for f in plain.tolist()])
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)  # fp32 against Python's fp64: a few ulp
    kinds = {float(round(p / s, 3)) for p, s in zip(plain.tolist(), scaled.tolist())}
    assert {1.0, scaling.factor} < kinds  # some kept, some stretched, some between


def test_rope_keeps_the_dtype_of_what_it_turns_and_its_frequencies_in_fp32_under_bf16():
    rope = Rope(8, 10000.0, None).bfloat16()
    rope.init_buffers(torch.device("cpu"))
    assert rope.freqs.dtype == torch.float32
    x = draw(1, 3, 1, 8).bfloat16()
    far = torch.tensor([[0, 100_000, 131_071]])  # angles in bf16 would be wrong by whole turns here
    expected = Rope(8, 10000.0, None)(x.float(), far)
    assert rope(x, far).dtype == torch.bfloat16
    torch.testing.assert_close(rope(x, far).float(), expected, rtol=2**-8, atol=0)  # rounded once


def test_rope_frequencies_are_no_part_of_the_state_dict():
    assert not [name for name in Llama(TINY).state_dict() if "rope" in name]


# Sizes


def parameters_of(flavor: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Llama(FLAVORS[flavor]).parameters())


@pytest.mark.parametrize(
    "flavor, count",
    [  # of the models that Meta published; 1B and 3B tie their embeddings
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_a_flavor_has_the_parameters_of_the_published_model(flavor, count):
    assert parameters_of(flavor) == count


@pytest.mark.parametrize("seq_len", [7, 16])
@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token_is_what_a_step_counts_with_attention_over_all_keys_halved(seq_len, tied):
    """The math kernel multiplies every query with all S keys; of these a causal token needs (S + 1) / 2 on average."""
    args = dataclasses.replace(TINY, tie_embeddings=tied)
    model, tokens = build(args, torch.float32), torch.zeros(3, seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, torch.arange(seq_len).expand(3, -1)).sum().backward()
    over_all_keys = 2 * seq_len - 1  # (over_all_keys + 1) / 2 = seq_len
    assert counter.get_total_flops() == tokens.numel() * flops_per_token(args, over_all_keys)
    pairs = sum(i + 1 for i in range(seq_len))  # (query, key) pairs that a causal row has
    per_pair = 3 * TINY.n_layers * 2 * 2 * TINY.n_heads * TINY.head_width  # forward + 2 x backward, scores and values
    saved = (seq_len * seq_len - pairs) * per_pair
    assert seq_len * (flops_per_token(args, over_all_keys) - flops_per_token(args, seq_len)) == saved


def test_flops_per_token_counts_what_predicts_further_ahead():
    args = dataclasses.replace(TINY, mtp_depth=2)
    model, tokens = build(args, torch.float32), torch.zeros(3, 8, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, torch.arange(8).expand(3, -1), ahead=torch.zeros(3, 8, 2, 2, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() == tokens.numel() * flops_per_token(args, 15)


# Parts and ties


def test_a_submodule_set_to_none_is_passed_through():
    model, tokens, positions = build(), torch.arange(6)[None], torch.arange(6)[None]
    whole = model(tokens, positions)
    first, last = build(), build()
    del first.layers["1"], last.layers["0"]
    first.norm = first.output = last.tok_embeddings = None
    hidden = first(tokens, positions)
    assert hidden.shape == (1, 6, TINY.dim)
    assert torch.equal(last(hidden, positions), whole)


def test_tied_embeddings_are_one_parameter_and_get_both_gradients():
    model = build(dataclasses.replace(TINY, tie_embeddings=True))
    assert model.output.weight is model.tok_embeddings.weight
    assert [n for n, _ in model.named_parameters() if "tok_embeddings" in n or "output" in n] == ["tok_embeddings.weight"]
    untied = build()
    untied.load_state_dict({**model.state_dict(), "output.weight": model.output.weight})
    for each in (model, untied):
        each(torch.arange(6)[None], torch.arange(6)[None])[0, :, 3].square().sum().backward()
    both = untied.tok_embeddings.weight.grad + untied.output.weight.grad
    torch.testing.assert_close(model.tok_embeddings.weight.grad, both, **EXACT)
