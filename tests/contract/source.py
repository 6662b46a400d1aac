"""The Python sources within a wheel: which module, class, function or value a dotted name means. Nothing is imported.

Owns name resolution, re-exports included; `members.py` reads classes, `facts.py` answers questions of the contract.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEPTH = 12  # re-exports of re-exports


@dataclass
class Module:
    """A module's top level, inside `if`, `try` and `with` too; of several bindings of a name the first."""

    name: str
    path: str
    tree: ast.Module
    is_package: bool
    bindings: dict[str, ast.AST | str] = field(default_factory=dict)  # a definition, or what was imported
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._read(self.tree.body)

    def names(self) -> list[str]:
        return sorted(self.bindings)

    def _read(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.bindings.setdefault(node.name, node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.bindings.setdefault(target.id, node)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.bindings.setdefault(node.target.id, node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for name, dotted in imported(node, self.name, self.is_package):
                    if name == "*":
                        self.stars.append(dotted)
                    else:
                        self.bindings.setdefault(name, dotted)
            for block in ("body", "orelse", "finalbody"):
                if isinstance(node, ast.If | ast.Try | ast.With):
                    self._read(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                self._read(handler.body)


@dataclass(frozen=True)
class Found:
    """What a dotted name means. `node`: the definition; None for a module (`module` itself)."""

    name: str  # canonical: where it is defined
    module: Module
    node: ast.AST | None = None


class WheelSource:
    """The files of one wheel."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self.files = frozenset(self._archive.namelist())
        self._modules: dict[str, Module | None] = {}
        self._data: dict[str, bytes] = {}

    def python_files(self) -> Iterator[tuple[str, str]]:
        """Path and text of every Python file."""
        for name in sorted(self.files):
            if name.endswith(".py"):
                yield name, self.text(name)

    def text(self, name: str) -> str:
        return self.data(name).decode("utf-8", errors="replace")

    def data(self, name: str) -> bytes:
        if name not in self._data:
            self._data[name] = self._archive.read(name)
        return self._data[name]

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            stem = name.replace(".", "/")
            places = ((f"{stem}/__init__.py", True), (f"{stem}.py", False))
            there = next(((path, package) for path, package in places if path in self.files), None)
            self._modules[name] = there and Module(name, there[0], ast.parse(self.text(there[0])), there[1])
        return self._modules[name]

    def native(self, name: str) -> str | None:
        """The file of an extension module: it has no source, only names among its bytes."""
        stem = name.replace(".", "/") + "."
        return next((path for path in sorted(self.files) if path.startswith(stem) and path.endswith(".so")), None)

    def find(self, dotted: str, depth: int = 0) -> Found | None:
        """What the name means when Python evaluates it, re-exports followed."""
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            module = self.module(".".join(parts[:cut]))
            if module is not None:
                return self._inside(module, parts[cut:], depth)
        return None

    def _inside(self, module: Module, rest: list[str], depth: int) -> Found | None:
        if not rest or depth > _DEPTH:
            return Found(module.name, module) if not rest else None
        bound = module.bindings.get(rest[0])
        if isinstance(bound, str):
            return self.find(".".join([bound, *rest[1:]]), depth + 1)
        if bound is None:
            candidates = (self.find(".".join([star, *rest]), depth + 1) for star in module.stars)
            return next((found for found in candidates if found is not None), None)
        for name in rest[1:]:
            inner = [node for node in getattr(bound, "body", []) if getattr(node, "name", None) == name]
            if not isinstance(bound, ast.ClassDef) or not inner:
                return None
            bound = inner[0]
        return Found(".".join([module.name, *rest]), module, bound)


def imported(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> Iterator[tuple[str, str]]:
    """(name, what it stands for) of an import statement in `module`."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        return
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        base = ".".join([*parts, *([node.module] if node.module else [])])
    for alias in node.names:
        yield (alias.asname or alias.name, base if alias.name == "*" else f"{base}.{alias.name}")
