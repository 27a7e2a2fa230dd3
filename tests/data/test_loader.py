import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from titanlite.batch import IGNORE
from titanlite.config import Data, DataLoader, DataSource, Training, Validation
from titanlite.data.loader import _StepRows, build_train_loader, data_have_ended, validation_batches
from titanlite.data.mixing import Turns
from titanlite.data.packing import Documents
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.utils import ConfigError

ROWS, SEQ_LEN, STEPS = 8, 32, 24  # a step takes 8 * 32 of about 2000 pairs: the epoch ends in step 8
BYTES = ByteTokenizer()


@pytest.fixture
def build():
    """Loaders of these tests, closed at their end."""
    loaders = []

    def build_loader(
        source, dp_rank=0, dp_degree=1, positions=None, *, workers=0, local=2, rows=ROWS, prefetch=None, seq_len=SEQ_LEN, **data
    ):
        options = DataLoader(num_workers=workers, prefetch_factor=prefetch)
        cfg = Training(local_batch_size=local, seq_len=seq_len, dataloader=options)
        ranks = {"dp_rank": dp_rank, "dp_degree": dp_degree, "global_batch_size": rows}
        sources = source if isinstance(source, list) else [source]
        loaders.append(build_train_loader(cfg, Data(**data), sources, BYTES, seed=7, positions=positions, **ranks))
        return loaders[-1]

    yield build_loader
    for loader in loaders:
        loader.close()


def rows_of(batches):
    """[R, 4, S]: the rows of a step, with documents filled in."""
    full = [b._replace(documents=torch.zeros_like(b.tokens) if b.documents is None else b.documents) for b in batches]
    return torch.cat([torch.stack(b[:4], dim=1) for b in full])


def read(loaders, steps):
    """[steps, V, 4, S] over all ranks, and the gathered positions [V, 2]."""
    rows = [torch.cat([rows_of(next(loader)) for loader in loaders]) for _ in range(steps)]
    return torch.stack(rows), torch.cat([loader.positions for loader in loaders])


@pytest.fixture
def undisturbed(build, source):
    return read([build(source)], STEPS)


def test_a_step_is_a_list_of_microbatches_on_the_cpu(build, source):
    batches = next(build(source))
    assert len(batches) == 4
    for field in (batches[0].tokens, batches[0].labels, batches[0].positions):
        assert field.shape == (2, SEQ_LEN) and field.dtype == torch.int64 and field.is_contiguous()


@pytest.mark.parametrize("dp_degree, workers", [(1, 1), (1, 2), (2, 0), (2, 2), (4, 0), (4, 2)])
def test_the_rows_of_a_step_do_not_depend_on_ranks_and_workers(build, source, undisturbed, dp_degree, workers):
    loaders = [build(source, rank, dp_degree, workers=workers) for rank in range(dp_degree)]
    rows, positions = read(loaders, STEPS)
    assert torch.equal(rows, undisturbed[0])
    assert torch.equal(positions, undisturbed[1])


def test_a_run_stopped_after_any_step_goes_on_as_if_undisturbed(build, source, undisturbed):
    positions = None
    for step in range(STEPS):
        rows, positions = read([build(source, positions=positions)], 1)
        assert torch.equal(rows[0], undisturbed[0][step])


def test_a_run_goes_on_undisturbed_with_other_ranks_and_workers_each_time(build, source, undisturbed):
    positions, done = None, 0
    for dp_degree, workers, steps in [(1, 0, 5), (2, 2, 3), (4, 1, 6), (1, 2, 4), (2, 0, 6)]:
        loaders = [build(source, rank, dp_degree, positions, workers=workers) for rank in range(dp_degree)]
        rows, positions = read(loaders, steps)
        assert torch.equal(rows, undisturbed[0][done : done + steps])
        done += steps
    assert done == STEPS and torch.equal(positions, undisturbed[1])


def test_steps_that_workers_prepared_ahead_do_not_count_as_read(build, source):
    ahead, plain = build(source, workers=2, prefetch=8), build(source)
    assert ahead.positions.tolist() == [[row, 0, 0, 0] for row in range(ROWS)]
    for _ in range(3):
        next(ahead), next(plain)
        assert torch.equal(ahead.positions, plain.positions)


def test_documents_are_left_out_where_every_row_is_one_segment(build, source_of):
    long, short = "x" * 1000, "y" * 5
    batches = next(build(source_of([long] * 8)))
    assert all(batch.documents is None for batch in batches)
    batches = next(build(source_of([short] * 8)))
    assert all(batch.documents is not None for batch in batches)
    (first, second) = next(build(source_of([long, long, long, short]), local=2, rows=4))
    assert sorted([first.documents is None, second.documents is None]) == [False, True]


