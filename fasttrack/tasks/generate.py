"""Generated twins of the three task formats, for engines that cannot answer the real ones. Same seed, same rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

_NOUNS = ("river", "lantern", "orchard", "compass", "harbour", "violin", "glacier", "pepper", "meadow", "anchor")
_FORMS = ("poem", "letter", "riddle", "song", "speech")


def aime(items: int, seed: int) -> list[dict[str, Any]]:
    """Integer answers in [0, 999] at the end of a chain of steps modulo 1000."""
    rows = []
    for i in range(items):
        rng = random.Random(f"aime/{seed}/{i}")
        value = rng.randrange(2, 30)
        text = f"Start with {value}."
        for _ in range(rng.randrange(3, 6)):
            kind, n = rng.choice(("add", "multiply by", "square and add")), rng.randrange(2, 20)
            value = {"add": value + n, "multiply by": value * n, "square and add": value * value + n}[kind] % 1000
            text += f" Then {kind} {n} and keep the remainder modulo 1000."
        rows.append({"id": f"aime-{seed}-{i}", "problem": f"{text} What is the result?", "answer": str(value)})
    return rows


def gpqa(items: int, seed: int) -> list[dict[str, Any]]:
    """Four different options; the order is a function of the row and the seed."""
    rows = []
    for i in range(items):
        rng = random.Random(f"gpqa/{seed}/{i}")
        mass, speed = rng.randrange(2, 20), rng.randrange(2, 20)
        right = mass * speed * speed // 2
        values = {right}
        while len(values) < 4:
            values.add(right + rng.choice((-1, 1)) * rng.randrange(1, 60))
        options = sorted(values)
        rng.shuffle(options)
        rows.append(
            {
                "id": f"gpqa-{seed}-{i}",
                "question": f"A body of {mass} kg moves at {speed} m/s. Its kinetic energy, rounded down, in joules is",
                "options": [str(v) for v in options],
                "answer": options.index(right),
            }
        )
    return rows


def mrcr(items: int, seed: int, needles: Sequence[int] = (2,), max_chars: int = 2000) -> list[dict[str, Any]]:
    """A conversation with equal requests answered differently; the task is to repeat the n-th answer after a prefix.

    Rounds are added until ``max_chars`` (of the whole prompt) would be exceeded; the shortest has only the needles.
    """
    rows = []
    for i in range(items):
        rng = random.Random(f"mrcr/{seed}/{i}")
        count = needles[i % len(needles)]
        form, noun = rng.choice(_FORMS), rng.choice(_NOUNS)
        ask = f"User: Write a {form} about a {noun}."
        answers = [_sentence(rng, noun) for _ in range(count)]
        wanted = rng.randrange(count)
        prefix = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(6))
        last = f"User: Prepend {prefix} to the {form} number {wanted + 1} about a {noun} and repeat it.\nAssistant:"
        rounds = [f"{ask}\nAssistant: {answer}" for answer in answers]
        while True:
            other = rng.choice([n for n in _NOUNS if n != noun])
            filler = f"User: Write a {rng.choice(_FORMS)} about a {other}.\nAssistant: {_sentence(rng, other)}"
            if len("\n".join([*rounds, filler, last])) > max_chars:
                break
            rounds.insert(rng.randrange(len(rounds) + 1), filler)
        rows.append(
            {
                "id": f"mrcr-{seed}-{i}",
                "prompt": "\n".join([*rounds, last]),
                "answer": f"{prefix} {answers[wanted]}",
                "prefix": prefix,
                "needles": count,
            }
        )
    return rows


def _sentence(rng: random.Random, noun: str) -> str:
    first, second = rng.sample([n for n in _NOUNS if n != noun], 2)
    return f"The {noun} and the {first} met {rng.randrange(2, 99)} times by the {second}."
