"""Multi-token prediction against the paper's formulas, written out token by token."""

import dataclasses
from functools import partial

import torch
import torch.nn.functional as F

from tests.models.test_llama import TINY, build
from titanlite.batch import IGNORE, Batch, with_ahead
from titanlite.losses import cross_entropy, multi_token_loss

# fp64 sums of some hundred terms of order one; a token taken from elsewhere is off by 1e-3 and more.
EXACT = {"rtol": 0, "atol": 1e-12}


def a_batch() -> Batch:
    """A row of documents of 5, 1 and 3 tokens, and one of a single document with a masked label."""
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    labels[0, [4, 5, 8]] = IGNORE
    labels[1, 2] = labels[1, 8] = IGNORE
    documents = torch.tensor([[0] * 5 + [1] + [2] * 3, [0] * 9])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2], list(range(9))])
    return Batch(tokens, labels, positions, documents)


def test_tokens_ahead_are_those_of_the_same_document_and_row():
    batch = with_ahead(a_batch(), 2)
    t, none = batch.tokens[0].tolist(), [IGNORE, IGNORE]
    assert batch.ahead[0, :, 0].tolist() == [[t[1], t[2]], [t[2], t[3]], [t[3], t[4]], [t[4], IGNORE], none, none, [t[7], t[8]], [t[8], IGNORE], none]
    assert batch.ahead[0, :, 1].tolist() == [[t[2], t[3]], [t[3], t[4]], [t[4], IGNORE], none, none, none, [t[8], IGNORE], none, none]
    assert batch.ahead[1, 1, 0].tolist() == [batch.tokens[1, 2].item(), IGNORE]  # a masked label stays masked


def test_a_row_shorter_than_the_depth_has_nothing_ahead():
    row = torch.arange(2)[None]
    assert (with_ahead(Batch(row, row, row, None), 3).ahead[:, :, 1:] == IGNORE).all()


def test_loss_is_of_next_tokens_and_its_gradient_also_of_those_further_ahead():
    args, batch = dataclasses.replace(TINY, mtp_depth=2), with_ahead(a_batch(), 2)
    model, total = build(args), torch.zeros((), dtype=torch.float64)
    loss_fn = partial(multi_token_loss, loss_fn=cross_entropy, weight=0.3, total=total)
    loss = loss_fn(model(batch.tokens, batch.positions, batch.documents, ahead=batch.ahead), batch)
    loss.backward()

    written = build(args)
    written.load_state_dict(model.state_dict())
    losses = written_out(written, batch)
    (losses[0] + 0.3 / 2 * (losses[1] + losses[2])).backward()
    torch.testing.assert_close(loss.detach(), losses[0].detach(), **EXACT)
    torch.testing.assert_close(total, ((losses[1] + losses[2]) / 2).detach(), **EXACT)
    for (name, ours), theirs in zip(model.named_parameters(), written.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **EXACT, msg=name)


def written_out(model, batch: Batch) -> list[torch.Tensor]:
    """Sums of -log P of the token 1, 2 and 3 places on, each document of each row by itself (arXiv 2412.19437, eq. 21 to 25)."""
    losses = [0.0, 0.0, 0.0]
    for row in range(2):
        for document in batch.documents[row].unique():
            tokens, labels = (x[row][batch.documents[row] == document] for x in (batch.tokens, batch.labels))
            n = len(tokens)
            hidden = model.tok_embeddings(tokens)[None]
            for i in range(TINY.n_layers):
                hidden = model.layers[str(i)](hidden, torch.arange(n)[None], None)
            hidden = model.norm(hidden)
            for k in range(3):
                if k:
                    hidden, block = hidden[:, : n - k], model.layers[str(TINY.n_layers + k - 1)]
                    if hidden.shape[1] == 0:
                        break
                    embedded = model.tok_embeddings(tokens[k:])[None]
                    hidden = block(hidden, torch.arange(n - k)[None], None, embedded)
                losses[k] += F.cross_entropy(model.output(hidden[0]), labels[k:], ignore_index=IGNORE, reduction="sum")
    return losses


def test_without_tokens_ahead_a_model_gives_next_tokens_only():
    model, batch = build(dataclasses.replace(TINY, mtp_depth=1)), a_batch()
    assert model(batch.tokens, batch.positions, batch.documents).shape == (2, 9, 61)
