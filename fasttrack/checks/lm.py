"""An engine as lm-eval sees it, with what lm-eval's samples leave out: finish reasons and token counts.

Importing this module imports lm-eval, which takes seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_eval.api.model import LM

from fasttrack.errors import EvidenceError
from fasttrack.target import ChatEngine, Completion, Engine, Request, Sampling
from fasttrack.tasks.text import THINK_MARKS

#: What a chat template is known by: these turns as it renders them.
_TURNS = [{"role": role, "content": f"<{role}>"} for role in ("user", "assistant", "user")]


def chat_template_sha256(engine: Engine) -> str | None:
    """SHA-256 of a fixed conversation's token ids; None where the engine has no chat template."""
    if not isinstance(engine, ChatEngine):
        return None
    try:
        tokens = engine.encode_chat(_TURNS)
    except EvidenceError:
        return None
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()


@dataclass
class Observation:
    """One request of a task item. ``text`` is what lm-eval got; empty for items that do not fit the context."""

    prompt: str
    finish_reason: str  #: "stop", "length", "abort", "scored" (log-likelihood), "skipped" (above the context)
    output_tokens: int
    text: str = ""
    prompt_tokens: int = 0


class EngineLM(LM):
    """``max_tokens`` caps every generation, whatever the task asks for. ``seed_of(doc)`` seeds sampling.

    Prompts to be continued go through the engine's chat template where it has one: as the turns of the document's
    ``messages``, else as one turn of the user's. A template that opens a reasoning block in the assistant's name
    gets its mark back in front of the response, so that a scorer sees a block that never closed.

    Observations are kept per task item: ``observations[doc_id]`` in the order of the item's requests.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        run: str,
        max_tokens: int,
        temperature: float = 0.0,
        seed_of: Callable[[int], int] = lambda doc: doc,
    ) -> None:
        super().__init__()
        self.engine, self.run, self.max_tokens, self.temperature, self.seed_of = (
            engine,
            run,
            max_tokens,
            temperature,
            seed_of,
        )
        self.max_context = engine.info().max_context
        self.chat = engine if isinstance(engine, ChatEngine) and chat_template_sha256(engine) else None
        self.observations: dict[int, list[Observation]] = {}

    def generate_until(self, requests: list[Any]) -> list[str]:
        wanted: list[Request | None] = []
        openings: list[str] = []
        for number, instance in enumerate(requests):
            context, options = instance.args
            prompt, opening = self._prompt(getattr(instance, "doc", None), context)
            openings.append(opening)
            tokens = min(self.max_tokens, int(options.get("max_gen_toks", self.max_tokens)))
            stop = options.get("until") or []
            sampling = Sampling(
                temperature=self.temperature,
                seed=self.seed_of(instance.doc_id),
                stop=tuple([stop] if isinstance(stop, str) else stop),
            )
            fits = 0 < len(prompt) <= self.max_context - tokens
            wanted.append(Request(f"g{number}", prompt, tokens, sampling) if fits else None)
        answers = self._generate(wanted, "generate")
        texts = []
        for instance, request, done, opening in zip(requests, wanted, answers, openings, strict=True):
            text = opening + _before_stop(done.text, request.sampling.stop) if done and request else ""
            reason, count = (done.finish_reason, len(done.token_ids)) if done else ("skipped", 0)
            asked = len(request.prompt) if request else 0
            self._observe(instance, Observation(instance.args[0], reason, count, text, asked))
            texts.append(text)
        return texts

    def _prompt(self, doc: Any, context: str) -> tuple[tuple[int, ...], str]:
        """Token ids, and the mark of a reasoning block that they leave open."""
        if self.chat is None:
            return tuple(self.engine.encode(context)), ""
        turns = (doc or {}).get("messages") or [{"role": "user", "content": context}]
        prompt = tuple(self.chat.encode_chat(turns))
        tail = self.engine.decode(prompt[-16:]).rstrip()
        return prompt, next((start for start, _ in THINK_MARKS if tail.endswith(start)), "")

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        wanted: list[Request | None] = []
        for number, instance in enumerate(requests):
            context, continuation = instance.args
            whole = self.engine.encode(context + continuation)
            # The boundary is where the context's own tokens end; an empty context leaves the first token unscored.
            split = max(1, min(len(self.engine.encode(context)), len(whole) - 1))
            forced = tuple(whole[split:])
            fits = bool(forced) and len(whole) <= self.max_context
            request = Request(
                f"l{number}", tuple(whole[:split]), len(forced), Sampling(logprobs=1, ignore_eos=True), forced=forced
            )
            wanted.append(request if fits else None)
        answers = self._generate(wanted, "score")
        results = []
        for instance, asked, done in zip(requests, wanted, answers, strict=True):
            results.append(_score(asked, done) if asked and done else (float("-inf"), False))
            reason = "scored" if done else "skipped"
            self._observe(instance, Observation(instance.args[0], reason, len(asked.forced) if asked else 0))
        return results

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-likelihood of a text given its first token; longer texts in windows that overlap by one token."""
        totals = []
        for number, instance in enumerate(requests):
            tokens = self.engine.encode(instance.args[0])
            window = self.max_context
            pieces: list[Request | None] = []
            for start in range(0, max(0, len(tokens) - 1), window - 1):
                piece = tokens[start : start + window]
                sampling = Sampling(logprobs=1, ignore_eos=True)
                pieces.append(
                    Request(f"r{number}.{start}", (piece[0],), len(piece) - 1, sampling, forced=tuple(piece[1:]))
                )
            answers = self._generate(pieces, f"rolling{number}")
            totals.append(sum(_score(p, a)[0] for p, a in zip(pieces, answers, strict=True) if p and a))
            self._observe(instance, Observation(instance.args[0], "scored", max(0, len(tokens) - 1)))
        return totals

    def _generate(self, wanted: list[Request | None], what: str) -> list[Completion | None]:
        done = iter(self.engine.generate([r for r in wanted if r], run=f"{self.run}/{what}") if any(wanted) else [])
        return [next(done) if request else None for request in wanted]

    def _observe(self, instance: Any, observation: Observation) -> None:
        self.observations.setdefault(instance.doc_id, []).append(observation)


def _score(request: Request, done: Completion) -> tuple[float, bool]:
    if done.logprobs is None or tuple(done.token_ids) != request.forced:
        raise ValueError("the engine did not emit the forced tokens with their log-probabilities")
    best = done.top_logprobs or []
    greedy = len(best) == len(request.forced) and all(
        max(top, key=lambda t: top[t]) == token for top, token in zip(best, request.forced, strict=True)
    )
    return sum(done.logprobs), greedy


def _before_stop(text: str, stop: tuple[str, ...]) -> str:
    """Engines may or may not include the stop string that ended a generation; lm-eval wants it gone."""
    ends = [position for s in stop if s and (position := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text
