"""Faults of features, planted into the optimised arm of Kimi K3's embedded engine. Each takes the built engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kimi_k3.faults import patched, plant
from kimi_k3.reference import emit, rejection
from kimi_k3.reference.prefix import PrefixCache, Snapshot

Plant = Callable[[Any], None]


def while_generating(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Replace a function of the reference by ``make(it)``, in the optimised arm alone."""

    def put(built: Any) -> None:
        generate = built.generate

        def run(*args: Any, **options: Any) -> Any:
            with patched(owner, name, make(getattr(owner, name))):
                return generate(*args, **options)

        built.generate = run

    return put


def asked(**sampling: Any) -> Plant:
    """These sampling parameters are used whatever was asked."""

    def put(built: Any) -> None:
        generate = built.generate

        def run(requests: Any, **options: Any) -> Any:
            return generate([replace(r, sampling=replace(r.sampling, **sampling)) for r in requests], **options)

        built.generate = run

    return put


def answered(change: Callable[[Any], None]) -> Plant:
    """Completions are changed before they are given back."""

    def put(built: Any) -> None:
        generate = built.generate

        def run(*args: Any, **options: Any) -> Any:
            done = generate(*args, **options)
            for completion in done:
                change(completion)
            return done

        built.generate = run

    return put


def _late_logprobs(done: Any) -> None:
    """Log-probabilities belong to the token before."""
    if done.logprobs:
        done.logprobs[:] = done.logprobs[-1:] + done.logprobs[:-1]
        done.top_logprobs.insert(0, done.top_logprobs.pop())


def _without_chosen(done: Any) -> None:
    """The chosen token is listed among its alternatives only if it is one of the most likely."""
    for top in done.top_logprobs or []:
        if len(top) > 5:
            top.popitem()


def _reversed_times(done: Any) -> None:
    done.token_times.reverse()


def _stop_in_text(done: Any) -> None:
    done.text += "!" if done.finish_reason == "stop" else ""


def stops_inside_tokens_only(real: Any) -> Any:
    """A stop string that begins in one token and ends in another is not seen."""

    def stops(state: Any, *args: Any) -> bool:
        before = bytes(state.output_bytes)
        state.output_bytes.clear()
        hit = real(state, *args)
        state.output_bytes[:0] = before
        return bool(hit)

    return stops


def history_without_drafts(real: Any) -> Any:
    """Penalties of a verified row do not count the drafts before it."""
    return lambda state, drafts, vocab: real(state, [], vocab)


def uncorrected(real: Any) -> Any:
    """What follows a rejected draft is drawn from the target itself, not from what the proposal left of it."""
    return lambda p, q, weight=1.0: p


def lost_after_stock(built: Any) -> None:
    """The first specialised step behind a stock step begins with an empty convolution history."""
    engine = built.engine
    executor, forward, seen = engine.executor, engine.model.forward, [0]
    run = executor.run

    def stock(*args: Any, **options: Any) -> Any:
        seen[0] += 1
        return forward(*args, **options)

    def specialised(*args: Any) -> Any:
        if seen[0]:
            for conv in engine.caches.conv.values():
                conv.zero_()
        seen[0] = 0
        return run(*args)

    engine.model.forward, executor.run = stock, specialised


def shorter_context(built: Any) -> None:
    """The plan refuses the last positions."""
    executor = built.engine.executor
    executor.limits = replace(executor.limits, max_context=executor.limits.max_context - 4)


def unreported_steps(built: Any) -> None:
    generate = built.generate

    def run(*args: Any, on_step: Any = None, **options: Any) -> Any:
        return generate(*args, on_step=lambda index: on_step(index) if index % 3 else None, **options)

    built.generate = run


def nothing_found(real: Any) -> Any:
    """Prefixes are never found."""
    return lambda cache, tokens: real(cache, list(tokens)[:1])


def nothing_restored(real: Any) -> Any:
    """A hit continues from whatever state its slot holds."""
    return lambda snapshot, caches, slot: None


def false_ledger(built: Any) -> None:
    plant("false-ledger", built.engine)


#: name -> (feature whose gate answers for it, draft length, how to plant it)
FAULTS: dict[str, tuple[str, int, Plant]] = {
    "temperature ignored": ("sampling", 0, asked(temperature=1.0)),
    "top-k ignored": ("sampling", 0, asked(top_k=0)),
    "top-p ignored": ("sampling", 3, asked(top_p=1.0)),
    "rejected drafts not corrected for": ("sampling", 3, while_generating(rejection, "residual", uncorrected)),
    "structure ignored": ("structured_output", 3, asked(structured=None)),
    "log-probabilities of the token before": ("logprobs", 0, answered(_late_logprobs)),
    "chosen token not among its alternatives": ("logprobs", 3, answered(_without_chosen)),
    "stops ignored": ("stop", 3, asked(stop=(), stop_token_ids=())),
    "stop string left in the text": ("stop", 0, answered(_stop_in_text)),
    "stop string over two tokens": ("stop", 3, while_generating(emit, "_stops", stops_inside_tokens_only)),
    "penalties ignored": ("penalties", 0, asked(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)),
    "penalties without drafts": ("penalties", 3, while_generating(emit, "_history", history_without_drafts)),
    "state of a prefix not restored": ("prefix_reuse", 0, while_generating(Snapshot, "restore", nothing_restored)),
    "prefixes never found": ("prefix_reuse", 3, while_generating(PrefixCache, "find", nothing_found)),
    "times reversed": ("streaming", 0, answered(_reversed_times)),
    "steps not reported": ("streaming", 3, unreported_steps),
    "last positions refused": ("full_context", 0, shorter_context),
    "last positions refused under drafts": ("full_context", 3, shorter_context),
    "history lost behind a stock step": ("stock_resumed", 0, lost_after_stock),
    "ledger claims what stock did": ("stock_resumed", 3, false_ledger),
}
