"""Rules for features that speak about an output's own form: stops, structure, order in time, distribution."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fasttrack.gates.base import Scope, group_by, select, some
from fasttrack.gates.feature_equal import same_as_stock
from fasttrack.gates.feature_units import (
    POWER,
    SETTINGS,
    Findings,
    Tally,
    UnitRecords,
    feature_units,
    sampling_level,
)
from fasttrack.records import GenerationRecord, SampledRecord, StepRecord

FINISHED = 0.75  #: share of structured outputs that must end by themselves before anything is concluded
STOP_KINDS = ("across", "inside", "token", "never")


def stop(scope: Scope, own: UnitRecords) -> Findings:
    """Outputs end where the stop first occurs in what stock writes without it, and its text stays out."""
    free = own.generations("stock", "free")
    wrong, seen = list[str](), dict.fromkeys(STOP_KINDS, 0)
    for request, record in own.generations("optimized", "asked").items():
        whole = free.get(str(record.details.get("free")))
        kind, expected = str(record.details.get("kind")), record.details.get("expected_tokens")
        if whole is None or kind not in seen:
            continue
        seen[kind] += 1
        text = whole.text or ""
        for pattern in record.sampling.get("stop", []):
            at = text.find(pattern)
            text = text if at < 0 else text[:at]
        ended = "length" if kind == "never" else "stop"
        if record.finish_reason != ended:
            wrong.append(f"{request} ({kind}) ended by {record.finish_reason}, not by {ended}")
        elif record.token_ids != whole.token_ids[:expected]:
            wrong.append(f"{request} ({kind}) has {len(record.token_ids)} tokens, {expected} up to the stop")
        elif kind != "token" and record.text != text:
            wrong.append(f"{request} ({kind}) has the text {record.text!r}, not {text!r}")
    missing = [kind for kind, count in seen.items() if not count]
    tallies = tuple(
        Tally(f"stops {kind}", n, "requests", ">= 1", "min")
        for kind, n in zip(("across tokens", "inside a token", "by token id", "never met"), seen.values(), strict=True)
    )
    vacuous = (f"no stop of the kind: {some(missing)}",) if missing else ()
    return same_as_stock(scope, own, "asked") + Findings(tuple(wrong), vacuous, tallies)


def structured_output(scope: Scope, own: UnitRecords) -> Findings:
    """Every finished output matches its schema or expression, greedy ones are stock's, free ones do not match."""
    wrong, finished, total, kinds = list[str](), 0, 0, set[str]()
    for request, record in own.generations("optimized", "asked").items():
        total += 1
        if record.finish_reason != "stop":
            continue
        finished += 1
        kinds |= record.sampling["structured"].keys()
        complaint = mismatch(record.text or "", record.sampling["structured"])
        if complaint:
            wrong.append(f"{request}: {complaint}")
    control = own.generations("stock", "control").values()
    by_chance = sum(not mismatch(r.text or "", s) for r in control for s in _constraints(own))
    vacuous = [f"{finished} of {total} outputs ended"] if finished < FINISHED * total or not total else []
    vacuous += [f"no output under {k}" for k in ("json_schema", "regex") if k not in kinds]
    vacuous += ["unconstrained output matches as well"] if by_chance or not control else []
    tallies = (
        Tally("outputs that match", finished - len(wrong), "outputs", "all finished"),
        Tally("outputs cut by their length", total - finished, "outputs", f"<= {1 - FINISHED:.0%}"),
    )
    return same_as_stock(scope, own, "asked") + Findings(tuple(wrong), tuple(vacuous), tallies)


def _constraints(own: UnitRecords) -> list[Mapping[str, Any]]:
    found = {json.dumps(r.sampling["structured"], sort_keys=True) for r in own.generations("stock", "asked").values()}
    return [json.loads(text) for text in sorted(found)]


def mismatch(text: str, structured: Mapping[str, Any]) -> str:
    """Why ``text`` does not satisfy ``{"regex": ...}`` or ``{"json_schema": ...}``, empty where it does."""
    if "regex" in structured:
        return "" if re.fullmatch(structured["regex"], text) else f"{text!r} does not match the expression"
    try:
        value = json.loads(text)
    except ValueError:
        return f"{text!r} is not JSON"
    return schema_mismatch(value, structured["json_schema"])


