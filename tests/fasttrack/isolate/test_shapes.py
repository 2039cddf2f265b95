"""The blast radius of every shape of change, from a repository and from the same change as a diff."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from isolate_repo import MODEL, edit, git, make, submodule, write

from fasttrack.cli.main import run
from fasttrack.isolate.report import Radius
from fasttrack.isolate.run import from_diff, from_git

ALLOWED = ("vllm/model_executor/models/kimi_k3",)
Shape = tuple[Callable[[Path], None], set[tuple[str, str, int, str]], bool]

INIT, MODEL_PY, SCHED = MODEL + "__init__.py", MODEL + "model.py", "vllm/v1/core/sched/scheduler.py"

#: shape -> (change, findings as (kind, file, line, word of the message), reaches outside)
SHAPES: dict[str, Shape] = {
    "model only": (
        lambda r: edit(r, MODEL_PY, "return x", "return x + 1"),
        set(),
        False,
    ),
    "new file of the model": (
        lambda r: write(r, MODEL + "decode.py", "import torch\n\n\ndef decode(x, rows=8):\n    return x[:rows]\n"),
        set(),
        False,
    ),
    "shared file": (
        lambda r: edit(r, SCHED, "return budget", "return budget // 2"),
        {("outside-scope", SCHED, 5, "modified"), ("shared-component", SCHED, 5, "scheduler")},
        True,
    ),
    "monkey-patch in __init__": (
        lambda r: write(
            r,
            INIT,
            '"""Kimi K3."""\n\nfrom vllm.v1.core.sched import scheduler as s\n\n\n'
            "def fast(self):\n    return 1\n\n\ns.Scheduler.schedule = fast\n",
        ),
        {("monkey-patch", INIT, 10, "vllm.v1.core.sched.scheduler.Scheduler.schedule at import")},
        True,
    ),
    "monkey-patch inside a function, through setattr": (
        lambda r: edit(
            r,
            MODEL_PY,
            "        return x",
            "        import vllm.v1.sample.sampler as s\n\n        setattr(s, 'sample', None)\n        return x",
        ),
        {("monkey-patch", MODEL_PY, 8, "vllm.v1.sample.sampler.sample when called")},
        True,
    ),
    "changed default": (
        lambda r: edit(r, SCHED, "budget: int = 8192", "budget: int = 16384"),
        {
            ("outside-scope", SCHED, 4, "modified"),
            ("shared-component", SCHED, 4, "scheduler"),
            ("changed-default", SCHED, 4, "8192 -> 16384"),
        },
        True,
    ),
    "changed class attribute and constant": (
        lambda r: (
            edit(r, SCHED, "max_batch: int = 64", "max_batch: int = 128"),
            edit(r, "vllm/v1/sample/sampler.py", "TOP_K = 20", "TOP_K = 40"),
        )[0],
        {
            ("outside-scope", SCHED, 2, "modified"),
            ("shared-component", SCHED, 2, "scheduler"),
            ("changed-default", SCHED, 2, "64 -> 128"),
            ("outside-scope", "vllm/v1/sample/sampler.py", 1, "modified"),
            ("shared-component", "vllm/v1/sample/sampler.py", 1, "sampler"),
            ("changed-default", "vllm/v1/sample/sampler.py", 1, "20 -> 40"),
        },
        True,
    ),
    "environment variable": (
        lambda r: write(r, MODEL + "knobs.py", 'import os\n\nFAST = os.environ.get("KIMI_K3_FAST", "0") == "1"\n'),
        {("environment-variable", MODEL + "knobs.py", 3, "KIMI_K3_FAST")},
        False,
    ),
    "environment variable in the table": (
        lambda r: edit(r, "vllm/envs.py", "}\n", '    "VLLM_NEW": lambda: os.getenv("VLLM_NEW", "1"),\n}\n'),
        {
            ("outside-scope", "vllm/envs.py", 5, "modified"),
            ("shared-component", "vllm/envs.py", 5, "environment variables"),
            ("environment-variable", "vllm/envs.py", 5, "VLLM_NEW"),
        },
        True,
    ),
    "effects at import": (
        lambda r: write(
            r,
            INIT,
            '"""Kimi K3."""\n\nimport torch\n\ntorch.set_float32_matmul_precision("high")\n'
            'LIBRARY = torch.ops.load_library("k3.so")\n\nif __name__ == "__main__":\n    print("not this")\n',
        ),
        {
            ("import-effect", INIT, 5, "set_float32_matmul_precision"),
            ("import-effect", INIT, 6, "load_library"),
        },
        False,
    ),
    "rename out of the scope": (
        lambda r: (write(r, "vllm/shared_model.py", (r / MODEL_PY).read_text()), (r / MODEL_PY).unlink())[0],
        {("outside-scope", "vllm/shared_model.py", 0, "renamed")},
        True,
    ),
    "rename inside the scope": (
        lambda r: (write(r, MODEL + "net.py", (r / MODEL_PY).read_text()), (r / MODEL_PY).unlink())[0],
        set(),
        False,
    ),
    "binary file": (
        lambda r: write(r, MODEL + "table.bin", "\0\1\2" * 50),
        {("binary", MODEL + "table.bin", 0, "binary file added")},
        False,
    ),
    "submodule bump": (
        lambda r: submodule(r, "2" * 40),
        {
            ("outside-scope", "third_party/kernels", 1, "modified"),
            ("submodule", "third_party/kernels", 1, "111111111111 -> 222222222222"),
        },
        True,
    ),
    "deletion of a shared file": (
        lambda r: (r / "vllm/v1/core/kv_cache_manager.py").unlink(),
        {
            ("outside-scope", "vllm/v1/core/kv_cache_manager.py", 1, "deleted"),
            ("shared-component", "vllm/v1/core/kv_cache_manager.py", 1, "KV-cache manager"),
        },
        True,
    ),
    "generated file": (
        lambda r: edit(r, MODEL + "weights_pb2.py", "DATA = 1", "DATA = 2"),
        {
            ("generated", MODEL + "weights_pb2.py", 2, "generated"),
            ("changed-default", MODEL + "weights_pb2.py", 2, "1 -> 2"),
        },
        False,
    ),
    "new dependency": (
        lambda r: (
            edit(r, "requirements/common.txt", "numpy\n", "numpy\nfancy-kernels==1.2\n"),
            edit(r, "pyproject.toml", '"torch>=2.11"', '"torch>=2.13", "fancy-kernels"'),
            edit(r, MODEL_PY, "import torch\n", "import fancy_kernels\nimport torch\n"),
        )[0],
        {
            ("outside-scope", "requirements/common.txt", 3, "modified"),
            ("dependency", "requirements/common.txt", 3, "fancy-kernels==1.2 (new)"),
            ("outside-scope", "pyproject.toml", 3, "modified"),
            ("dependency", "pyproject.toml", 3, "torch>=2.13 (was torch>=2.11)"),
            ("dependency", "pyproject.toml", 3, "fancy-kernels (new)"),
            ("new-import", MODEL_PY, 1, "fancy_kernels"),
        },
        True,
    ),
    "input preparation and model runner": (
        lambda r: (
            edit(r, "vllm/v1/worker/gpu_input_batch.py", "pass", "rows = None"),
            edit(r, "vllm/v1/worker/gpu_model_runner.py", "return None", "return 0"),
        )[0],
        {
            ("outside-scope", "vllm/v1/worker/gpu_input_batch.py", 2, "modified"),
            ("shared-component", "vllm/v1/worker/gpu_input_batch.py", 2, "input preparation"),
            ("outside-scope", "vllm/v1/worker/gpu_model_runner.py", 3, "modified"),
            ("shared-component", "vllm/v1/worker/gpu_model_runner.py", 3, "model runner"),
        },
        True,
    ),
    "file mode": (
        lambda r: (git(r, "update-index", "--chmod=+x", "scripts/run.sh"), (r / "scripts/run.sh").chmod(0o755))[0],
        {
            ("outside-scope", "scripts/run.sh", 0, "modified"),
            ("mode", "scripts/run.sh", 0, "100644 -> 100755"),
        },
        True,
    ),
    "broken Python": (
        lambda r: write(r, MODEL + "broken.py", "def f(:\n    pass\n"),
        {("not-analysed", MODEL + "broken.py", 0, "cannot be parsed")},
        False,
    ),
    "name that git quotes": (
        lambda r: write(r, MODEL + "größe und weite.py", "A = 1\n"),
        set(),
        False,
    ),
    "assignments that are no patches": (
        lambda r: edit(
            r,
            MODEL_PY,
            "        return x",
            "        self.cache = x\n        from . import model\n\n        model.CACHE = x\n"
            "        y = {}\n        y['a'] = x\n        return x",
        ),
        set(),
        False,
    ),
}


def compare(radius: Radius, expected: set[tuple[str, str, int, str]], without: set[str] = frozenset()) -> None:
    found = [f for f in radius.findings if f.kind not in without]
    assert {(f.kind, f.file, f.line) for f in found} == {e[:3] for e in expected if e[0] not in without}
    for kind, file, line, word in expected:
        if kind not in without:
            texts = [f.message + f.component for f in found if (f.kind, f.file, f.line) == (kind, file, line)]
            assert any(word in t for t in texts), (word, texts)


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str, tmp_path: Path) -> None:
    change, expected, outside = SHAPES[name]
    repo = tmp_path / "repo"
    base, head = make(repo, change)
    radius = from_git(repo, base, head, ALLOWED)
    compare(radius, expected)
    assert radius.outside == outside
    patch = tmp_path / "change.diff"
    patch.write_text(git(repo, "diff", "-M", base, head))
    again = from_diff(patch, ALLOWED)
    # a diff alone cannot tell which imports the repository knows, nor see the mark at a generated file's head
    compare(again, expected, {"new-import"})
    assert again.outside == outside
    assert [(f.path, f.status, f.inside) for f in again.files] == [(f.path, f.status, f.inside) for f in radius.files]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo = tmp_path / "repo"
    base, head = make(repo, SHAPES["monkey-patch in __init__"][0])
    git_arguments = ["isolate", "--repo", str(repo), "--base", base, "--head", head]
    assert run([*git_arguments, "--allow", ALLOWED[0]]) == 1
    text = capsys.readouterr().out
    assert f"{INIT}:10  assigns vllm.v1.core.sched.scheduler.Scheduler.schedule at import" in text
    assert text.splitlines()[-1].endswith("reaches outside the declared scope")
    assert run([*git_arguments, "--allow", "vllm", "--json"]) == 0  # the patched name is declared as well
    document = json.loads(capsys.readouterr().out)
    assert document["outside_scope"] is False
    assert document["files"][0]["path"] == INIT
    assert document["findings"] == []


def test_change_is_against_the_merge_base(tmp_path: Path) -> None:
    """What the base branch did meanwhile is not part of the change."""
    repo = tmp_path / "repo"
    base, _ = make(repo, lambda r: edit(r, MODEL_PY, "return x", "return x + 1"))
    git(repo, "branch", "topic")
    git(repo, "checkout", "-q", "-b", "moved", base)
    edit(repo, SCHED, "64", "65")
    git(repo, "commit", "-q", "-a", "-m", "other")
    radius = from_git(repo, "moved", "topic", ALLOWED)
    assert [f.path for f in radius.files] == [MODEL_PY]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "no declared paths"),
        (["--allow", "a"], "nothing to look at"),
        (["--allow", "a", "--base", "HEAD"], "nothing to look at"),
        (["--allow", "a", "--base", "HEAD", "--head", "nowhere", "--repo", "{repo}"], "unknown revision 'nowhere'"),
        (["--allow", "a", "--base", "--all", "--head", "HEAD", "--repo", "{repo}"], "unknown revision '--all'"),
        (["--allow", "a", "--base", "x", "--head", "y", "--repo", "{tmp}"], "not a git repository"),
        (["--allow", "a", "--diff", "{tmp}/none"], "cannot be read"),
        (["--allow", "a", "--diff", "{tmp}/d", "--base", "x"], "instead of"),
        (["--scope", "{tmp}/none.yaml"], "none.yaml"),
    ],
)
def test_bad_arguments(arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo = tmp_path / "repo"
    make(repo, SHAPES["model only"][0])
    assert run(["isolate", *(a.format(repo=repo, tmp=tmp_path) for a in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
