"""Runs that nothing befalls, one for each layout and way of saving, shared by the session."""

from collections.abc import Callable

import pytest

from tests.faults.gang import Run


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Callable[..., Run]:
    finished: dict[tuple[str, str], Run] = {}

    def of(layout: str = "fsdp=2", mode: str = "disabled") -> Run:
        if (layout, mode) not in finished:
            run = Run(tmp_path_factory.mktemp("golden"), layout, mode)
            assert run.leg() == 0
            finished[layout, mode] = run
        return finished[layout, mode]

    return of
