"""A whole target in a hundred lines: what a newcomer has to write before ``fasttrack validate`` says something."""

import hashlib
import time
from contextlib import nullcontext

import torch

from fasttrack.target import (
    STEP_RANGE,
    Completion,
    DeploymentRefused,
    EngineInfo,
    LedgerStep,
    Limits,
    NumericsCase,
    TargetDescription,
)

VOCAB, WIDTH, OP = 97, 32, "hundred::mix"
WEIGHT = torch.randn(2, WIDTH, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class HundredEngine:
    def __init__(self, spec):
        self.spec, self.dtype = spec, torch.float64 if spec.arm == "oracle" else torch.float32
        self.embed, self.head, self.steps = WEIGHT[0].T.to(self.dtype), WEIGHT[1].to(self.dtype), []
        if spec.switch_value == "on":
            from hundred_lines.fast import mix

            self.mix = mix

    def info(self):
        config = {"dtype": str(self.dtype), "switch": self.spec.switch_value}
        return EngineInfo("embedded", ("cpu",), "hundred-1", VOCAB, 256, (0,), config, "emulated")

    def encode(self, text):
        return [byte % VOCAB for byte in text.encode()]

    def decode(self, token_ids):
        return "".join(chr(33 + token % 90) for token in token_ids)

    def reset(self):
        self.steps = []

    close = reset

    def drain_ledger(self):
        drained, self.steps = self.steps, []
        return drained

    def generate(self, requests, *, run, keep_logits=False, on_step=None):
        live = [(r, Completion(r.id, [], "", logprobs=[]), []) for r in requests]
        index, result = 0, live
        while live:
            now = [item for item in live if item[0].arrival_step <= index]
            fresh = sum(not done.token_ids for _, done, _ in now)
            if now:
                with torch.profiler.record_function(f"{STEP_RANGE}/{run}/{index}"):
                    self.step(now, fresh, run, index)
            for _, done, rows in now:
                done.full_logprobs = torch.stack(rows) if keep_logits else None
            live, index = [item for item in live if not item[1].finish_reason], index + 1
            if on_step:
                on_step(index - 1)
        return [done for _, done, _ in result]

    def step(self, now, fresh, run, index):
        start, kind = time.perf_counter(), "decode" if not fresh else "prefill" if fresh == len(now) else "mixed"
        reason = None if (self.spec.switch_value, kind) == ("on", "decode") and len(now) <= 8 else "not_taken"
        history = [(*request.prompt, *done.token_ids) for request, done, _ in now]
        x = torch.stack([sum(self.embed[t] * 0.5**i for i, t in enumerate(reversed(h[-8:]))) for h in history])
        logprobs = (x @ self.head if reason else self.mix(x, self.head)).log_softmax(-1)
        for (request, done, rows), row in zip(now, logprobs, strict=True):
            count = len(done.token_ids)
            token = request.forced[count] if count < len(request.forced) else int(row[1:].argmax()) + 1
            done.token_ids.append(token)
            done.logprobs.append(float(row[token]))
            done.token_times.append(time.perf_counter())
            rows.append(row)
            if count + 1 >= min(request.max_tokens, len(request.forced) or request.max_tokens):
                done.finish_reason, done.text = "length", self.decode(done.token_ids)
        ops, emitted = {} if reason else {OP: 1}, len(now)
        rows = sum(1 if done.token_ids[1:] else len(request.prompt) for request, done, _ in now)
        path, providers = "stock" if reason else "specialized", dict.fromkeys(ops, "torch")
        hashes, wall = [hashlib.sha256(logprobs.numpy().tobytes()).hexdigest()], time.perf_counter() - start
        facts = (run, index, kind, emitted, rows, 0, 0, 1, 1, max(map(len, history)), path, reason, ops)
        self.steps.append(LedgerStep(*facts, providers, [], hashes, wall, emitted))


class HundredTarget:
    def describe(self):
        limits = Limits(tensor_parallel=(1,), max_rows=8, draft_lengths=(0,), max_context=256)
        paths, modules, reasons = ("hundred_lines/",), ("hundred_lines.fast",), ("not_taken",)
        named = ("hundred", "1", "toy", "backend", "on", "off")
        return TargetDescription(*named, paths, modules, (OP,), (OP,), reasons, limits)

    def engine(self, spec):
        wrong = [name for name, right in (("tp", 1), ("dcp", 1), ("draft_length", 0)) if getattr(spec, name) != right]
        if spec.switch_value == "on" and wrong:
            raise DeploymentRefused([f"{name} {getattr(spec, name)} is not supported" for name in wrong])
        return HundredEngine(spec)

    def numerics_cases(self, tier, options):
        from hundred_lines.fast import mix

        def inputs(family, seed):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            return {"x": x.round() if family == "coded" else x, "w": WEIGHT[1].float()}

        def bound(given, oracle):
            return {"y": 2.0**-19 * (given["x"].abs() @ given["w"].abs()) + 2.0**-140}

        families = ("normal", "outliers", "denormals", "negative_zero", "coded")
        run, oracle = lambda g, poison: {"y": mix(g["x"], g["w"])}, lambda g: {"y": g["x"].double() @ g["w"].double()}
        return [NumericsCase(OP, "b4", "torch", families, inputs, run, oracle, bound, "K eps |x||w|", lambda i, o: 0)]

    def profile(self, engine):
        return nullcontext()


TARGET = HundredTarget()
