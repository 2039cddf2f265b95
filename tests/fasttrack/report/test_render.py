"""The report: first line, tables, and nothing a record says can break out of its cell."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from toy_run import (
    EMULATED,
    HEAD,
    MANIFEST,
    default_records,
    engine,
    event,
    numerics,
    performance,
    step,
    write_run,
)
from toy_run import (
    cell as cell_of,
)

from fasttrack.bundle.binding import Binding
from fasttrack.bundle.content import load_records, load_run, reader, run_files
from fasttrack.bundle.verdicts import evaluate_all, scope_of
from fasttrack.records import Evidence, FidelityRecord, PublishedRecord, RefusalRecord
from fasttrack.report import render, render_figures
from fasttrack.report.drill import records_of_gate, rows
from fasttrack.report.text import cell, code, number


def loaded(folder: Path) -> tuple[Any, Any, list[Any], list[Any]]:
    read = reader(folder)
    run = load_run(read)
    scope = scope_of(run)
    records = load_records(run_files(folder), read, run.journal).records
    return scope, run, records, evaluate_all(scope, records)[0]


def report(
    folder: Path, records: dict[str, list[Any]] | None = None, binding: Binding | None = None, **more: Any
) -> str:
    return render(*loaded(write_run(folder / "run", records, **more)), binding)


def table(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without header and rule."""
    lines = text.split(heading, 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    found = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        found.append([part.strip() for part in line.replace("\\|", "\0").strip("|").split("|")])
    return found


def test_first_line_says_verdict_evidence_and_that_scores_say_nothing(tmp_path: Path):
    first = report(tmp_path, binding=Binding(7, None, HEAD, HEAD)).splitlines()[0]
    assert first.startswith("**PASS** (smoke tier, emulated evidence, bound): 4 of 4 required gates passed.")
    assert "no trained checkpoint exists" in first
    trained = MANIFEST.replace("trained_checkpoint: false", "trained_checkpoint: true")
    assert "trained" not in report(tmp_path / "t", manifest=trained).splitlines()[0]


def test_a_bound_head_whose_code_did_not_run_is_said(tmp_path: Path):
    from dataclasses import replace

    scope, run, records, results = loaded(write_run(tmp_path / "run"))
    for source, said in (
        ({"commit": HEAD, "dirty": False}, False),
        ({"commit": HEAD, "dirty": True}, True),
        ({"commit": "b" * 40, "dirty": False}, True),
    ):
        environment = {**run.environment, "source": source}
        text = render(scope, replace(run, environment=environment), records, results, Binding(7, None, HEAD, HEAD))
        assert ("not a clean checkout of the head commit" in text) is said


def test_first_line_says_how_much_of_the_claim_the_tier_ran(tmp_path: Path):
    assert "passed. 2 of 3 claimed cells run in this tier. Optional" in report(tmp_path).splitlines()[0]
    wide = MANIFEST.replace("cells: {requests: [1, 2], named: false}", "cells: {requests: [1, 2, 4], named: false}")
    assert " 3 of 3 claimed cells run in this tier." in report(tmp_path / "w", manifest=wide).splitlines()[0]


def test_the_nonce_is_not_said_to_show_more_than_is_checked(tmp_path: Path):
    text = report(tmp_path)
    assert "younger than the nonce" not in text
    assert "That a machine computed the answers, only a re-run shows." in text


def test_first_line_names_the_gates_that_failed_or_lack_evidence(tmp_path: Path):
    records = default_records()
    records["numerics/normal"][0] = numerics("toy::update", "normal", worst=40.0, failing=9)
    del records["isolation/probe/above"]
    first = report(tmp_path, records).splitlines()[0]
    assert first.startswith("**FAIL** (smoke tier, emulated evidence): 2 of 4 required gates passed;")
    assert "numerics.error fail, isolation.probes inconclusive." in first
    del records["numerics/normal"]
    assert report(tmp_path / "b", records).startswith("**NOT ENOUGH EVIDENCE**")


def test_the_numbers_that_decided_stand_in_a_table(tmp_path: Path):
    numbers = table(report(tmp_path), "### The numbers that decided")
    assert ["`numerics.error`", "failing elements", "0 of 640", "0"] in numbers


def test_coverage_grid_counts_the_optimised_arm_and_leaves_probes_out(tmp_path: Path):
    records = default_records()
    own = records["isolation/cell/decode/tp2/r2/dl0/dcp1/short"]
    own.append(step("isolation/cell/decode/tp2/r2/dl0/dcp1/short", 2, 7, "stock", reason="switched_off"))
    own.append(step("isolation/cell/decode/tp2/r2/dl0/dcp1/short", 2, 8, "stock", arm="stock"))
    own.append(step("isolation/cell/decode/tp2/r2/dl0/dcp1/short", 2, 9, rows=3))  # not at the claimed rows
    records["isolation/probe/above"].append(step("isolation/probe/above", 1, 5, "stock"))
    text = report(tmp_path, records)
    assert table(text, "## Coverage") == [["decode, TP 2, short", "3/3", "3/4", "-"]]
    assert "6 of 7 steps of claimed cells, over all checks, ran specialised." in text
    assert "Fallback reasons inside the scope: switched_off 1." in text


def fidelity(requests: int, arm: str, **changes: Any) -> FidelityRecord:
    fields = {"kl_max": 0.0, "abs_error_sum": 0.0, "abs_error_max": 0.0, "near_ties": 0, "nonfinite": 0}
    return FidelityRecord(
        unit="evals/fidelity/x",
        arm=arm,
        cell=cell_of(requests),
        evidence=EMULATED,
        **{**fields, "sequence": "0", "positions": 10, "kl_sum": 0.5, "top1_flips": 1, "context": 40, **changes},
    )


def test_fidelity_says_which_cells_contexts_and_providers_it_covers(tmp_path: Path):
    scope, run, records, results = loaded(write_run(tmp_path / "run"))
    records += [
        fidelity(1, "stock"),
        fidelity(1, "optimized", kl_sum=0.25, top1_flips=0),
        fidelity(4, "optimized", context=9, sequence="1"),  # claimed, but not in this tier
        fidelity(1, "optimized", exact=True, context=None),
        step("evals/fidelity/x", 1, 0, providers={"toy::head": "cute", "toy::update": "torch"}),
        step("evals/fidelity/x", 1, 1, "stock", providers={"toy::head": "nobody"}),
        step("elsewhere", 1, 1, providers={"toy::head": "torch", "toy::update": "torch"}),
    ]
    text = render(scope, run, records, results)
    assert table(text, "## Fidelity") == [
        [
            "decode, TP 2, short",
            "as claimed",
            "1 of 2 (1)",
            "2",
            "20",
            "9 to 40",
            "0.0375 / 0.05",
            "1 / 1",
            "cute, torch",
        ],
        ["decode, TP 2, short", "exact", "1 of 2 (1)", "1", "10", "not recorded", "0.05 / -", "1 / 0", "cute, torch"],
    ]
    assert table(text, "## Who served") == [
        ["1: toy::head", "cute in 1 step, torch in 1 step"],
        ["1: toy::update", "torch in 2 steps"],
    ]


def test_what_a_newcomer_trips_over_is_explained_where_it_occurs(tmp_path: Path):
    text = report(tmp_path)
    numbers = text.index("### The numbers that decided")
    assert text.index("1 is an element exactly at its bound, and no sign of trouble") > numbers
    assert "Slower than stock is to be expected" in text
    assert "*Emulated* evidence comes from a CPU" in text
    assert "error ratio" not in text, "explained although no such gate was selected"
    assert "No sequence was teacher-forced." in text
    scope, run, records, results = loaded(tmp_path / "run")
    real = [r.model_copy(update={"evidence": Evidence(kind="measured", device="GPU")}) for r in records]
    told = render(scope, run, real, results)
    assert "*Emulated* evidence" not in told
    assert "Slower than stock" not in told


def test_a_planned_cell_without_steps_is_not_blank(tmp_path: Path):
    records = default_records()
    del records["isolation/cell/decode/tp2/r2/dl0/dcp1/short"]
    assert table(report(tmp_path, records), "## Coverage") == [["decode, TP 2, short", "3/3", "0/0", "-"]]


def test_probes_stock_and_refused(tmp_path: Path):
    manifest = MANIFEST.replace(
        "gates:\n", "  - {name: tp3, step: decode, tp: 3, requests: 1, expect: refused}\n"
        "  - {name: unseen, step: prefill, tp: 2, requests: 2}\ngates:\n"
    )  # fmt: skip
    records = default_records()
    refusal = {"deployment": {"tp": 3}, "refused": True, "reasons": ["tp 3: one of (1, 2, 4)"]}
    records["isolation/probe/tp3"] = [RefusalRecord(unit="isolation/probe/tp3", evidence=EMULATED, **refusal)]
    found = table(report(tmp_path, records, manifest=manifest), "## Probes")
    assert found[0][2:] == ["stock (too_many_rows)", "0/1", "too_many_rows 1"]
    assert found[1][2:] == ["refused", "0/0", "refused at start: tp 3: one of (1, 2, 4)"]
    assert found[2][2:] == ["stock", "0/0", "nothing recorded"]


def test_attempts_that_did_not_finish(tmp_path: Path):
    def history(events):
        return [event("started", "numerics/normal"), *({**e, "attempt": 2} if e["unit"] == "numerics/normal" else e
                for e in events)]  # fmt: skip

    records = default_records()
    records["numerics/normal"] = [r.model_copy(update={"attempt": 2}) for r in records["numerics/normal"]]
    found = table(report(tmp_path, records, edit_journal=history), "## Attempts that did not finish")
    assert [row[:3] for row in found] == [["numerics/normal", "1", "killed"]]
    assert "None: every planned unit finished" in report(tmp_path / "b")


def test_arms_are_compared_option_by_option(tmp_path: Path):
    records = default_records()
    slow = engine(2, "stock", "auto")
    records["isolation/cell/decode/tp2/r2/dl0/dcp1/short"][0] = slow.model_copy(
        update={"config": {**slow.config, "threads": 8}}
    )
    found = table(report(tmp_path, records), "## How the arms differ")
    assert ["threads", "8", "none", "optimized", "1"] in found
    assert ["switch toy_backend", "auto", "fast", "optimized", "2"] in found


def test_performance_is_listed_with_its_stamp_and_never_as_a_ratio(tmp_path: Path):
    text = report(tmp_path)
    column = "decode_throughput per aggregate, tokens/s, prefill out"
    assert f"| cell | arm | stamp | acceptance | {column} |" in text
    found = table(text, "## Performance records")
    assert [row[1:] for row in found] == [
        ["stock", "emulated", "none", "90"],
        ["optimized", "emulated", "none", "110.5"],
    ]
    records = default_records()
    again = performance("stock", 92.0)
    other = again.model_copy(update={"prefill_included": True, "value": 5.0})
    records["performance/decode/tp2/r1/dl0/dcp1/short"] += [again, other]
    found = table(report(tmp_path / "b", records), "## Performance records")
    assert [row[4:] for row in found] == [["91 (n=2)", "5"], ["110.5", ""]]
    records["performance/decode/tp2/r1/dl0/dcp1/short"] = [performance(f"sabotaged:{i}", 1.0) for i in range(70)]
    assert "10 more rows: `fasttrack show" in report(tmp_path / "c", records)


def test_published_figures_keep_their_digits_and_sources_stay_apart(tmp_path: Path):
    records = default_records()
    quoted = Evidence(kind="published", source="pull request table")
    figure = {"name": "published-b1", "metric": "decode_throughput", "value": 1274.8125, "unit_of_measure": "tokens/s"}
    records["performance/decode/tp2/r1/dl0/dcp1/short"].append(
        PublishedRecord(unit="performance/decode/tp2/r1/dl0/dcp1/short", evidence=quoted, setup="TP16, DL 7", **figure)
    )
    more = "{metric: speedup, unit: x, value: 1.73, baseline: 1, source: an article}"
    manifest = MANIFEST.replace('source: "an article"}]', f'source: "an article"}}, {more}]')
    text = report(tmp_path, records, manifest=manifest)
    assert table(text, "## Published figures, quoted and not measured here") == [
        ["published-b1", "decode_throughput 193.3 tokens/s; speedup 1.73 x (stock 1)", "an article"],
        ["published-b1", "decode_throughput 1274.8125 tokens/s", "pull request table"],
    ]
    stamps = table(text, "## What the numbers may be used for")
    assert ["published", "pull request table", "1", "1 published"] in stamps
    assert "emulated evidence)" in text.splitlines()[0]  # a quotation is no evidence of this run


def test_shard_evidence_names_its_rank(tmp_path: Path):
    records = default_records()
    shard = Evidence(kind="shard", device="H200", rank=3, ranks=16)
    records["numerics/normal"] = [r.model_copy(update={"evidence": shard}) for r in records["numerics/normal"]]
    assert ["shard(3/16)", "H200", "10", "10 numerics"] in table(report(tmp_path, records), "## What the numbers may")


HOSTILE = "x|y `z` [click](http://a) <script> \x1b[31m\n# Heading ‮ *b*"


@pytest.mark.parametrize("place", ["reason", "op", "config"])
def test_text_of_records_cannot_leave_its_cell(tmp_path: Path, place: str):
    records = default_records()
    if place == "reason":
        records["isolation/cell/decode/tp2/r1/dl0/dcp1/short"].append(
            step("isolation/cell/decode/tp2/r1/dl0/dcp1/short", 1, 9, "stock", reason=HOSTILE)
        )
    elif place == "op":
        records["numerics/normal"].append(numerics(HOSTILE, "normal", worst=9.0, failing=1))
    else:
        one = records["isolation/cell/decode/tp2/r1/dl0/dcp1/short"][0]
        records["isolation/cell/decode/tp2/r1/dl0/dcp1/short"][0] = one.model_copy(
            update={"config": {HOSTILE: HOSTILE}}
        )
    text = report(tmp_path, records)
    assert "x\\|y" in text
    assert not any(line.startswith("# Heading") for line in text.splitlines())
    assert "\x1b" not in text
    assert "‮" not in text
    for raw in ("<script>", "[click]("):
        assert f"\\{raw}" in text or raw.replace("]", "\\]") in text
        assert text.count(raw) == text.count(f"\\{raw}")


def test_the_figure_is_well_formed_whatever_the_names(tmp_path: Path):
    name = '"a<b>&\\"c"'
    claimed = MANIFEST.replace("requests: [1, 2, 4]}", f"requests: [1, 2, 4], context: [{name}]}}")
    manifest = claimed.replace(
        "probes:", f"contexts: {{{name}: {{min: 1, max: 9}}, short: {{min: 1, max: 9}}}}\nprobes:"
    )
    scope, _, records, _ = loaded(write_run(tmp_path / "run", manifest=manifest))
    root = ElementTree.fromstring(render_figures(scope, records)["coverage.svg"])
    texts = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert 'decode, TP 2, a<b>&"c' in texts
    assert "3/3" in texts


def test_same_arguments_same_bytes_and_none_left_undefined(tmp_path: Path):
    arguments = loaded(write_run(tmp_path / "run"))
    text = render(*arguments)
    assert text == render(*arguments)
    assert "not sealed" in text
    assert not any(word in text for word in ("| None |", "`None`", "None,", "Undefined", "{{", "\r"))
    assert text.endswith("\n")


@pytest.mark.parametrize("environment", [{}, {"machine": 7, "packages": [], "source": None, "variables": "x"}])
def test_an_environment_that_lacks_parts_is_still_printed(tmp_path: Path, environment: dict):
    from dataclasses import replace

    scope, run, records, results = loaded(write_run(tmp_path / "run"))
    text = render(scope, replace(run, environment=environment), records, results)
    assert ["accelerators", "none"] in table(text, "## Environment")


def test_numbers():
    values = (0, 3, 1.0, 0.1 + 0.2, 123456.0, 1e-9, float("inf"), float("-inf"), float("nan"))
    assert [number(v) for v in values] == ["0", "3", "1", "0.3", "123456", "1e-09", "inf", "-inf", "nan"]
    assert cell(True) == "True"
    assert code("a`b|c") == "`a'b¦c`"


def test_drilling_down_puts_the_suspicious_first(tmp_path: Path):
    records = default_records()
    records["numerics/normal"].append(numerics("toy::head", "normal", worst=float("nan"), failing=0))
    records["numerics/normal"].append(numerics("toy::head", "coded", worst=2.0, failing=5))
    flat = [record for own in records.values() for record in own]
    found = records_of_gate("numerics.error", flat)
    assert [(r.failing, r.worst == r.worst) for r in found[:2]] == [(5, True), (0, False)]
    assert {r.type for r in records_of_gate("isolation.probes", flat)} == {"step"}
    header, lines = rows(found)["numerics"]
    assert header[:2] == ["unit", "op"]
    assert len(lines) == 12
