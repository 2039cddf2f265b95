"""What counts as an effect, a patch, an environment variable, a default."""

from __future__ import annotations

import ast

import pytest

from fasttrack.isolate.facts import Collector, collect
from fasttrack.isolate.layout import component, is_dependency_file, matches
from fasttrack.isolate.python import module_of


def facts(source: str, kind: str, module: str = "pkg.model") -> set[str]:
    return {f.key for f in collect(ast.parse(source).body, Collector(module)) if f.kind == kind}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import vllm.a\nvllm.a.f = 1", {"vllm.a.f"}),
        ("from vllm import a as b\nb.C.f = 1", {"vllm.a.C.f"}),
        ("from vllm.a import C\n\ndef g():\n    C.f = 1", {"vllm.a.C.f"}),
        ("import vllm.a\nalias = vllm.a\nalias.f = 1", {"vllm.a.f"}),
        ("import sys\nsys.modules['vllm.a'] = None", {"sys.modules['vllm.a']"}),
        ("import vllm\nvllm.__dict__['f'] = 1", {"vllm.f"}),
        ("import vllm\nsetattr(vllm, 'f', 1)", {"vllm.f"}),
        ("import vllm\nvllm.count += 1", {"vllm.count"}),
        ("import vllm\ndel vllm.f", {"vllm.f"}),
        ("import vllm\nvllm.f, x = 1, 2", {"vllm.f"}),
        ("from unittest import mock\nmock.patch('vllm.a.f')", {"vllm.a.f"}),
        ("import torch\nlib = torch.library.Library('aten', 'IMPL')", {"torch.ops.aten"}),
        ("from ..core import sched\nsched.f = 1", {"pkg.core.sched.f"}),
        ("class A:\n    pass\n\nA.f = 1", set()),
        ("class A:\n    def f(self):\n        self.x = 1", set()),
        ("x = {}\nx['a'] = 1", set()),
        ("import os\nos.environ['A'] = '1'", set()),
    ],
)
def test_patches(source: str, found: set[str]) -> None:
    assert facts(source, "patch", "pkg.models.model") == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\nos.getenv('A')", {"A"}),
        ("import os\nos.environ['A']", {"A"}),
        ("from os import environ\nenviron.get('A', '0')", {"A"}),
        ("import os\n'A' in os.environ", {"A"}),
        ("import os\nos.environ['A'] = '1'", {"A"}),
        ("import os\nos.environ.setdefault('A', '1')", {"A"}),
        ("from vllm.utils import get_env_bool\nget_env_bool('KIMI_FAST')", {"KIMI_FAST"}),
        ("environment_variables = {'VLLM_A': lambda: 1}", {"VLLM_A"}),
        ("x = {'A': 1}\nx.get('A')", set()),
    ],
)
def test_environment(source: str, found: set[str]) -> None:
    assert facts(source, "env") == found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("register()", 1),
        ("import torch\nlib = torch.library.Library('k3', 'DEF')", 1),
        ("@registry.register\nclass A:\n    pass", 1),
        ("class A:\n    start()", 1),
        ("try:\n    load()\nexcept Exception:\n    pass", 1),
        ("def f():\n    load()", 0),
        ("if __name__ == '__main__':\n    load()", 0),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    load()", 0),
        ("logger = init_logger(__name__)", 0),
        ("import subprocess\nF = lambda: subprocess.run(['x'])", 0),
        ('"""Docstring."""\nX = 1', 0),
    ],
)
def test_effects(source: str, count: int) -> None:
    assert len(facts(source, "effect")) == count


def test_defaults() -> None:
    source = (
        "X = 1\ny = 2\n\n\ndef f(a, b=3, *, c=4):\n    pass\n\n\nclass C:\n    d: int = 5\n\n"
        "    def g(self, e=6):\n        pass\n\n\nT = {'k': 7}\nparser.add_argument('--flag', default=8)\n"
    )
    found = {(f.key, f.value) for f in collect(ast.parse(source).body, Collector("m")) if f.kind == "default"}
    assert {
        ("X", "1"),
        ("f(b)", "3"),
        ("f(c)", "4"),
        ("C.d", "5"),
        ("C.g(e)", "6"),
        ("T['k']", "7"),
        ("--flag", "8"),
    } <= found
    assert not any(k == "y" for k, _ in found)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("vllm/v1/core/sched/async_scheduler.py", "scheduler"),
        ("vllm/v1/sample/ops/topk.py", "sampler"),
        ("vllm/v1/core/kv_cache_utils.py", "KV-cache manager"),
        ("vllm/v1/core/single_type_kv_cache_manager.py", "KV-cache manager"),
        ("vllm/v1/worker/gpu_input_batch.py", "input preparation"),
        ("vllm/v1/worker/gpu_model_runner.py", "model runner"),
        ("vllm/v1/worker/gpu/model_runner.py", "model runner"),
        ("vllm/model_executor/models/kimi_k3/model.py", None),
        ("python/sglang/srt/managers/scheduler.py", "scheduler"),
        ("python/sglang/srt/mem_cache/memory_pool.py", "KV-cache manager"),
        ("tests/v1/core/test_scheduler.py", None),
        ("README.md", None),
    ],
)
def test_components(path: str, name: str | None) -> None:
    assert component(path) == name


def test_declared_paths() -> None:
    assert matches("a/b/c.py", "a/b")
    assert matches("a/b/c.py", "./a/b/")
    assert matches("a/b/c.py", "a/**")
    assert matches("a/b/c.py", "a/*/c.py")
    assert not matches("a/bc.py", "a/b")
    assert not matches("a/b/c.py", "a/*.py")
    assert module_of("src/pkg/a/__init__.py") == "pkg.a"
    assert is_dependency_file("requirements/cuda.txt")
    assert not is_dependency_file("docs/notes.txt")
