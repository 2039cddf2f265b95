"""Stop strings and stop tokens, taken from what stock writes without them, so that where they must end is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fasttrack.checks.feature_run import FeatureRun
from fasttrack.gates.feature_text import STOP_KINDS
from fasttrack.target import Completion, Engine, Request

TOKENS = 32
EARLIEST = 3  #: tokens before a stop, so that decode steps come first
_NEVER = "\u2603 this is never written \u2603"


@dataclass(frozen=True)
class Stop:
    """One stop and where it must end an output: after ``tokens`` tokens."""

    kind: str
    pattern: str
    token: int | None
    tokens: int


def stop(run: FeatureRun) -> None:
    """Free outputs of stock; then each kind of stop that they offer, in both arms."""
    plain = run.requests(TOKENS, count=max(8, run.cell.requests))
    free = run.generate("stock", plain, "free")
    engine, _ = run.engine("stock")
    chosen: dict[str, list[tuple[Request, Stop]]] = {kind: [] for kind in STOP_KINDS}
    for request, done in zip(plain, free, strict=True):
        for found in candidates(engine, done):
            if len(chosen[found.kind]) < 2 and all(request is not r for r, _ in chosen[found.kind]):
                chosen[found.kind].append((request, found))
    picked = [pair for pairs in chosen.values() for pair in pairs][: max(len(STOP_KINDS), run.cell.requests)]
    asked, details = [], {}
    for i, (request, found) in enumerate(picked):
        sampling = replace(
            request.sampling,
            stop=(found.pattern,) if found.token is None else (),
            stop_token_ids=() if found.token is None else (found.token,),
        )
        asked.append(replace(request, id=f"s{i}", sampling=sampling))
        details[f"s{i}"] = {"kind": found.kind, "free": request.id, "expected_tokens": found.tokens}
    if asked:
        run.both(asked, "asked", details=details)


def candidates(engine: Engine, done: Completion) -> Iterator[Stop]:
    """At most one stop of each kind that occurs late enough in ``done``, by the engine's own decoding."""
    tokens = done.token_ids
    texts = [engine.decode(tokens[:n]) for n in range(len(tokens) + 1)]
    yield Stop("never", _NEVER, None, len(tokens))
    for n in range(EARLIEST, len(tokens)):
        if tokens.index(tokens[n]) == n:
            yield Stop("token", "", tokens[n], n + 1)
            break
    if done.text != texts[-1]:
        return  # the completion's text is not the tokens' (special tokens left out, say): positions are not known
    for kind in ("across", "inside"):
        for n in range(EARLIEST, len(tokens)):
            pattern = _piece(texts, n, kind)
            if pattern and _ends(texts, pattern) == n + 1:
                yield Stop(kind, pattern, None, n + 1)
                break


def _piece(texts: Sequence[str], n: int, kind: str) -> str:
    """Of token ``n``'s text a part, or the seam with the token before it; empty where it is not plain text."""
    if not (texts[n].startswith(texts[n - 1]) and texts[n + 1].startswith(texts[n])):
        return ""
    before, own = texts[n][len(texts[n - 1]) :], texts[n + 1][len(texts[n]) :]
    # Inside: a token goes on behind the stop, and nothing of it may be left in the text.
    part = before[-1:] + own[:1] if kind == "across" else own[:-1]
    wanted = 2 if kind == "across" else 1
    return part if len(part) >= wanted and part.isprintable() and "\ufffd" not in own + before else ""


def _ends(texts: Sequence[str], pattern: str) -> int:
    """Tokens after which ``pattern`` has occurred, 0 where it never does."""
    return next((n for n, text in enumerate(texts) if pattern in text), 0)
