import functools
import math

import numpy as np
import pytest
import torch

from tests.data.conftest import ListSource
from tests.ranks import run_ranks
from tests.runs import full, microbatches_of, rows, small_config
from titanlite.batch import IGNORE
from titanlite.config import override
from titanlite.data.loader import validation_batches
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.trainer import Run, TrainingFault, join, next_microbatches, setup, train_step, validation_loss
from titanlite.utils import ConfigError

ROWS = 4
LAYOUTS = {
    "one rank": (1, {}),
    "fsdp 2": (2, {}),
    "replicate 2": (2, {"parallelism.data_parallel_replicate_degree": 2}),
    "hsdp 2x2": (4, {"parallelism.data_parallel_replicate_degree": 2}),
}
NEVER_RESHARDED = "fsdp 2, never resharded"  # goes through what touches validation only
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
VALIDATED_LAYOUT = pytest.mark.parametrize("layout", [*LAYOUTS, NEVER_RESHARDED])
# Rows of 32 tokens that no number of ranks divides: 70 bytes go on over three rows, the last row is padded.
DOCUMENTS = ListSource(["a" * 70, "bcd", "e" * 31, "fg" * 9, "h"])


def start(cfg) -> Run:
    return setup(cfg, join(cfg))


def is_last(run: Run) -> bool:
    return run.mesh.rank == run.mesh.world_size - 1


def step(run: Run, kind: str = "packed", loss_fn=None):
    return train_step(run, microbatches_of(run, rows(kind, ROWS)), loss_fn or run.loss_fn)


def weights(run: Run) -> dict[str, np.ndarray]:
    return {name: full(p) for part in run.parts for name, p in part.named_parameters()}


def moments(run: Run) -> list[np.ndarray]:
    return [full(value) for state in run.optimizer.state.values() for value in state.values()]


def refused_step(run: Run, loss_fn=None) -> tuple[str, bool]:
    """The message of a step that must fail, and whether weights, moments and count stayed bit-equal."""
    before = weights(run), moments(run), run.step
    with pytest.raises(TrainingFault) as caught:
        step(run, loss_fn=loss_fn)
    after = weights(run), moments(run), run.step
    same = before[2] == after[2] and all(map(np.array_equal, before[0].values(), after[0].values()))
    return str(caught.value), same and all(map(np.array_equal, before[1], after[1]))


# Scenarios: each runs on every rank of a layout and returns what its test looks at.


def loss_is_not_finite_on_the_last_rank(cfg):
    run = start(cfg)
    step(run)
    return refused_step(run, lambda logits, batch: run.loss_fn(logits, batch) * (math.nan if is_last(run) else 1.0))


def gradient_is_not_finite_on_the_last_rank(cfg):
    run = start(cfg)
    step(run)

    def poison(module, args, output):
        output.register_hook(lambda g: g * math.inf)

    if is_last(run):
        run.parts[0].tok_embeddings.register_forward_hook(poison)
    return refused_step(run)


def every_gradient_is_not_finite(cfg):
    run = start(cfg)

    def loss_fn(logits, batch):
        logits.register_hook(lambda g: g * math.nan)
        return run.loss_fn(logits, batch)

    return refused_step(run, loss_fn)


def data_of_the_last_rank_fail_with(error, cfg):
    run = start(cfg)
    good = [microbatches_of(run, rows("even", ROWS))] * 2

    def loader():
        yield good[0]
        if is_last(run):
            raise error
        yield good[1]

    batches = loader()
    train_step(run, next_microbatches(run, batches), run.loss_fn)
    before = weights(run)
    with pytest.raises(Exception) as caught:
        train_step(run, next_microbatches(run, batches), run.loss_fn)
    return type(caught.value).__name__, str(caught.value), all(map(np.array_equal, before.values(), weights(run).values()))


def a_users_mistake_in_the_data(cfg):
    return data_of_the_last_rank_fail_with(ConfigError("data.jsonl:7: not JSON", "training.dataset_path"), cfg)


def a_fault_in_the_data(cfg):
    return data_of_the_last_rank_fail_with(OSError("the disk is gone"), cfg)


def stop_is_asked_on_the_last_rank_in_step_2(cfg):
    run, stops = start(cfg), []
    for number in range(1, 4):
        run.stop_asked = run.stop_asked or (number == 2 and is_last(run))
        stops.append(step(run).stop)
    return stops


def no_label_is_trained_on(cfg):
    run = start(cfg)
    batch = rows("even", ROWS)
    batch = batch._replace(labels=torch.full_like(batch.labels, IGNORE))
    measured = train_step(run, microbatches_of(run, batch), run.loss_fn)
    return measured.loss, measured.grad_norm, measured.tokens


