"""Generated twins of the three task formats, for engines that cannot answer the real ones.

Same seed, same rows; the first rows of a larger set are the smaller set.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from fasttrack.tasks.rows import as_text

_NOUNS = ("river", "lantern", "orchard", "compass", "harbour", "violin", "glacier", "pepper", "meadow", "anchor")
_FORMS = ("poem", "letter", "riddle", "song", "speech")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def aime(items: int, seed: int, steps: tuple[int, int] = (3, 5)) -> list[dict[str, Any]]:
    """Integer answers in [0, 999] at the end of a chain of ``steps`` (least, most) operations modulo 1000.

    ``solution`` works the chain out and ends in the boxed answer.
    """
    rows = []
    for i in range(items):
        rng = random.Random(f"aime/{seed}/{i}")
        value = rng.randrange(2, 30)
        text, worked = f"Start with {value}.", [f"We start with {value}."]
        for _ in range(rng.randrange(steps[0], steps[1] + 1)):
            kind, n = rng.choice(("add", "multiply by", "square and add")), rng.randrange(2, 20)
            full = {"add": value + n, "multiply by": value * n, "square and add": value * value + n}[kind]
            text += f" Then {kind} {n} and keep the remainder modulo 1000."
            worked.append(f"To {value} we {kind} {n}: {full}, which leaves {full % 1000}.")
            value = full % 1000
        solution = "\n".join([*worked, f"The result is \\boxed{{{value}}}."])
        row = {"problem": f"{text} What is the result?", "answer": str(value), "solution": solution}
        rows.append({"id": f"aime-{seed}-{i}", **row})
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
                "ordered": True,
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
        answers = [_sentence(rng, noun) for _ in range(count)]
        wanted = rng.randrange(count)
        prefix = "".join(rng.choice(_LETTERS) for _ in range(6))
        ask = f"Prepend {prefix} to the {_ORDINALS[wanted]} {form} about a {noun} and repeat it. Write nothing else."
        rounds = [(f"Write a {form} about a {noun}.", answer) for answer in answers]
        size = len(as_text(_turns(rounds, ask)))
        places: list[list[tuple[str, str]]] = [[] for _ in range(count + 1)]  # fillers between the needles
        while True:
            other = rng.choice([n for n in _NOUNS if n != noun])
            filler = (f"Write a {rng.choice(_FORMS)} about a {other}.", _sentence(rng, other))
            size += len("User: \nAssistant: \n") + len(filler[0]) + len(filler[1])
            if size > max_chars:
                break
            rng.choice(places).append(filler)
        spread = list(places[0])
        for needle, fillers in zip(rounds, places[1:], strict=True):
            spread += [needle, *fillers]
        messages = _turns(spread, ask)
        row = {"answer": f"{prefix} {answers[wanted]}", "prefix": prefix, "needles": count}
        rows.append({"id": f"mrcr-{seed}-{i}", "messages": messages, "prompt": as_text(messages), **row})
    return rows


def _turns(rounds: Sequence[tuple[str, str]], last: str) -> list[dict[str, str]]:
    turns = []
    for ask, answer in rounds:
        turns += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return [*turns, {"role": "user", "content": last}]


def _sentence(rng: random.Random, noun: str) -> str:
    first, second = rng.sample([n for n in _NOUNS if n != noun], 2)
    return f"The {noun} and the {first} met {rng.randrange(2, 99)} times by the {second}."
