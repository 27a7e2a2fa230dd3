"""A disk that is full, and a folder that another gang is at work in."""

import errno
import os
import subprocess
import time
from functools import partial

import pytest

from tests.faults.gang import Fault, Run, differences
from tests.faults.points import WRITING
from titanlite.checkpoint.folder import list_steps


def fill(folder):
    with (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


def make_room(folder, seen):
    seen.write_text(" ".join(sorted(path.name for path in folder.iterdir())))
    (folder / "ballast").unlink()


def refuse():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_a_step_and_not_the_run_nor_the_last_good_step(golden, tmp_path):
    run = Run(tmp_path)
    run.checkpoints.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", run.checkpoints], capture_output=True).returncode:
        pytest.skip("a small file system needs the right to mount")
    try:
        second_save = golden().last.times[WRITING][1] // 8 + 20  # its beginning: there was room when it was looked for
        full = Fault(WRITING, 1, second_save, act=partial(fill, run.checkpoints))
        room = Fault("in forward", 0, 2 * 12, act=partial(make_room, run.checkpoints, tmp_path / "seen"))
        assert run.leg(faults=[full, room]) == 0
        assert (tmp_path / "seen").read_text() == "ballast step-5"
        assert run.log().count("checkpoint_failed step=10 ") == run.log().count("checkpoint_failed") == 1
        assert differences(run, golden()) == []
        assert list_steps(run.checkpoints) == [30, 35, 40]
    finally:
        subprocess.run(["umount", run.checkpoints], check=True)


@pytest.mark.parametrize("mode", ["async", pytest.param("async_with_pinned_mem", marks=pytest.mark.full)])
def test_a_disk_that_is_full_in_the_midst_of_an_asynchronous_save_costs_a_step_and_not_the_run(golden, tmp_path, mode):
    run = Run(tmp_path, mode=mode)
    assert run.leg(faults=[golden().draw(WRITING, mode, part=2, act=refuse)]) == 0
    assert run.log().count("checkpoint_failed") == run.log().count("is the disk full?") == 1
    assert differences(run, golden()) == []
    assert list_steps(run.checkpoints) == [30, 35, 40] and not list(run.checkpoints.glob(".tmp-*"))


def pause(folder):
    (folder / "paused").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)


def test_a_second_gang_is_refused_and_the_first_is_not_disturbed(golden, tmp_path, capfd):
    run = Run(tmp_path)
    first = run.start(faults=[Fault("in forward", 0, 40, act=partial(pause, tmp_path))])
    try:
        while first.ranks[0].is_alive() and not (tmp_path / "paused").exists():
            time.sleep(0.01)
        seen = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if "logs" not in path.parts}
        assert run.leg() == 2
        assert "is being written by process" in capfd.readouterr().err
        assert seen == {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if "logs" not in path.parts}
        (tmp_path / "go").touch()
        assert first.wait() == 0
    finally:
        first.kill()
    assert differences(run, golden()) == []
