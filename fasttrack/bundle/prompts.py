"""Whether the recorded prompts are those that the recorded seeds give: drawn again, without torch.

The root seed follows from head commit, manifest and nonce, and every prompt from the root: token prompts are draws of
Python's generator, generated questions a function of theirs. Records made before, or with other seeds, do not fit.
What leaves no digest of a prompt in its records, or is drawn by torch, is named and not tied.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fasttrack.bundle.files import printable
from fasttrack.errors import BundleError
from fasttrack.records import (
    EngineRecord,
    EvalItemRecord,
    EvalTaskRecord,
    FidelityRecord,
    FreeRunRecord,
    GenerationRecord,
    NumericsRecord,
    SampledRecord,
)
from fasttrack.records.seeds import named_seed

if TYPE_CHECKING:
    from fasttrack.gates import Scope
    from fasttrack.target import EngineInfo

MAX_DRAWS = 64_000_000  #: tokens drawn again; a real run has far fewer
MAX_NAMED = 5  #: wrong prompts named per unit; the rest are counted
#: Of a forced batch, the last prompts come from a second generator: those near the far end of the context bucket.
FORCED = ("evals/fidelity", "evals/fidelity-exact")
#: Families of units whose runs are one draw each, seeded by the unit's name, or by the run's.
OF_THE_UNIT, OF_THE_RUN = ("isolation/a_a", "performance"), ("evals/free_running", *FORCED)
TWO_PARTS = ("isolation", "evals", "features")  #: checks whose families have names of two parts
_NUMBERED = re.compile(r"r(0|[1-9][0-9]{0,5})")


@dataclass
class Ties:
    """What the seeds were held against."""

    tied: Counter[str] = field(default_factory=Counter)  #: kind of prompt -> how many were drawn again and fit
    loose: dict[str, str] = field(default_factory=dict)  #: kind -> why it cannot be held against the seeds
    problems: list[str] = field(default_factory=list)


def tie_prompts(scope: Scope, root: str, records: Iterable[Any]) -> Ties:
    """Draw every prompt again that can be. Raises :class:`BundleError` for more tokens than any run has."""
    found, budget = Ties(), _Budget()
    by_unit: dict[str, list[Any]] = {}
    for record in records:
        by_unit.setdefault(record.unit, []).append(record)
    for unit, own in by_unit.items():
        kind = "/".join(unit.split("/")[:2]) if unit.split("/")[0] in TWO_PARTS else unit.split("/")[0]
        wrong: list[str] = []
        if any(isinstance(r, EvalTaskRecord) for r in own):
            wrong += _questions(scope, root, unit, own, found)
        elif prompts := list(_prompts(own)):
            vocabulary = _vocabulary(own)
            if vocabulary is None:
                unknown = "prompts, but no vocabulary of the engine to hold them against the seeds"
                found.problems.append(f"records: unit {printable(unit)}: {unknown}")
                continue
            expected = _expected(root, unit, kind, prompts, vocabulary, budget)
            for one in prompts:
                if (one.run, one.request) not in expected:
                    wrong.append(f"request {one.request} of run {one.run}: its prompt follows from no seed")
                elif expected[one.run, one.request] != one.sha256:
                    wrong.append(f"request {one.request} of run {one.run}: prompt does not follow from the seeds")
            found.tied[kind] += len(prompts) - len(wrong)
        elif kind not in found.loose:
            found.loose[kind] = _why_not(own)
        shown = [f"records: unit {printable(unit)}: {printable(line)}" for line in wrong[:MAX_NAMED]]
        rest = len(wrong) - len(shown)
        found.problems += [*shown, *([f"records: unit {printable(unit)}: {rest} more such prompts"] if rest else [])]
    return found


@dataclass(frozen=True)
class _Prompt:
    run: str
    request: str
    tokens: int
    sha256: str
    like: str = ""  #: the request whose prompt it repeats


class _Budget:
    def __init__(self) -> None:
        self.left = MAX_DRAWS

    def take(self, tokens: int) -> int:
        self.left -= tokens
        if tokens < 0 or self.left < 0:
            raise BundleError(f"records: prompts of more than {MAX_DRAWS} tokens in all, or of fewer than none")
        return tokens


def _prompts(records: Sequence[Any]) -> Iterator[_Prompt]:
    for r in records:
        if isinstance(r, GenerationRecord):
            like = r.details.get("free", "")
            yield _Prompt(r.run, r.request, r.prompt_tokens, r.prompt_sha256, like if isinstance(like, str) else "")
        elif isinstance(r, FreeRunRecord) and r.prompt_sha256:
            yield _Prompt(f"{r.unit}/{r.batch}", r.request, r.prompt_tokens, r.prompt_sha256)
        elif isinstance(r, FidelityRecord) and r.prompt_sha256:
            first, sequence = r.batch.rpartition("/")[2], r.sequence
            place = int(sequence) - int(first) if first.isdecimal() and sequence.isdecimal() else -1
            yield _Prompt(r.batch, f"r{place}", r.prompt_tokens, r.prompt_sha256)


def _vocabulary(records: Sequence[Any]) -> EngineInfo | None:
    """As much of the engine as prompts depend on."""
    from fasttrack.target import EngineInfo

    for r in records:
        if isinstance(r, EngineRecord) and r.vocab_size and r.eos_token_ids is not None:
            if r.vocab_size < 2 * len(set(r.eos_token_ids)):
                return None  # hardly a token is left to be drawn
            ends = tuple(r.eos_token_ids)
            return EngineInfo("", (), "", r.vocab_size, 0, ends, {}, "emulated")
    return None


def _draw(seed: int, lengths: Mapping[int, int], info: EngineInfo, budget: _Budget) -> dict[int, tuple[int, ...]]:
    """Prompts 0, 1, ... of one generator; those behind a missing one cannot be drawn."""
    from fasttrack.checks.schedule import token_prompt

    rng = random.Random(seed)
    found: dict[int, tuple[int, ...]] = {}
    while len(found) in lengths:
        found[len(found)] = token_prompt(rng, budget.take(lengths[len(found)]), info)
    return found


def _expected(
    root: str, unit: str, kind: str, prompts: Sequence[_Prompt], info: EngineInfo, budget: _Budget
) -> dict[tuple[str, str], str]:
    """(run, request) -> digest of the prompt that the seeds give."""
    from fasttrack.checks.base import sha256_tokens

    if kind in (*OF_THE_UNIT, *OF_THE_RUN):
        found: dict[tuple[str, str], str] = {}
        for run in dict.fromkeys(p.run for p in prompts):
            seed = named_seed(root, run if kind in OF_THE_RUN else unit)
            own = [p for p in prompts if p.run == run]
            drawn = _draw(seed, _lengths(own), info, budget)
            found |= {(run, f"r{i}"): sha256_tokens(prompt) for i, prompt in drawn.items()}
            if kind in FORCED:
                found |= _far(seed + 1, run, own, found, info, budget)
        return found
    drawn = _draw(named_seed(root, f"{unit}/prompts"), _lengths(prompts), info, budget)
    texts = {f"r{i}": prompt for i, prompt in drawn.items()}
    if "undrafted" in {p.request for p in prompts} and "r0" in texts:
        texts["undrafted"] = texts["r0"]
    texts |= {p.request: texts[p.like] for p in prompts if p.like in texts}
    texts |= _warming(root, unit, prompts, texts, info, budget)
    return {(p.run, p.request): sha256_tokens(texts[p.request]) for p in prompts if p.request in texts}


def _far(
    seed: int,
    run: str,
    prompts: Sequence[_Prompt],
    near: Mapping[tuple[str, str], str],
    info: EngineInfo,
    budget: _Budget,
) -> dict[tuple[str, str], str]:
    """Digests from the first prompt on that the first generator does not give."""
    from fasttrack.checks.base import sha256_tokens

    lengths = _lengths(prompts)
    told = {p.request: p.sha256 for p in prompts}
    place = next((i for i in sorted(lengths) if near.get((run, f"r{i}")) != told[f"r{i}"]), len(lengths))
    drawn = _draw(seed, {i - place: tokens for i, tokens in lengths.items() if i >= place}, info, budget)
    return {(run, f"r{place + i}"): sha256_tokens(prompt) for i, prompt in drawn.items()}


def _lengths(prompts: Iterable[_Prompt]) -> dict[int, int]:
    numbered = [(match[1], p.tokens) for p in prompts if (match := _NUMBERED.fullmatch(p.request))]
    return {int(number): tokens for number, tokens in numbered}


def _warming(
    root: str,
    unit: str,
    prompts: Sequence[_Prompt],
    texts: Mapping[str, tuple[int, ...]],
    info: EngineInfo,
    budget: _Budget,
) -> dict[str, tuple[int, ...]]:
    """Requests w0, w1, ... that fill a cache: prompt i itself, or its beginning with an end of its own."""
    from fasttrack.checks.features import ENDING

    asked = {p.request: p.tokens for p in prompts if p.request.startswith("w") and f"r{p.request[1:]}" in texts}
    ends = _draw(named_seed(root, f"{unit}/ends"), dict.fromkeys(range(len(asked)), ENDING), info, budget)
    found = {}
    for name, tokens in asked.items():
        whole, number = texts[f"r{name[1:]}"], int(name[1:])
        found[name] = whole if number % 2 else whole[: tokens - ENDING] + ends.get(number, ())
    return found


def _questions(scope: Scope, root: str, unit: str, own: Sequence[Any], found: Ties) -> list[str]:
    """Generated questions are made again; those of a file or the hub are not here to be chosen again."""
    from fasttrack.checks.task_scores import longest_question
    from fasttrack.tasks.data import rows_digest, rows_for

    wrong: list[str] = []
    contexts = [r.config.get("max_context") for r in own if isinstance(r, EngineRecord)]
    for told in [r for r in own if isinstance(r, EvalTaskRecord)]:
        task = next((t for t in scope.manifest.tasks if t.name == told.task), None)
        if task is None:
            wrong.append(f"task {told.task} is not in the manifest")
            continue
        if told.source != "generated":
            found.loose[f"questions of {task.name}"] = f"they come from {told.source}, which a bundle does not hold"
            continue
        if not contexts or not isinstance(contexts[0], int):
            wrong.append(f"task {task.name}: no context of the engine to make its questions again")
            continue
        made = task.model_copy(update={"generated": True, "data": None, "revision": None})
        limit = longest_question(scope, task, told.cell, contexts[0])
        items = scope.manifest.task_run(task, scope.tier).items
        rows = rows_for(made, items=items, seed=named_seed(root, f"evals/task/{task.name}"), max_chars=limit)
        asked = {r.item for r in own if isinstance(r, EvalItemRecord) and r.task == task.name}
        strange = asked - {str(row["id"]) for row in rows}
        if rows_digest(rows) != told.rows_sha256:
            wrong.append(f"task {task.name}: its questions do not follow from the seeds")
        elif strange:
            wrong.append(f"task {task.name}: item {min(strange)} is not among the questions of these seeds")
        else:
            found.tied["generated questions"] += len(rows)
    return wrong


def _why_not(own: Sequence[Any]) -> str:
    if any(isinstance(r, NumericsRecord) for r in own):
        return "inputs are drawn by torch"
    if any(isinstance(r, FidelityRecord | FreeRunRecord | SampledRecord) for r in own):
        return "records hold what came of the prompts, not the prompts' digests"
    return "records hold steps, not prompts"
