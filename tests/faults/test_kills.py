"""A run that is killed anywhere, and started again, ends as the one that was not: in bits, with each sample once."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.faults.gang import LAYOUTS, MODES, Fault, Run, differences, kill_itself
from tests.faults.points import COMMITTED, COMPUTE, STAGING, WRITING
from titanlite.checkpoint.folder import list_steps

SAVING = (
    WRITING,
    "before a rank's state",
    "before the seal",
    "before the manifest",
    "before the rename",
    COMMITTED,
    "while old steps are deleted",
)
LOADING, ABANDONING, QUARANTINING = "while a step is loaded", "while later steps are abandoned", "while a step is quarantined"
full = pytest.mark.full
BACK_TO, OTHER = ("--checkpoint.load_step", 30), ("--optimizer.lr", 5e-3)


@pytest.mark.parametrize(
    "mode, killed",
    [
        ("disabled", COMPUTE),
        ("disabled", (*SAVING[:4], LOADING)),
        ("disabled", SAVING[4:]),
        ("async", (STAGING, WRITING, COMMITTED)),
        ("async_with_pinned_mem", (WRITING,)),
    ],
)
def test_a_run_that_is_killed_at_one_point_after_another_ends_as_if_it_had_not_been(golden, tmp_path, mode, killed):
    run = Run(tmp_path, mode=mode)
    for point in killed:
        # The golden run stages and loads nothing.
        fault = Fault(point, 1, 1) if point in (STAGING, LOADING) else golden().draw(point, mode, part=len(killed))
        assert run.killed(fault), point
        assert not run.last.outlived(), "a process would go on writing into the folder of the next gang"
    assert run.leg() == 0
    assert differences(run, golden()) == []
    assert list_steps(run.checkpoints) == [30, 35, 40]


@full
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("point", (*COMPUTE, STAGING, *SAVING))
def test_a_run_that_is_killed_once_ends_as_if_it_had_not_been(golden, tmp_path, point, seed):
    mode = MODES[1 + seed % 2] if point == STAGING else MODES[seed % 3]
    run = Run(tmp_path, mode=mode)
    fault = golden(mode=mode).draw(point, seed)
    assert run.killed(fault)
    assert run.leg() == 0
    assert differences(run, golden()) == [], fault


def test_a_process_that_is_killed_while_it_writes_costs_its_step_and_not_the_run(golden, tmp_path):
    run = Run(tmp_path, mode="async_with_pinned_mem")
    assert run.leg(faults=[golden().draw(WRITING, "writer", part=2, act=kill_itself)]) == 0
    assert run.log().count("checkpoint_failed") == 1
    assert differences(run, golden()) == []
    assert list_steps(run.checkpoints) == [30, 35, 40] and not list(run.checkpoints.glob(".tmp-*"))


def kill_the_writer() -> None:
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)


@full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [1, 9])  # while it starts; after its first save
def test_a_process_that_is_killed_while_it_writes_nothing_costs_a_step_and_not_the_run(golden, tmp_path, rank, step):
    run = Run(tmp_path, mode="async_with_pinned_mem")
    assert run.start(faults=[Fault("in forward", rank, 2 * step, act=kill_the_writer)]).wait(timeout_s=120) == 0
    assert run.log().count("checkpoint_failed") == 1
    assert differences(run, golden()) == []
    assert list_steps(run.checkpoints) == [30, 35, 40]


@pytest.fixture(scope="module")
def gone_back(golden, tmp_path_factory):
    """The golden run gone back to step 30 and on from there with another learning rate."""
    run = golden().copy(tmp_path_factory.mktemp("gone_back"))
    assert run.leg(*BACK_TO, *OTHER) == 0
    assert {found.split(":")[0] for found in differences(run, golden())} == {f"step {step}" for step in range(31, 41)}
    return run


@pytest.mark.parametrize("nth, again", [(1, True), (2, False), pytest.param(1, False, marks=full), pytest.param(2, True, marks=full)])
def test_a_run_that_is_killed_while_it_goes_back_is_on_one_of_the_two_branches(golden, gone_back, tmp_path, nth, again):
    run = golden().copy(tmp_path)
    assert run.killed(Fault(ABANDONING, 0, nth), *BACK_TO, *OTHER)
    assert run.leg(*(*BACK_TO, *OTHER) if again else ()) == 0
    assert differences(run, gone_back if again else golden()) == []


@pytest.mark.parametrize("point", ["before the rename", pytest.param(COMMITTED, marks=full)])
def test_a_run_that_is_killed_in_its_first_save_after_going_back_goes_on_on_the_new_branch(golden, gone_back, tmp_path, point):
    run = golden().copy(tmp_path)
    assert run.killed(Fault(point, 0, 1), *BACK_TO, *OTHER)
    assert run.leg(*OTHER) == 0
    assert differences(run, gone_back) == []


def test_a_step_of_the_old_branch_that_is_put_back_is_not_gone_on_from(gone_back, tmp_path):
    run = gone_back.copy(tmp_path)
    shutil.rmtree(run.checkpoints / "step-40")
    (run.checkpoints / "abandoned" / "step-40-1").rename(run.checkpoints / "step-40")
    assert run.leg(*OTHER) == 0
    assert [record["step"] for record in run.records()[50:]] == [36, 37, 38, 39, 40]
    assert differences(run, gone_back) == []


@pytest.mark.parametrize("nth", [pytest.param(1, marks=full), 2])
def test_a_run_that_is_killed_while_it_quarantines_a_step_goes_on_from_the_one_before(golden, tmp_path, nth):
    run = golden().copy(tmp_path)
    (run.checkpoints / "step-40" / "__0_0.distcp").write_bytes(b"")
    assert run.killed(Fault(QUARANTINING, 0, nth))
    assert run.leg() == 0
    assert [record["step"] for record in run.records()[40:]] == [36, 37, 38, 39, 40]
    assert differences(run, golden()) == []


@full
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "fsdp=2"])
def test_a_run_of_another_layout_that_is_killed_ends_as_if_it_had_not_been(golden, tmp_path, layout):
    run = Run(tmp_path, layout)
    assert run.killed(golden(layout).draw(WRITING, layout))
    assert run.leg() == 0
    assert differences(run, golden(layout)) == []
