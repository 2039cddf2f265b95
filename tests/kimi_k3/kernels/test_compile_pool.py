"""A job that hangs or kills its process is named; the others are done all the same. Light imports: processes start."""

from __future__ import annotations

import os
import time

import pytest

from kimi_k3.kernels.compile_pool import run


def work(job: str) -> str:
    if job == "hangs":
        time.sleep(600)
    if job == "dies":
        os._exit(7)
    return job.upper()


def raises(job: str) -> str:
    raise SystemExit(3)


def lost(job: str, reason: str) -> str:
    return reason


def test_results_of_every_job_and_culprits_by_name() -> None:
    jobs = ["a", "hangs", "b", "dies", "c", "d"]
    began = time.monotonic()
    found = dict(run(jobs, work, 2, 1.5, lost))
    assert time.monotonic() - began < 30
    died = "its process died, exit code 7"
    assert found == {"a": "A", "b": "B", "c": "C", "d": "D", "hangs": "not finished in 1.5 s", "dies": died}


def test_no_job_needs_no_process_and_one_that_ends_its_process_is_no_hang() -> None:
    assert dict(run([], work, 2, 5, lost)) == {}
    assert dict(run(["x", "y"], raises, 2, 30, lost)) == dict.fromkeys("xy", "its process died, exit code 3")


def test_a_process_that_cannot_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cannot start: its process died"):
        list(run(["a"], _Unloadable(), 1, 30, lost))


class _Unloadable:
    """Pickles here, but not there."""

    def __call__(self, job: str) -> str:
        return job

    def __reduce__(self):
        return (int, ("no number",))