def test_workers_that_cannot_share_the_rows_evenly_are_refused(build, source):
    with pytest.raises(ConfigError, match=r"num_workers=3 must divide the 4 rows .* use one of \[0, 1, 2, 4\]"):
        build(source, dp_degree=2, workers=3)


def test_a_checkpoint_of_another_global_batch_size_is_refused(build, source):
    with pytest.raises(ConfigError, match="training.global_batch_size=8, but the checkpoint's data were split for 16"):
        build(source, positions=torch.zeros(16, 4, dtype=torch.int64))


def test_fewer_documents_than_rows_are_told_of(build, source_of, caplog):
    with caplog.at_level(logging.WARNING, "titanlite"):
        build(source_of(["only one"]))
    assert caplog.messages == ["documents=1 rows=8: rows of one step hold the same document"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_mistake_found_while_reading_arrives_as_it_is(build, source_of, workers):
    loader = build(source_of([ConfigError("no such record", "training.dataset_path")] * 8), workers=workers)
    with pytest.raises(ConfigError) as caught:
        next(loader)
    assert str(caught.value) == "no such record" and caught.value.keys == ("training.dataset_path",)


def test_a_workers_exception_arrives_with_the_documents_name(build, source_of):
    loader = build(source_of([OSError("the disk is gone")] * 8), workers=2)
    with pytest.raises(OSError, match="(?s)the disk is gone.*while reading document ., text . of the list") as caught:
        next(loader)
    loader.close()
    assert multiprocessing.active_children() == [], f"{caught.tb} must not keep them"


def test_workers_live_on_when_the_whole_job_gets_a_signal(build, source, undisturbed):
    loader = build(source, workers=2)
    rows = [read([loader], 1)[0]]
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for sent in (signal.SIGTERM, signal.SIGINT):
        for worker in workers:
            os.kill(worker.pid, sent)
    rows.append(read([loader], STEPS - 1)[0])  # more than was prepared before the signals
    assert torch.equal(torch.cat(rows), undisturbed[0])
    assert all(worker.is_alive() for worker in workers)


def test_close_ends_the_workers_before_and_after_the_first_step(build, source):
    build(source, workers=2).close()
    loader = build(source, workers=2)
    next(loader)
    loader.close()
    loader.close()
    assert multiprocessing.active_children() == []


def test_the_interpreter_ends_with_workers_running_and_imports_only_what_is_used():
    program = """
import sys
from titanlite.config import Data, DataLoader, DataSource, Model, Training
from titanlite.data.build import build_source
from titanlite.data.loader import build_train_loader
from titanlite.data.tokenizer import build_tokenizer

unused = {"datasets", "tokenizers", "torchdata"}
sources, tokenizer = [build_source(DataSource("stdlib"))], build_tokenizer(Model(), None, None)
options = {"seed": 0, "dp_rank": 0, "dp_degree": 1, "global_batch_size": 8}
next(build_train_loader(Training(), Data(), sources, tokenizer, **options))
assert not unused & set(sys.modules), unused & set(sys.modules)

loader = build_train_loader(Training(dataloader=DataLoader(num_workers=2)), Data(), sources, tokenizer, **options)
next(loader)
raise SystemExit(3)
"""
    ended = subprocess.run([sys.executable, "-W", "error", "-c", program], timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")


def test_workers_end_soon_after_a_trainer_that_was_killed(build, source_of):
    ours, theirs = multiprocessing.Pipe()

    def train():
        loader = build(source_of(["x" * 1_000_000] * 8), workers=2, seq_len=100_000)  # rows that fill a pipe
        next(loader)
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = multiprocessing.get_context("fork").Process(target=train)
    trainer.start()
    trainer.join()
    theirs.close()  # the workers hold the other copies
    assert ours.poll(30)
    with pytest.raises(EOFError):
        ours.recv()


# A mixture, best fit, data that end

MIXED = {"sources": (DataSource("text", weight=2.0), DataSource("jsonl", weight=1.0)), "packing": "best_fit"}


@pytest.mark.parametrize("dp_degree, workers", [(2, 2), (4, 0)])
def test_a_mixture_packed_by_best_fit_does_not_depend_on_ranks_and_workers_and_resumes(build, texts, source_of, dp_degree, workers):
    mixture = [source_of(texts), source_of([text.upper() for text in texts])]
    rows, positions = read([build(mixture, **MIXED)], 20)
    loaders = [build(mixture, rank, dp_degree, workers=workers, **MIXED) for rank in range(dp_degree)]
    first, halfway = read(loaders, 9)
    rest, end = read([build(mixture, positions=halfway, **MIXED)], 11)
    assert torch.equal(torch.cat([first, rest]), rows) and torch.equal(end, positions)
    upper = [any(65 <= t <= 70 for t in row[0].tolist()) for step in rows for row in step]
    assert sum(upper) == pytest.approx(len(upper) / 3, abs=2)


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@pytest.mark.parametrize("dp_degree, workers", [(1, 0), (4, 2)])
def test_uneven_data_end_for_all_ranks_with_each_sample_read_once(build, texts, source, packing, dp_degree, workers):
    data = {"epochs": 1, "packing": packing}
    loaders = [build(source, rank, dp_degree, workers=workers, **data) for rank in range(dp_degree)]
    steps = []
    while any(loader.has_more() for loader in loaders):
        steps.append(read(loaders, 1))
    rows = torch.cat([rows for rows, _ in steps]).flatten(0, 1)
    pairs = Counter(zip(*rows[:, :2].transpose(0, 1)[:, rows[:, 1] != IGNORE].tolist(), strict=True))
    ids = [BYTES.encode_document(text).tolist() for text in texts]
    assert pairs == Counter(pair for document in ids for pair in zip(document, document[1:], strict=False))
    assert any((row[1] == IGNORE).all() for row in steps[-1][0][0])  # some rows had ended earlier
    assert data_have_ended(Data(**data), [source], steps[-1][1])
    assert not data_have_ended(Data(**data), [source], steps[-2][1])
    assert not data_have_ended(Data(packing=packing), [source], steps[-1][1])


def test_what_a_worker_gets_can_be_pickled_for_other_start_methods(build, source):
    rows = next(build(source)._steps)[0]
    documents, turns = Documents(source, BYTES, 7), Turns([1.0])
    steps = _StepRows([documents], turns, "split", SEQ_LEN, np.array([(row, 0, 0, 0) for row in range(ROWS)]), first=0, stride=ROWS, seed=7)
    fields, after = next(iter(pickle.loads(pickle.dumps(steps))))
    assert (fields == rows).all() and after.shape == (ROWS, 4)


def validation_rows(source, dp_degree, *, local=2, steps=-1):
    """Every rank's rows."""
    cfg = Validation(local_batch_size=local, seq_len=SEQ_LEN, steps=steps)
    ranks = []
    for rank in range(dp_degree):
        batches = list(validation_batches(cfg, source, BYTES, dp_rank=rank, dp_degree=dp_degree))
        ranks.append(rows_of(batches) if batches else torch.empty(0, 4, SEQ_LEN))
    return ranks


@pytest.mark.parametrize("dp_degree, local", [(2, 2), (3, 2), (4, 3), (5, 1), (64, 2)])
def test_validation_sees_the_same_rows_under_every_number_of_ranks(source, dp_degree, local):
    (alone,) = validation_rows(source, 1)
    ranks = validation_rows(source, dp_degree, local=local)
    assert len({len(rows) for rows in ranks}) == 1  # no rank waits for another in vain

    def trained_on(rows):
        return Counter(str(row[:2].tolist()) for row in rows if (row[1] != IGNORE).any())

    assert trained_on(torch.cat(ranks)) == trained_on(alone)


def test_validation_deals_batches_to_the_ranks_in_turn(source):
    (alone,) = validation_rows(source, 1)
    ranks = validation_rows(source, 2)
    in_turn = torch.stack([rows.view(-1, 2, 4, SEQ_LEN) for rows in ranks], dim=1).flatten(0, 2)
    assert torch.equal(in_turn[: len(alone)], alone)


def test_validation_ends_after_its_steps(source):
    (alone,) = validation_rows(source, 1, local=4)
    ranks = validation_rows(source, 2, steps=3)
    assert [len(rows) for rows in ranks] == [6, 6]
    assert torch.equal(torch.cat([ranks[0][:2], ranks[1][:2]]), alone[:4])


def test_rows_that_the_last_validation_batch_lacks_are_not_trained_on(source_of):
    first, second = validation_rows(source_of(["abc"]), 2)
    assert (first[0, 1, :4].tolist(), set(first[0, 1, 4:].tolist())) == ([97, 98, 99, 256], {IGNORE})
    assert (first[1, 1] == IGNORE).all() and (second[:, 1] == IGNORE).all()
    assert second[0, 2].tolist() == list(range(SEQ_LEN))
