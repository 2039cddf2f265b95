"""Which step a profiler event belongs to, from made-up events and from a real profile of the toy engine."""

from fake_target import TARGET

from fasttrack.checks.witness import Event, StepProfiler, attribute
from fasttrack.target import EngineSpec, Request, Sampling

D = TARGET.describe()


def step(index, start, end):
    return Event(f"fasttrack.step/a/b/{index}", start, end, on_device=False)


def by_step(events):
    return {(t.index, t.source.rpartition("/")[2]): (dict(t.ops), t.other_ops) for t in attribute(events, D)}


def test_cpu_events_belong_to_the_range_that_contains_their_start():
    events = [
        step(3, 100, 200),
        step(4, 200, 300),
        Event("toy::head", 50, 60, False),  # before any step
        Event("toy::head", 100, 120, False),
        Event("aten::mm", 150, 250, False),
        Event("toy::update", 200, 210, False),
        Event("toy::head", 300, 310, False),  # after the last step
    ]
    assert by_step(events) == {(3, "cpu"): ({"toy::head": 1}, 1), (4, "cpu"): ({"toy::update": 1}, 0)}
    assert {t.run for t in attribute(events, D)} == {"a/b"}


def test_kernels_belong_to_the_step_that_launched_them_however_late_they_run():
    events = [
        step(0, 0, 100),
        step(1, 100, 200),
        Event("cudaLaunchKernel", 10, 12, False, correlation=7),
        Event("cudaGraphLaunch", 110, 112, False, correlation=8),
        Event("toy_update_m4", 150, 160, True, correlation=7),
        Event("ampere_gemm", 160, 170, True, correlation=7),
        Event("toy_update_m4", 900, 910, True, correlation=8),
        Event("toy_head", 910, 920, True, correlation=8),
        Event("toy_head", 120, 130, True, correlation=99),  # launched outside every step
        Event("fasttrack.step/a/b/0", 140, 170, True),  # the range as the GPU timeline shows it
    ]
    found = by_step(events)
    assert found[0, "cuda"] == ({"toy_": 1}, 1)
    assert found[1, "cuda"] == ({"toy_": 2}, 0)


def test_steps_without_events_are_still_steps():
    assert by_step([step(0, 0, 10)]) == {(0, "cpu"): ({}, 0)}


def test_real_profile_of_a_few_steps_counts_each_op_once():
    engine = TARGET.engine(EngineSpec("embedded", "optimized", "fast", tp=2))
    requests = [Request(str(i), (1 + i, 2, 3), 6, Sampling(ignore_eos=True)) for i in range(2)]
    profiler = StepProfiler()

    def after(index):
        if index == 1:
            profiler.start()
        elif index == 3:
            profiler.stop()

    engine.generate(requests, run="x/y", on_step=after)
    profiler.stop()
    traces = profiler.traces(D)
    assert [(t.run, t.index, dict(t.ops)) for t in traces] == [
        ("x/y", 2, {"toy::update": 1, "toy::head": 1}),
        ("x/y", 3, {"toy::update": 1, "toy::head": 1}),
    ]
    assert all(t.other_ops > 0 for t in traces)