def schema_mismatch(value: Any, schema: Mapping[str, Any], at: str = "$") -> str:
    """The first violation, for the part of JSON Schema that the features check uses; other keywords are an error."""
    known = {"type", "enum", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"}
    unknown = schema.keys() - known - {"pattern"}
    if unknown:
        raise ValueError(f"{at}: keyword {sorted(unknown)[0]!r} is not judged here")
    kinds: dict[str, type] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    wanted = schema.get("type")
    if wanted and (not isinstance(value, kinds[wanted]) or (wanted == "integer" and isinstance(value, bool))):
        return f"{at} is {value!r}, not {wanted}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{at} is {value!r}, not one of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return f"{at} is {value!r}, not {schema['pattern']}"
    parts: list[tuple[Any, Mapping[str, Any], str]] = []
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        missing = [k for k in schema.get("required", []) if k not in value]
        extra = [k for k in value if k not in properties] if schema.get("additionalProperties") is False else []
        if missing or extra:
            return f"{at} lacks {some(missing)}" if missing else f"{at} has {some(extra)}"
        return next(
            (m for k, v in value.items() if k in properties and (m := schema_mismatch(v, properties[k], f"{at}.{k}"))),
            "",
        )
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return f"{at} has {len(value)} items"
        parts = [(v, schema.get("items", {}), f"{at}[{i}]") for i, v in enumerate(value)]
    return next((complaint for part in parts if (complaint := schema_mismatch(*part))), "")


def streaming(scope: Scope, own: UnitRecords) -> Findings:
    """Tokens come in the order of steps and positions, every step is reported once, and the ledger's counts fit."""
    done = list(own.generations("optimized", "asked").values())
    steps = own.steps_of("optimized", "asked")
    numbers = own.feature.numbers if own.feature else {}
    if not done or not steps or any(r.token_times is None for r in done):
        return Findings(vacuous=("completions carry no times",))
    wrong = [f"{r.request}: {_disorder(r)}" for r in done if _disorder(r)]
    wrong += [f"{int(numbers[k])} steps {what}" for k, what in _REPORTS.items() if numbers.get(k)]
    wrong += _blocks(own, steps, done)
    tallies = (
        Tally("tokens in order", sum(len(r.token_ids) for r in done), "tokens", "all"),
        Tally("steps reported as they ended", len(steps), "steps", "all"),
    )
    return same_as_stock(scope, own, "asked") + Findings(tuple(wrong), (), tallies)


_REPORTS = {"on_step_disorder": "reported out of order", "on_step_missing": "not reported when they ended"}


def _disorder(record: GenerationRecord) -> str:
    times = record.token_times or []
    if len(times) != len(record.token_ids):
        return f"{len(times)} times for {len(record.token_ids)} tokens"
    if record.arrival_time is not None and times and times[0] < record.arrival_time:
        return "a token before the request arrived"
    return "" if times == sorted(times) else "a token earlier than the one before it"


def _blocks(own: UnitRecords, steps: list[StepRecord], done: list[GenerationRecord]) -> list[str]:
    """Tokens of all requests in order of time, cut into the steps' counts: no request gets more than a step's rows."""
    stream = sorted((t, i) for i, r in enumerate(done) for t in r.token_times or [])
    if len(stream) != sum(s.emitted for s in steps):
        return [f"{len(stream)} tokens came, {sum(s.emitted for s in steps)} in the ledger"]
    wrong, first = [], 0
    for step in steps:
        block = [i for _, i in stream[first : first + step.emitted]]
        first += step.emitted
        most = max((block.count(i) for i in set(block)), default=0)
        if most > 1 + step.draft_length or len(set(block)) > step.requests:
            wrong.append(f"step {step.index}: {most} tokens of one request, {len(set(block))} requests, in its place")
    return wrong


def sampling(scope: Scope, own: UnitRecords) -> Findings:
    """Two-sample tests of the arms' tokens as quantiles of stock's distribution, one per setting, of stated power."""
    from fasttrack.stats.two_sample import compare

    found = group_by(select(own.records, SampledRecord), lambda r: (r.setting, r.arm))
    level = sampling_level(feature_units(scope.manifest, scope.tier))
    variation = scope.manifest.margins.sampling
    wrong, vacuous, tallies = list[str](), list[str](), list[Tally]()
    for setting in SETTINGS:
        arms = {arm: found.get((setting, arm), []) for arm in ("stock", "optimized")}
        outside = sum(r.outside for r in arms["optimized"])
        if outside:
            wrong.append(f"{setting}: {outside} tokens that stock never samples")
        if sum(r.outside for r in arms["stock"]):
            vacuous.append(f"{setting}: stock does not sample what the parameters say")
            continue
        stock, fast = ([q for r in arms[arm] for q in r.quantiles] for arm in ("stock", "optimized"))
        test = compare(stock, fast, variation=variation, level=level)
        if test.p_value < level:
            wrong.append(f"{setting}: another distribution than stock's (p {test.p_value:.2g})")
        elif test.power < POWER:
            vacuous.append(f"{setting}: {min(test.samples)} tokens per arm see the margin with power {test.power:.2f}")
        tallies += [
            Tally(f"{setting}: tokens per arm", min(test.samples), "tokens", "", "min"),
            Tally(
                f"{setting}: p-value",
                test.p_value,
                f"chi-square, smallest, level {level:.2g}",
                f">= {level:.2g}",
                "min",
            ),
            Tally(
                f"{setting}: power",
                test.power,
                f"to see a total variation of {variation:g}, observed {test.variation:.3f}",
                f">= {POWER:g}",
                "min",
            ),
        ]
    return Findings(tuple(wrong), tuple(vacuous), tuple(tallies))
