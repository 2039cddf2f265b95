"""The toy engine: continuous batching over a linear recurrence, stock and optimised, in lock-step ranks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fasttrack.target import STEP_RANGE, Completion, EngineInfo, EngineSpec, LedgerStep, Request

VOCAB, HIDDEN, MAX_CONTEXT = 128, 64, 512


@dataclass
class _Running:
    request: Request
    slot: int
    position: int = 0  #: tokens in the state
    logprob_rows: list[torch.Tensor] = field(default_factory=list)
    completion: Completion = field(default_factory=lambda: Completion("", [], ""))


class ToyEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.fault = spec, spec.arm.partition(":")[2]
        self.dtype = torch.float64 if spec.arm == "oracle" else torch.float32
        rng = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=rng, dtype=torch.float64).to(self.dtype)
        self.head = (torch.randn(HIDDEN, VOCAB, generator=rng, dtype=torch.float64) / 3).to(self.dtype)
        self.ledger: list[LedgerStep] = []
        self.reset()
        if spec.switch_value == "fast":
            from fake_target import fast

            self.fast = fast

    def info(self) -> EngineInfo:
        options = {"toy_backend": self.spec.switch_value, "dtype": str(self.dtype), "tp": self.spec.tp}
        options["max_requests"] = self.spec.max_requests
        return EngineInfo("embedded", ("cpu",), "toy-7", VOCAB, MAX_CONTEXT, (0,), options, "emulated")

    def encode(self, text: str) -> list[int]:
        return [byte % VOCAB for byte in text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("ascii")

    def reset(self) -> None:
        self.state = torch.zeros(self.spec.max_requests + 1, HIDDEN, dtype=self.dtype)

    def close(self) -> None:
        self.reset()

    def drain_ledger(self) -> list[LedgerStep]:
        drained, self.ledger = self.ledger, []
        return drained

    def generate(
        self,
        requests: Sequence[Request],
        *,
        run: str,
        keep_logits: bool = False,
        on_step: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        waiting = [_Running(r, 0, completion=Completion(r.id, [], "", logprobs=[], top_logprobs=[])) for r in requests]
        everyone, running, index = list(waiting), list[_Running](), 0
        while waiting or running:
            free = sorted(set(range(1, self.spec.max_requests + 1)) - {r.slot for r in running})
            new = [r for r in waiting if r.request.arrival_step <= index][: len(free)]
            for r, slot in zip(new, free, strict=False):
                r.slot, r.completion.arrival_time = slot, time.perf_counter()
                waiting.remove(r)
            if not (running or new):
                index += 1
                continue
            with torch.profiler.record_function(f"{STEP_RANGE}/{run}/{index}"), torch.no_grad():
                self._step(running + new, len(new), run, index, keep_logits)
            running = [r for r in running + new if not r.completion.finish_reason]
            index += 1
            if on_step:
                on_step(index - 1)
        return [r.completion for r in everyone]

    def _step(self, batch: list[_Running], new: int, run: str, index: int, keep_logits: bool) -> None:
        start = time.perf_counter()
        kind = "decode" if not new else "prefill" if new == len(batch) else "mixed"
        fed = [r.completion.token_ids[-1:] or list(r.request.prompt) for r in batch]
        reason = self._fallback(kind, len(batch))
        fast = reason is None and self.fault != "false_ledger"
        slots = torch.tensor([r.slot for r in batch])
        if fast:
            embedded = torch.stack([self._embed(r.position, f[-1]) for r, f in zip(batch, fed, strict=True)])
            self.fast.update(self.state, slots, embedded)
        else:
            for r, tokens in zip(batch, fed, strict=True):
                if r.position == 0:
                    self.state[r.slot] = 0
                for offset, token in enumerate(tokens):
                    self.state[r.slot] = self.state[r.slot] * 0.875 + self._embed(r.position + offset, token)
        hidden = self.state[slots]
        hidden = hidden / hidden.square().mean(1, keepdim=True).sqrt()
        if fast:
            cut = HIDDEN // self.spec.tp if self.fault == "drop_partial" else 0
            hidden[:, :cut] = 0
            logits = self.fast.head(hidden, self.head, self.spec.tp)
        else:
            logits = hidden @ self.head
        logprobs = torch.log_softmax(logits, 1)
        for row, r in enumerate(batch):
            r.position += len(fed[row])
            self._emit(r, logprobs[row], keep_logits)
        digest = hashlib.sha256(logits.numpy().tobytes() + f"{kind}/{reason}/{index}".encode()).hexdigest()[:16]
        self.ledger.append(
            LedgerStep(
                run=run,
                index=index,
                kind=kind,
                requests=len(batch),
                rows=sum(map(len, fed)),
                padded_rows=0,
                draft_length=0,
                tp=self.spec.tp,
                dcp=1,
                context_max=max(r.position for r in batch),
                path="stock" if reason else "specialized",
                reason=reason,
                ops={} if reason else {"toy::update": 1, "toy::head": 1},
                providers={} if reason else {"toy::update": "torch", "toy::head": "torch"},
                slots=slots.tolist(),
                rank_hashes=[digest] * self.spec.tp,
                wall=time.perf_counter() - start,
                emitted=len(batch),
            )
        )

    def _embed(self, position: int, token: int) -> torch.Tensor:
        return self.embedding[token].roll(position)  # the position keeps greedy decoding out of fixed points

    def _fallback(self, kind: str, requests: int) -> str | None:
        if self.spec.switch_value != "fast":
            return "switched_off"
        if kind != "decode" or self.fault == "refuse_all":
            return "not_pure_decode"
        return "too_many_rows" if requests > 16 else None

    def _emit(self, r: _Running, logprobs: torch.Tensor, keep_logits: bool) -> None:
        done, sampling = r.completion, r.request.sampling
        count = len(done.token_ids)
        if r.request.forced:
            token = r.request.forced[count]
        elif sampling.temperature > 0:
            rng = torch.Generator().manual_seed(sampling.seed * 65537 + count)
            token = int(torch.multinomial((logprobs / sampling.temperature).softmax(0), 1, generator=rng))
        else:
            token = int(logprobs.argmax())
        assert done.logprobs is not None
        assert done.top_logprobs is not None
        done.token_ids.append(token)
        done.text = self.decode(done.token_ids)
        done.logprobs.append(float(logprobs[token]))
        top = logprobs.topk(sampling.logprobs or 1)
        done.top_logprobs.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        done.token_times.append(time.perf_counter())
        if keep_logits:
            r.logprob_rows.append(logprobs)
            done.full_logprobs = torch.stack(r.logprob_rows)
        stopped = token in sampling.stop_token_ids or (token == 0 and not sampling.ignore_eos)
        if stopped or any(s in done.text for s in sampling.stop):
            done.finish_reason = "stop"
        elif count + 1 >= min(r.request.max_tokens, len(r.request.forced) or r.request.max_tokens):
            done.finish_reason = "length"
