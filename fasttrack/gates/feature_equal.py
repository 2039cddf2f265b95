"""Rules for features whose answers must be stock's own: tokens, text, log-probabilities, reused prefixes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from fasttrack.gates.base import Scope, some
from fasttrack.gates.feature_units import Findings, Tally, UnitRecords
from fasttrack.records import GenerationRecord

SWITCHES = 3  #: changes of path that a resumed run must show, each way
SUM_LIMIT = 1e-5  #: how far FP32 probabilities of a vocabulary may be from one


def same_as_stock(scope: Scope, own: UnitRecords, name: str) -> Findings:
    """The arms' greedy completions of run ``name`` are equal; a token may differ only at a tie within the margin."""
    stock, fast = (
        {k: r for k, r in own.generations(arm, name).items() if "temperature" not in r.sampling}
        for arm in ("stock", "optimized")
    )
    if not stock or stock.keys() != fast.keys():
        return Findings(vacuous=(f"run {name}: {len(stock)} completions of stock, {len(fast)} of the optimised arm",))
    margin = scope.manifest.margins.logprobs
    wrong, compared, total, apart = list[str](), 0, 0, 0.0
    for request, a in stock.items():
        b = fast[request]
        total += len(a.token_ids)
        equal, complaint = _common(a, b, margin)
        compared += equal
        if complaint:
            wrong.append(f"{name}/{request}: {complaint}")
        pairs = zip((a.logprobs or [])[:equal], (b.logprobs or [])[:equal], strict=True)
        apart = max([apart, *(abs(x - y) for x, y in pairs)])
    if apart > margin:
        wrong.append(f"{name}: log-probabilities {apart:.3g} nats from stock's")
    vacuous = (f"run {name}: ties left {compared} of {total} tokens to compare",) if 2 * compared < total else ()
    tallies = (
        Tally("tokens of stock", total, "tokens", "> 0"),
        Tally("tokens equal to stock's", compared, "tokens", "all"),
        Tally("largest difference of log-probabilities", apart, "nats", f"<= {margin:g}", "max"),
    )
    return Findings(tuple(wrong), vacuous if not wrong else (), tallies)


def _common(a: GenerationRecord, b: GenerationRecord, margin: float) -> tuple[int, str]:
    """How many leading tokens are equal, and what is wrong behind them (nothing at a tie)."""
    if a.prompt_sha256 != b.prompt_sha256:
        return 0, "the arms got different prompts"
    for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if x != y:
            tops = a.top_logprobs[i] if a.top_logprobs else {}
            tie = x in tops and y in tops and abs(tops[x] - tops[y]) <= margin
            return i, "" if tie else f"token {i} is {y}, stock's {x}"
    ends: tuple[tuple[str, object, object], ...] = (
        ("tokens", len(a.token_ids), len(b.token_ids)),
        ("finish reason", a.finish_reason, b.finish_reason),
        ("text", a.text, b.text),
    )
    for what, stocks, ours in ends:
        if stocks != ours:
            return min(len(a.token_ids), len(b.token_ids)), f"{what} {ours!r}, stock's {stocks!r}"
    return len(a.token_ids), ""


def penalties(scope: Scope, own: UnitRecords) -> Findings:
    """Tokens under penalties are stock's, and each setting changes what is generated without it."""
    control, asked = own.generations("stock", "control"), own.generations("stock", "asked")
    settings: dict[str, bool] = {}
    for request, record in asked.items():
        changed = request in control and record.token_ids != control[request].token_ids
        setting = str(record.details.get("setting"))
        settings[setting] = settings.get(setting, False) or changed
    idle = [s for s, changed in settings.items() if not changed]
    found = Findings(
        vacuous=(f"penalties without effect: {some(idle)}",) if idle or not settings else (),
        tallies=(Tally("settings with an effect", sum(settings.values()), f"of {len(settings)}", "all", "min"),),
    )
    return same_as_stock(scope, own, "asked") + found


def logprobs(scope: Scope, own: UnitRecords) -> Findings:
    """Chosen and alternative log-probabilities agree with stock's, are consistent in themselves, and sum to one."""
    found = same_as_stock(scope, own, "asked") + same_as_stock(scope, own, "forced")
    margin = scope.manifest.margins.logprobs
    wrong, positions, beyond = list[str](), 0, 0
    for name in ("asked", "forced"):
        stock = own.generations("stock", name)
        for request, record in own.generations("optimized", name).items():
            reference = stock.get(request)
            asked = int(record.sampling.get("logprobs", 0))
            other = reference.top_logprobs if reference else None
            for i, (top, chosen) in enumerate(zip(record.top_logprobs or [], record.logprobs or [], strict=False)):
                positions += 1
                beyond += len(top) > asked
                complaint = _inconsistent(top, record.token_ids[i], chosen, asked)
                if not complaint and other and reference and reference.token_ids[: i + 1] == record.token_ids[: i + 1]:
                    complaint = _other_alternatives(top, other[i], margin)
                if complaint:
                    wrong.append(f"{name}/{request} token {i}: {complaint}")
    error = own.feature.numbers.get("sum_error") if own.feature else None
    if error is not None and error > SUM_LIMIT:
        wrong.append(f"probabilities sum to 1 +- {error:.3g}")
    vacuous = () if beyond else ("no chosen token lay outside the alternatives",)
    if not positions or error is None:
        vacuous = (*vacuous, "alternatives or full log-probabilities are missing")
    tallies = (
        Tally("positions with alternatives", positions, "positions", "> 0"),
        Tally("chosen tokens outside the alternatives", beyond, "positions", "> 0"),
        Tally("largest |sum of probabilities - 1|", error or 0.0, "", f"<= {SUM_LIMIT:g}", "max"),
    )
    return found + Findings(tuple(wrong), vacuous, tallies)


