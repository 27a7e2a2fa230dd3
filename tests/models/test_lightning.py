"""Lightning attention against its sum, written out."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.test_llama import TINY, build, draw, packed
from titanlite.generate import generate
from titanlite.models import lightning
from titanlite.models.decoder import flops_per_token
from titanlite.models.lightning import LightningCore

HYBRID = dataclasses.replace(TINY, n_layers=4, full_attention_every=2, residual_scale=2.0, rotary_dim=4)
# fp64 sums of some hundred terms of order one, with decays from fp32 slopes on both sides.
EXACT = {"rtol": 0, "atol": 1e-12}


def written_out(core: LightningCore, q, k, v, documents):
    decay = torch.exp(-core.slopes.double())
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            for j in range(i + 1):
                if documents is None or documents[b, i] == documents[b, j]:
                    out[b, i] += (decay ** (i - j) * (q[b, i] * k[b, j]).sum(-1))[:, None] * v[b, j]
    return out


@pytest.fixture
def core(monkeypatch):
    monkeypatch.setattr(lightning, "BLOCK", 4)
    core = LightningCore(n_heads=3, layer=1, n_layers=4)
    core.slopes = core.slopes.double()
    return core


@pytest.mark.parametrize("seq_len", [1, 4, 5, 15])
def test_blocks_make_the_sum_over_all_tokens_before(core, seq_len):
    q, k, v = (draw(2, seq_len, 3, 5) + i for i in range(3))
    torch.testing.assert_close(core(q, k, v, None, None), written_out(core, q, k, v, None), **EXACT)


@pytest.mark.parametrize("lengths", [(15,), (4, 4, 7), (1, 1, 9, 4), (6, 2, 2, 5)])
def test_nothing_goes_from_one_document_to_the_next(core, lengths):
    q, k, v = (draw(1, 15, 3, 5) + i for i in range(3))
    _, documents = packed(*lengths)
    torch.testing.assert_close(core(q, k, v, None, documents), written_out(core, q, k, v, documents), **EXACT)


def test_a_sequence_can_be_gone_on_with_from_its_state(core):
    q, k, v = (draw(1, 11, 3, 5) + i for i in range(3))
    first, state = core.advance(q[:, :6], k[:, :6], v[:, :6], None, None)
    rest = core.advance(q[:, 6:], k[:, 6:], v[:, 6:], None, state)[0]
    torch.testing.assert_close(torch.cat([first, rest], 1), written_out(core, q, k, v, None), **EXACT)


def test_a_part_of_the_heads_has_the_slopes_of_the_whole():
    whole, part = LightningCore(8, 2, 5), LightningCore(8, 2, 5)
    part.hold(1, 2)
    part.hold(0, 2)
    assert torch.equal(part.slopes, whole.slopes[4:6])
    part.init_buffers(torch.device("cpu"))
    assert torch.equal(part.slopes, whole.slopes[4:6])


def test_generation_goes_on_as_the_whole_sequence_would():
    model, fresh = build(HYBRID).eval(), build(HYBRID)
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter.data, torch.Generator().manual_seed(0))
    fresh.load_state_dict(model.state_dict())
    prompt = [3, 1, 4, 1, 5]
    ids = list(generate(model, prompt, max_new_tokens=6, end_id=-1, temperature=0))
    whole = torch.tensor([prompt + ids])
    logits = fresh(whole, torch.arange(whole.shape[1])[None])
    assert ids == logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("blocks", [1, 3])
def test_flops_are_what_a_step_counts_with_pairs_halved(blocks, monkeypatch):
    monkeypatch.setattr(lightning, "BLOCK", 8)
    monkeypatch.setattr("titanlite.models.decoder.BLOCK", 8)
    S, model = 8 * blocks, build(HYBRID, torch.float32)
    tokens = torch.zeros(3, S, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, torch.arange(S).expand(3, -1)).sum().backward()
    # Kernels multiply every pair: of S keys in two layers, of a block's 8 in two. And the last block's state is made for nobody:
    # its backward is not, so one of three passes.
    pairs = 6 * 2 * TINY.n_heads * TINY.head_width * (2 * (S - (S + 1) / 2) + 2 * (8 - (8 + 1) / 2))
    unused = 2 * 2 * TINY.n_heads * TINY.head_width**2 / blocks
    assert counter.get_total_flops() == tokens.numel() * (flops_per_token(HYBRID, S) + pairs + unused)