def labels_are_counted(cfg):
    run = start(cfg)
    counts = [step(run, kind).tokens for kind in ("even", "padded", "packed")]
    return counts, run.tokens


def mixed_precision(cfg):
    cfg = override(cfg, {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"})
    run = start(cfg)
    seen = {}
    (model,) = run.parts

    def watch(name, module):
        module.register_forward_hook(lambda m, args, out: seen.update({name: (args[0].dtype, m.weight.dtype, out.dtype)}))

    watch("attention", model.layers["1"].attention.wq)
    watch("feed_forward", model.layers["1"].feed_forward.w2)
    watch("output", model.output)
    run.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients={p.grad.dtype for p in run.parameters()}))
    inner = run.loss_fn

    def loss_fn(logits, batch):
        loss = inner(logits, batch)
        seen["loss"] = loss.dtype
        return loss

    step(run, loss_fn=loss_fn)
    seen["parameters"] = {p.dtype for p in run.parameters()}
    seen["rope"] = {buffer.dtype for buffer in model.buffers()}
    return {name: str(value) for name, value in seen.items()}


def heldout_loss(run: Run, steps: int = -1) -> float:
    cfg = override(run.cfg, {"validation.local_batch_size": 2, "validation.seq_len": 32, "validation.steps": steps}).validation
    ranks = {"dp_rank": run.mesh.batch_rank, "dp_degree": run.mesh.degrees.batch}
    return validation_loss(run, validation_batches(cfg, DOCUMENTS, ByteTokenizer(), **ranks))


def validation(cfg):
    return heldout_loss(start(cfg))


def validation_data_of_the_last_rank_fail(cfg):
    run = start(cfg)

    def batches():
        yield microbatches_of(run, rows("even", ROWS))[0]
        if is_last(run):
            raise OSError("the disk is gone")
        yield microbatches_of(run, rows("even", ROWS))[0]

    with pytest.raises(TrainingFault) as caught:
        validation_loss(run, batches())
    return str(caught.value)


def losses_with_and_without_validation(cfg):
    found = []
    for validated in (False, True):
        run = start(cfg)
        found.append([])
        for _ in range(4):
            measured = step(run)
            found[-1].append((measured.loss, measured.grad_norm))
            if validated:
                heldout_loss(run)
    return found


def validation_sees_new_weights(cfg):
    run = start(cfg)
    found = []
    for _ in range(3):
        found.append(heldout_loss(run))
        step(run)
    return found


VALIDATION_SCENARIOS = (validation, validation_data_of_the_last_rank_fail, losses_with_and_without_validation, validation_sees_new_weights)
SCENARIOS = (
    loss_is_not_finite_on_the_last_rank,
    gradient_is_not_finite_on_the_last_rank,
    every_gradient_is_not_finite,
    a_users_mistake_in_the_data,
    a_fault_in_the_data,
    stop_is_asked_on_the_last_rank_in_step_2,
    no_label_is_trained_on,
    labels_are_counted,
    mixed_precision,
    *VALIDATION_SCENARIOS,
)