def _inconsistent(top: Mapping[int, float], token: int, chosen: float, asked: int) -> str:
    values = list(top.values())
    if top.get(token) != chosen:
        return f"chosen {token} has {chosen} alone and {top.get(token)} among the alternatives"
    best = values[:asked]
    if len(values) not in (asked, asked + 1) or best != sorted(best, reverse=True):
        return f"{len(values)} alternatives, {asked} asked, most likely first"
    if len(values) == asked + 1 and chosen > min(best):
        return "an alternative less likely than the chosen token"
    return ""


def _other_alternatives(ours: Mapping[int, float], stock: Mapping[int, float], margin: float) -> str:
    for token in {*ours, *stock}:
        if token in ours and token in stock:
            if abs(ours[token] - stock[token]) > margin:
                return f"alternative {token} has {ours[token]}, stock's {stock[token]}"
        else:  # at a tie for the last place either may be listed
            value, others = (ours[token], stock) if token in ours else (stock[token], ours)
            if value > min(others.values()) + margin:
                return f"alternative {token} is missing in one arm"
    return ""


def prefix_reuse(scope: Scope, own: UnitRecords) -> Findings:
    """A hit gives what a miss gave, bit for bit; hits are counted where they must be and nowhere else."""
    cold, hit = own.generations("optimized", "cold"), own.generations("optimized", "hit")
    wrong, reused = list[str](), 0
    if not cold or cold.keys() != hit.keys():
        return Findings(vacuous=(f"{len(cold)} misses and {len(hit)} hits were generated",))
    for request, miss in cold.items():
        again = hit[request]
        reused += again.cached_tokens
        if miss.cached_tokens:
            wrong.append(f"{request}: {miss.cached_tokens} cached tokens in an empty cache")
        if not again.cached_tokens:
            wrong.append(f"{request}: its prefix was not reused")
        elif again.cached_tokens >= again.prompt_tokens:
            wrong.append(f"{request}: {again.cached_tokens} cached of {again.prompt_tokens} prompt tokens")
        if (miss.token_ids, miss.logprobs) != (again.token_ids, again.logprobs):
            wrong.append(f"{request}: a hit answers otherwise than a miss")
    missing = () if all(r.logprobs for r in cold.values()) else ("completions carry no log-probabilities",)
    tallies = (
        Tally("requests with a reused prefix", sum(bool(r.cached_tokens) for r in hit.values()), "requests", "all"),
        Tally("prompt tokens not computed again", reused, "tokens", "> 0"),
    )
    return same_as_stock(scope, own, "cold") + Findings(tuple(wrong), missing, tallies)


def full_context(scope: Scope, own: UnitRecords) -> Findings:
    """The last position of the context is reached by specialised steps, with and without drafts, with stock's tokens.

    The last token of a full context is emitted and never read. Verify steps may leave out as many positions as the
    shortest draft has tokens: with less room than that their drafts have a length that the path never serves.
    """
    limit = own.max_context() or 0
    shortest = min((d for d in scope.description.limits.draft_lengths if d), default=0)
    slack = {"decode": 1, **({"verify": shortest} if own.unit.cell.draft_length else {})}
    wrong, tallies = list[str](), list[Tally]()
    for kind, most in slack.items():
        reached = max((s.context_max for s in own.pure if (s.path, s.kind) == ("specialized", kind)), default=0)
        if limit - reached > most:
            wrong.append(f"specialised {kind} steps reach position {reached} of {limit}")
        tallies.append(Tally(f"positions left out by {kind} steps", limit - reached, "tokens", f"<= {most}", "max"))
    return same_as_stock(scope, own, "asked") + Findings(tuple(wrong), (), tuple(tallies))


def stock_resumed(scope: Scope, own: UnitRecords) -> Findings:
    """Steps of both paths alternate on the same requests, and the tokens are stock's."""
    paths = [s.path for s in own.steps_of("optimized", "asked") if s.kind != "prefill"]
    changes = [(a, b) for a, b in pairwise(paths) if a != b]
    back = sum(b == "stock" for _, b in changes)
    forth = len(changes) - back
    vacuous = () if min(back, forth) >= SWITCHES else (f"the path changed {back} times to stock and {forth} back",)
    tallies = (
        Tally("changes to the stock path", back, "steps", f">= {SWITCHES}"),
        Tally("changes back to the specialised path", forth, "steps", f">= {SWITCHES}"),
    )
    return same_as_stock(scope, own, "asked") + Findings((), vacuous, tallies)
