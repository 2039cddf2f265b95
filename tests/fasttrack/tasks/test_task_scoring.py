"""Golden responses: the right score is stated beside each."""

import importlib.util
from pathlib import Path

import pytest

import fasttrack.tasks


def scorer(name):
    """Scorers are loaded by path, as lm-eval does."""
    path = Path(fasttrack.tasks.__file__).parent / name / "scoring.py"
    spec = importlib.util.spec_from_file_location(f"scoring_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.process_results


@pytest.mark.parametrize(
    ("response", "score", "parsed"),
    [
        (r"so \boxed{42}", 1, 1),
        (r"so \boxed{042}.", 1, 1),
        (r"first \boxed{7}, no: \boxed{42}", 1, 1),
        (r"\boxed{42} and on the other hand \boxed{7}", 0, 1),
        (r"\boxed{42} and then \boxed{4", 1, 1),  # a truncated last box does not count
        (r"\boxed {42}", 1, 1),
        (r"$\boxed{\text{42}}$", 1, 1),
        (r"\boxed{42\,}", 1, 1),
        (r"\boxed{\frac{84}{2}}", 0, 0),
        (r"\boxed{}", 0, 0),
        ("The answer is 42.", 0, 0),
        ("", 0, 0),
    ],
)
def test_aime(response, score, parsed):
    assert scorer("aime25")({"answer": "42"}, [response]) == {"exact_match": score, "parsed": parsed}


MRCR = {"prefix": "k9x2ab", "answer": "k9x2ab The river met the lantern."}


@pytest.mark.parametrize(
    ("response", "low", "high", "parsed"),
    [
        ("k9x2ab The river met the lantern.", 1, 1, 1),
        ("  k9x2ab The river met the lantern.\n", 1, 1, 1),
        ("k9x2ab The river saw the lantern.", 0.8, 0.99, 1),
        ("k9x2ab", 0, 0, 1),
        ("The river met the lantern.", 0, 0, 0),
        ("Sure: k9x2ab The river met the lantern.", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_mrcr(response, low, high, parsed):
    found = scorer("mrcr")(MRCR, [response])
    assert low <= found["ratio"] <= high
    assert found["parsed"] == parsed
