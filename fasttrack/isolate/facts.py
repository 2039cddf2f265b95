"""What a Python file does to the world around it, as facts that can be compared between two versions.

Nothing is imported or run: facts come from the syntax tree. Kinds and keys: ``effect`` (statement that acts at
import), ``patch`` (dotted name outside the file that is assigned), ``env`` (environment variable), ``default``
(qualified name of a parameter, attribute, constant or option; its value is compared), ``import`` (top-level module).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

REQUIRED = "<required>"

#: Calls that act even when their result is assigned: by dotted prefix.
_EFFECTFUL = (
    "atexit.register",
    "ctypes.CDLL",
    "ctypes.cdll",
    "importlib.import_module",
    "importlib.reload",
    "multiprocessing.",
    "open",
    "os.makedirs",
    "os.putenv",
    "os.system",
    "requests.",
    "signal.signal",
    "socket.",
    "subprocess.",
    "sys.path.",
    "threading.Thread",
    "torch.backends.",
    "torch.classes.load_library",
    "torch.cuda.",
    "torch.library.Library",
    "torch.ops.load_library",
    "torch.set_",
    "torch.utils.cpp_extension.",
    "urllib.",
)
_REGISTERS = re.compile(r"(^|[._])register|torch\.library\.(custom_op|impl|register_fake)|(^|\.)hookimpl$")
_CONSTANT = re.compile(r"_*[A-Z][A-Z0-9_]*$")
_ENVIRONMENT = ("os.environ", "environ")
_ENV_TABLE = re.compile(r"env", re.I)


@dataclass(frozen=True)
class Fact:
    kind: str
    key: str
    line: int
    value: str = ""
    text: str = ""  #: for people


@dataclass
class _Scope:
    name: str = ""
    function: bool = False  #: body runs when called, not at import
    kind: str = "module"


@dataclass
class Collector(ast.NodeVisitor):
    """``module``: dotted name of the file, for relative imports. ``offset``: added to line numbers."""

    module: str = ""
    package: bool = False  #: the file is an ``__init__``
    offset: int = 0
    facts: list[Fact] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  #: local name -> dotted name it was imported as
    scopes: list[_Scope] = field(default_factory=lambda: [_Scope()])
    guarded: int = 0  #: inside ``if TYPE_CHECKING`` or ``if __name__ == "__main__"``

    # --- names -------------------------------------------------------------------------------------------------

    def dotted(self, node: ast.expr) -> str:
        """``a.b.c`` with the first part resolved through imports; '' when it is no plain name."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def imported(self, node: ast.expr) -> str:
        """Like :meth:`dotted`, but only for names that an import bound."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        return self.dotted(node) if isinstance(root, ast.Name) and root.id in self.names else ""

    def _add(self, kind: str, key: str, node: ast.AST, value: str = "", text: str = "") -> None:
        line = getattr(node, "lineno", 1) + self.offset
        self.facts.append(Fact(kind, key, line, value, text or key))

    @property
    def at_import(self) -> bool:
        return not self.guarded and not any(s.function for s in self.scopes)

    def _qualified(self, name: str) -> str:
        return ".".join([*(s.name for s in self.scopes if s.name), name])

    # --- statements --------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for a in node.names:
            self.names[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
            if not self.guarded:
                self._add("import", a.name.split(".")[0], node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.module.split(".") if self.module else []
            keep = len(parts) - node.level + self.package
            base = ".".join([*parts[: max(keep, 0)], *([node.module] if node.module else [])])
        elif base and not self.guarded:
            self._add("import", base.split(".")[0], node)
        for a in node.names:
            self.names[a.asname or a.name] = f"{base}.{a.name}" if base else a.name

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        hidden = "TYPE_CHECKING" in test or "__name__" in test
        self.guarded += hidden
        for n in node.body:
            self.visit(n)
        self.guarded -= hidden
        for n in node.orelse:
            self.visit(n)
        self.visit(node.test)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._decorators(node)
        self._defaults(node)
        self.scopes.append(_Scope(node.name, True, "function"))
        for n in node.body:
            self.visit(n)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.scopes.append(_Scope("", True, "function"))
        self.generic_visit(node)
        self.scopes.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._decorators(node)
        self.scopes.append(_Scope(node.name, False, "class"))
        for n in node.body:
            self.visit(n)
        self.scopes.pop()

    def _decorators(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for d in node.decorator_list:
            name = self.dotted(d.func if isinstance(d, ast.Call) else d)
            if self.at_import and _REGISTERS.search(name):
                key = f"@{ast.unparse(d)} {node.name}"
                what = "something" if node.name == "_" else node.name  # a hunk may not show the name
                self._add("effect", key, d, text=f"registers {what} at import with @{ast.unparse(d)}")

    def _defaults(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        a = node.args
        positional = [*a.posonlyargs, *a.args]
        values: list[ast.expr | None] = [None] * (len(positional) - len(a.defaults)) + list(a.defaults)
        for arg, value in [*zip(positional, values, strict=True), *zip(a.kwonlyargs, a.kw_defaults, strict=True)]:
            if arg.arg not in ("self", "cls"):
                at = value if value is not None else arg
                text = REQUIRED if value is None else ast.unparse(value)
                self._add("default", f"{self._qualified(node.name)}({arg.arg})", at, text)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and self.at_import:
            call = ast.unparse(node.value)
            self._add("effect", call, node, text=f"runs at import: {_short(call)}")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for t in node.targets:
            self._assigned(t, node.value, node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigned(node.target, node.value, node)
        elif self.scopes[-1].kind == "class" and isinstance(node.target, ast.Name):
            self._add("default", self._qualified(node.target.id), node, REQUIRED)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._patched(node.target, node)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for t in node.targets:
            self._patched(t, node)

    def _assigned(self, target: ast.expr, value: ast.expr, node: ast.stmt) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for t in target.elts:
                self._patched(t, node)
            return
        if isinstance(target, ast.Name):
            source = self.imported(value)
            if source:
                self.names[target.id] = source  # another name for something imported
            place = self.scopes[-1].kind
            table = isinstance(value, ast.Dict) and _ENV_TABLE.search(target.id)
            if place == "class" or (place == "module" and (_CONSTANT.match(target.id) or table)):
                self._constant(self._qualified(target.id), value)
        else:
            self._patched(target, node)
        if self.at_import:
            for call in (n for n in ast.walk(value) if isinstance(n, ast.Call)):
                if self.dotted(call.func).startswith(_EFFECTFUL) and not _deferred(value, call):
                    self._add("effect", ast.unparse(call), call, text=f"runs at import: {_short(ast.unparse(call))}")

    def _constant(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.Dict) and all(isinstance(k, ast.Constant) for k in value.keys):
            for k, v in zip(value.keys, value.values, strict=True):
                assert isinstance(k, ast.Constant)
                self._add("default", f"{name}[{k.value!r}]", k, ast.unparse(v))
                if _ENV_TABLE.search(name) and isinstance(k.value, str) and _CONSTANT.match(k.value):
                    self._add("env", k.value, k, text=f"declares {k.value}")
        else:
            self._add("default", name, value, ast.unparse(value))

    def _patched(self, target: ast.expr, node: ast.AST) -> None:
        """An assignment to an attribute or item of something imported."""
        if isinstance(target, ast.Attribute):
            base = self.imported(target.value)
            if base:
                self._patch(f"{base}.{target.attr}", node)
        elif isinstance(target, ast.Subscript):
            base = self.imported(target.value)
            if base in _ENVIRONMENT:
                self._env(target.slice, node, "sets")
            elif base == "sys.modules":
                self._patch(f"sys.modules[{ast.unparse(target.slice)}]", node)
            elif base.endswith(".__dict__"):
                self._patch(f"{base[: -len('.__dict__')]}.{_string(target.slice)}", node)
            elif base:
                self._patch(f"{base}[{_short(ast.unparse(target.slice))}]", node)

    def _patch(self, dotted: str, node: ast.AST) -> None:
        when = "at import" if self.at_import else "when called"
        self._add("patch", dotted, node, text=f"assigns {dotted} {when}")

    # --- expressions -------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        name = self.dotted(node.func)
        first = node.args[0] if node.args else None
        leaf = name.rsplit(".", 1)[-1]
        if name == "setattr" and len(node.args) >= 2:
            base = self.imported(node.args[0])
            if base:
                self._patch(f"{base}.{_string(node.args[1])}", node)
        elif name in ("unittest.mock.patch", "mock.patch") and first is not None and _string(first):
            self._patch(_string(first), node)
        elif name == "torch.library.Library" and _string(first) == "aten":
            self._patch("torch.ops.aten", node)
        elif name.rsplit(".", 1)[0] in _ENVIRONMENT and leaf in ("get", "pop", "setdefault"):
            self._env(first, node, "sets" if leaf == "setdefault" else "reads")
        elif name in ("os.getenv", "os.putenv", "os.unsetenv") or (
            _ENV_TABLE.search(leaf) and _CONSTANT.match(_string(first))
        ):
            self._env(first, node, "sets" if leaf in ("putenv", "unsetenv") else "reads")
        elif leaf == "add_argument":
            self._option(node)
        self.generic_visit(node)

    def _option(self, node: ast.Call) -> None:
        flag = next(
            (s for a in node.args if (s := _string(a)).startswith("-")), _string(node.args[0] if node.args else None)
        )
        for k in node.keywords:
            if k.arg == "default" and flag:
                self._add("default", flag, k.value, ast.unparse(k.value))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Load) and self.imported(node.value) in _ENVIRONMENT:
            self._env(node.slice, node, "reads")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(isinstance(c, ast.expr) and self.imported(c) in _ENVIRONMENT for c in node.comparators):
            self._env(node.left, node, "reads")
        self.generic_visit(node)

    def _env(self, name: ast.expr | None, node: ast.AST, what: str) -> None:
        text = _string(name) or (ast.unparse(name) if name is not None else "?")
        self._add("env", text, node, text=f"{what} {text}")


def collect(nodes: Iterable[ast.stmt], collector: Collector) -> list[Fact]:
    for n in nodes:
        collector.visit(n)
    return collector.facts


def _deferred(value: ast.expr, call: ast.Call) -> bool:
    """Is the call inside a lambda of the value?"""
    return any(isinstance(n, ast.Lambda) and call in ast.walk(n) for n in ast.walk(value))


def _string(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."
