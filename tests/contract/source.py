"""The Python sources within a wheel, as griffe reads them: what a dotted name means. Nothing is unpacked or imported.

Owns finding modules and following re-exports; `members.py` reads classes, `facts.py` answers questions of the contract.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path

import griffe

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEPTH = 12  # re-exports of re-exports


class _FieldsOfEveryMethod(griffe.Extension):
    """Adds `self.x = …` in any method to the class's members; griffe itself looks into `__init__` only."""

    def on_function_instance(self, *, node: ast.AST | griffe.ObjectNode, func: griffe.Function, **_: object) -> None:
        owner = func.parent
        if not isinstance(owner, griffe.Class) or isinstance(node, griffe.ObjectNode) or func.name == "__init__":
            return
        for name, annotation, value in _fields_set_in(node):
            if name not in owner.members:
                field = griffe.Attribute(name, parent=owner, value=griffe.safe_get_expression(value, parent=func))
                field.annotation = griffe.safe_get_annotation(annotation, parent=func)
                owner.set_member(name, field)


def _fields_set_in(method: ast.AST) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """(name, annotation, value) of each `self.name = …`; no value where several names share it."""
    for node in ast.walk(method):
        match node:
            case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                yield name, node.annotation, node.value
            case ast.Assign():
                for target in node.targets:
                    for place in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if isinstance(place, ast.Attribute) and ast.unparse(place.value) == "self":
                            yield place.attr, None, node.value if place is target else None


class WheelSource:
    """The files of one wheel."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self.files = frozenset(self._archive.namelist())
        self._modules: dict[str, griffe.Module | None] = {}
        self._data: dict[str, bytes] = {}
        self._extensions = griffe.load_extensions(_FieldsOfEveryMethod())

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

    def module(self, name: str) -> griffe.Module | None:
        """Parsed when it is first asked for."""
        if name not in self._modules:
            stem = name.replace(".", "/")
            path = next((path for path in (f"{stem}/__init__.py", f"{stem}.py") if path in self.files), None)
            self._modules[name] = self._visited(name, path) if path is not None else None
        return self._modules[name]

    def native(self, name: str) -> str | None:
        """The file of an extension module: it has no source, only names among its bytes."""
        stem = name.replace(".", "/") + "."
        return next((path for path in sorted(self.files) if path.startswith(stem) and path.endswith(".so")), None)

    def find(self, dotted: str, depth: int = 0) -> griffe.Object | None:
        """What the name means when Python evaluates it, re-exports followed."""
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            module = self.module(".".join(parts[:cut]))
            if module is not None:
                return self._inside(module, parts[cut:], depth)
        return None

    def find_class(self, dotted: str) -> griffe.Class | None:
        """As `find`; None for what is no class."""
        found = self.find(dotted)
        return found if isinstance(found, griffe.Class) else None

    def _visited(self, name: str, path: str) -> griffe.Module:
        owner, _, last = name.rpartition(".")
        return griffe.visit(last, Path(path), self.text(path), parent=self._package(owner), extensions=self._extensions)

    def _package(self, name: str) -> griffe.Module | None:
        """What relative imports are relative to; a folder without `__init__.py` counts, too."""
        if not name:
            return None
        owner, _, last = name.rpartition(".")
        return self.module(name) or griffe.Module(last, filepath=Path(last, "__init__.py"), parent=self._package(owner))

    def _inside(self, owner: griffe.Object, rest: list[str], depth: int) -> griffe.Object | None:
        if not rest or depth > _DEPTH:
            return None if rest else owner
        member = owner.members.get(rest[0])
        if isinstance(member, griffe.Alias):
            return self.find(".".join([member.target_path, *rest[1:]]), depth + 1)
        if member is not None:
            return self._inside(member, rest[1:], depth)
        stars = [one.target_path for one in owner.members.values() if isinstance(one, griffe.Alias) and one.wildcard]
        candidates = (self.find(".".join([star, *rest]), depth + 1) for star in stars)
        return next((found for found in candidates if found is not None), None)


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """(name, what it stands for) of an absolute import statement."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        return
    for alias in node.names:
        yield alias.asname or alias.name, f"{node.module}.{alias.name}"
