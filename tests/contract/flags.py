"""The command-line flags of a package: those of vLLM's OpenAI server, and of the `mooncake_master` program.

vLLM's are read where it declares them, with the config field that each stands for, so that values and the keys of JSON
values can be checked. `mooncake_master` is a binary: a flag is known when its name is among its bytes.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.contract.members import Classes
from tests.contract.source import WheelSource

_ENGINE = "vllm.engine.arg_utils"
_SERVERS = ("vllm.entrypoints.openai.cli_args", "vllm.entrypoints.launchers.cli_args")  # it moved in 0.32
_SERVER_FIELDS = "FrontendArgs"  # a flag for each field
_MASTER = "mooncake/mooncake_master"
_LOGGING = {"--logtostderr"}  # glog's own, in a library beside the program


@dataclass(frozen=True)
class Flag:
    """`type`: of the config field behind it, as text; "" where there is none."""

    name: str
    type: str = ""


class Flags:
    """Of one wheel."""

    def __init__(self, source: WheelSource, classes: Classes, package: str) -> None:
        self._source, self._classes, self._package = source, classes, package
        self._known: dict[str, Flag] | None = None

    def row(self, name: str) -> dict[str, Any]:
        if self._package == "mooncake":
            return self._of_program(name)
        if self._known is None:
            self._known = {flag.name: flag for flag in self._declared()}
        flag = self._known.get(name)
        if flag is None and name.startswith("--no-"):
            flag = self._known.get("--" + name[5:])
            flag = flag if flag is not None and "bool" in flag.type else None
        if flag is None:
            return {"is": "missing", "near": difflib.get_close_matches(name, sorted(self._known), n=2, cutoff=0.7)}
        return {"is": "flag"} | ({"text": flag.type} if flag.type else {})

    def _of_program(self, name: str) -> dict[str, Any]:
        if _MASTER not in self._source.files:
            return {"is": "missing"}
        word = name.removeprefix("--").encode() + b"\0"
        files = [_MASTER, *sorted(file for file in self._source.files if "libglog" in file and name in _LOGGING)]
        return {"is": "flag" if any(word in self._source.data(file) for file in files) else "missing"}

    def _declared(self) -> Iterator[Flag]:
        for module in (*_SERVERS, _ENGINE):
            found = self._source.module(module)
            if found is not None:
                yield from self._of_module(ast.parse(self._source.text(str(found.filepath))), module)
        for module in _SERVERS:
            fields = self._source.find_class(f"{module}.{_SERVER_FIELDS}")
            if fields is not None:
                for member in self._classes.facts(fields).members.values():
                    if member.kind == "field":
                        yield Flag("--" + member.name.replace("_", "-"), member.text)

    def _of_module(self, tree: ast.Module, module: str) -> Iterator[Flag]:
        groups = {  # `cache_kwargs = get_kwargs(CacheConfig)`: variable → class
            node.targets[0].id: ast.unparse(node.value.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "get_kwargs"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                for word in words:
                    if isinstance(word, str) and word.startswith("-"):
                        yield Flag(word, self._type(node, groups, module))

    def _type(self, call: ast.Call, groups: dict[str, str], module: str) -> str:
        for keyword in call.keywords:
            for node in ast.walk(keyword.value):
                if (
                    isinstance(node, ast.Subscript)
                    and isinstance(node.value, ast.Name)
                    and node.value.id in groups
                    and isinstance(node.slice, ast.Constant)
                ):
                    owner = self._source.find_class(f"{module}.{groups[node.value.id]}")
                    if owner is not None:
                        member = self._classes.facts(owner).members.get(str(node.slice.value))
                        return member.text if member is not None else ""
        return ""