def _run_scenarios(scenarios, cfg) -> dict:
    return {scenario.__name__: scenario(cfg) for scenario in scenarios}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each rank of a layout saw in a scenario."""
    folder = tmp_path_factory.mktemp("trainer")

    @functools.cache  # one gang a layout goes through all scenarios: starting one costs more than a scenario
    def ranks_of(layout):
        never = {"parallelism.fsdp_reshard_after_forward": "never"}
        world_size, values = (2, never) if layout == NEVER_RESHARDED else LAYOUTS[layout]
        cfg = override(small_config(folder), {"training.global_batch_size": ROWS, **values})
        return run_ranks(_run_scenarios, world_size, VALIDATION_SCENARIOS if layout == NEVER_RESHARDED else SCENARIOS, cfg)

    return lambda layout, scenario: [rank[scenario.__name__] for rank in ranks_of(layout)]


@EVERY_LAYOUT
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_anything_moved(outcomes, layout):
    for message, same in outcomes(layout, loss_is_not_finite_on_the_last_rank):
        assert message.startswith("step 2: loss nan") and "nothing was applied" in message
        assert same


@EVERY_LAYOUT
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_and_is_named(outcomes, layout):
    for message, same in outcomes(layout, gradient_is_not_finite_on_the_last_rank):
        assert "loss nan" not in message and message.endswith("Gradients that are not finite: tok_embeddings.weight")
        assert same


@EVERY_LAYOUT
def test_of_many_gradients_that_are_not_finite_some_are_named_and_the_rest_counted(outcomes, layout):
    for message, same in outcomes(layout, every_gradient_is_not_finite):
        names = message.split(": ")[-1]
        assert names.startswith("tok_embeddings.weight, layers.0.attention.wq.weight") and names.endswith(" and 34 more")
        assert same


@EVERY_LAYOUT
def test_a_users_mistake_in_one_ranks_data_reaches_all_ranks_as_it_is(outcomes, layout):
    assert set(outcomes(layout, a_users_mistake_in_the_data)) == {("ConfigError", "data.jsonl:7: not JSON", True)}


@EVERY_LAYOUT
def test_a_fault_in_one_ranks_data_reaches_all_ranks(outcomes, layout):
    for kind, message, same in outcomes(layout, a_fault_in_the_data):
        assert kind == "TrainingFault" and "OSError('the disk is gone')" in message
        assert same


@EVERY_LAYOUT
def test_a_stop_asked_on_one_rank_stops_all_at_the_same_step(outcomes, layout):
    for stops in outcomes(layout, stop_is_asked_on_the_last_rank_in_step_2):
        assert stops == [False, True, True]


@EVERY_LAYOUT
def test_a_step_without_labels_has_loss_0_and_no_nan(outcomes, layout):
    assert set(outcomes(layout, no_label_is_trained_on)) == {(0.0, 0.0, 0)}


@EVERY_LAYOUT
def test_tokens_are_the_labels_trained_on_over_all_ranks(outcomes, layout):
    counts = [int((rows(kind, ROWS).labels != IGNORE).sum()) for kind in ("even", "padded", "packed")]
    for found, total in outcomes(layout, labels_are_counted):
        assert found == counts and total == sum(counts)


@EVERY_LAYOUT
def test_mixed_precision_runs_the_model_in_bf16_and_keeps_the_rest_in_fp32(outcomes, layout):
    three = str((torch.bfloat16,) * 3)
    for seen in outcomes(layout, mixed_precision):
        assert (seen["attention"], seen["feed_forward"], seen["output"]) == (three, three, three)
        only = str({torch.float32})
        assert (seen["gradients"], seen["parameters"], seen["rope"]) == (only, only, only)
        assert seen["loss"] == "torch.float32"


def _mean_loss_by_hand(cfg) -> float:
    """Over every pair of every document, label by label, row by row."""
    run = start(cfg)
    (model,) = run.parts
    cfg = override(cfg, {"validation.local_batch_size": 1, "validation.seq_len": 32}).validation
    losses = []
    for batch in validation_batches(cfg, DOCUMENTS, ByteTokenizer(), dp_rank=0, dp_degree=1):
        logprobs = model(batch.tokens, batch.positions, batch.documents).log_softmax(-1)[0]
        losses += [-row[label].item() for row, label in zip(logprobs, batch.labels[0].tolist()) if label != IGNORE]
    assert len(losses) == sum(len(text) + 1 for text in DOCUMENTS.texts)
    return math.fsum(losses) / len(losses)


@pytest.fixture(scope="module")
def expected_validation_loss(tmp_path_factory):
    cfg = small_config(tmp_path_factory.mktemp("by_hand"))
    return run_ranks(_mean_loss_by_hand, 1, cfg)[0]


@VALIDATED_LAYOUT
def test_validation_loss_is_the_mean_over_all_labels_on_any_number_of_ranks(outcomes, layout, expected_validation_loss):
    """128 labels in rows of which the last is mostly padding, and ranks that get no row at all; fp64."""
    for found in outcomes(layout, validation):
        assert found == pytest.approx(expected_validation_loss, rel=1e-12)


@VALIDATED_LAYOUT
def test_a_rank_that_cannot_read_its_validation_data_stops_all_with_its_message(outcomes, layout):
    (message,) = set(outcomes(layout, validation_data_of_the_last_rank_fail))
    assert message.endswith("cannot read its data: OSError('the disk is gone')")


@VALIDATED_LAYOUT
def test_validation_leaves_no_trace_in_training(outcomes, layout):
    for without, validated in outcomes(layout, losses_with_and_without_validation):
        assert validated == without
        assert without[-1][0] < without[0][0]  # it does train


@VALIDATED_LAYOUT
def test_validation_uses_the_weights_of_its_step(outcomes, layout):
    expected = outcomes("one rank", validation_sees_new_weights)[0]
    assert len(set(expected)) == 3
    for found in outcomes(layout, validation_sees_new_weights):
        assert found == pytest.approx(expected, rel=1e-9)  # AdamW divides small numbers by small ones
