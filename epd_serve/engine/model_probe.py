"""Asks the installed vLLM which architectures cannot encode apart, by reading the source of its model classes.

`python -m epd_serve.engine.model_probe [ARCHITECTURE…]` prints them as JSON. Nothing is imported from vLLM: its hundred
model files are parsed, which takes seconds. Owns the rules; `epd_serve.model_support` owns the table that the launcher
reads, and a test holds the two equal, so that a new vLLM shows what it changed.

Rules, over the methods that `embed_multimodal` reaches within a class and its bases:
- one of them touches `language_model` or `get_language_model()`: the encoder needs weights that E does not load.
  Branches under `is_multimodal_pruning_enabled` do not count: that is an option, off by default;
- the class's module uses vLLM's own CrossAttention: an encoder-decoder model.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from epd_serve.model_support import ANY, CROSS_ATTENTION, READS_LANGUAGE_MODEL

_LANGUAGE_MODEL = {"language_model", "get_language_model"}
_OPTION = "is_multimodal_pruning_enabled"
_MODALITIES = ("image", "video", "audio")
_Methods = dict[str, ast.FunctionDef]


@dataclass(frozen=True)
class _Source:
    """vLLM's model classes by name, the modules that use its CrossAttention, the registry of multimodal models."""

    classes: dict[str, ast.ClassDef]
    cross_attention: frozenset[str]
    registry: dict[str, tuple[str, str]]  # architecture → module, class


def probe() -> dict[str, dict[str, str]]:
    """Architecture → modality (or `ANY`) → reason, for those that cannot encode apart."""
    source = _read()
    found = {}
    for architecture, (module, name) in sorted(source.registry.items()):
        methods = _methods(source.classes, name)
        if "embed_multimodal" not in methods:
            continue
        refused = {ANY: CROSS_ATTENTION} if module in source.cross_attention else _refused(methods)
        if refused:
            found[architecture] = refused
    return found


def architectures() -> frozenset[str]:
    """The multimodal ones that the installed vLLM has."""
    return frozenset(_read().registry)


def is_hybrid(architecture: str) -> bool:
    """Whether some of its layers keep a state instead of KV: its class, or a base of it, is vLLM's `IsHybrid`."""
    source = _read()
    todo = [source.registry[architecture][1]]
    while todo:
        name = todo.pop()
        if name == "IsHybrid":
            return True
        if name in source.classes:
            todo += [base.id for base in source.classes[name].bases if isinstance(base, ast.Name)]
    return False


def sized_by_metadata(architecture: str) -> bool:
    """Whether an item of it can come as metadata alone: the parser of its processor declares `embedding_fields`."""
    source = _read()
    registered = source.classes[source.registry[architecture][1]].decorator_list
    info = next(ast.unparse(word.value) for one in registered for word in _keywords(one) if word.arg == "info")
    made = _methods(source.classes, info).get("get_data_parser")
    parsers = {node.id for node in ast.walk(made) if isinstance(node, ast.Name)} if made is not None else set()
    return any(_assigns(source.classes, parser, "embedding_fields") for parser in parsers)


def _keywords(decorator: ast.expr) -> list[ast.keyword]:
    return decorator.keywords if isinstance(decorator, ast.Call) else []


def _assigns(classes: dict[str, ast.ClassDef], name: str, attribute: str) -> bool:
    """Whether a class, or one of its bases among these, sets this attribute."""
    if name not in classes:
        return False
    targets = [target for node in classes[name].body if isinstance(node, ast.Assign) for target in node.targets]
    own = any(isinstance(target, ast.Name) and target.id == attribute for target in targets)
    return own or any(
        _assigns(classes, base.id, attribute) for base in classes[name].bases if isinstance(base, ast.Name)
    )


def _refused(methods: _Methods) -> dict[str, str]:
    if not _reaches(methods, "embed_multimodal"):
        return {}
    direct = _attributes(methods["embed_multimodal"]) & set(methods)
    guilty = {name for name in direct if _reaches(methods, name)}
    named = {word for name in guilty for word in _MODALITIES if word in name}
    served = {word for name in direct - guilty for word in _MODALITIES if word in name and "parse" not in name}
    if not guilty or not named or not served - named:
        return {ANY: READS_LANGUAGE_MODEL}
    return dict.fromkeys(sorted(named), READS_LANGUAGE_MODEL)


def _reaches(methods: _Methods, start: str) -> bool:
    """Whether `start` or what it calls on self touches the language model."""
    todo, seen = [start], set[str]()
    while todo:
        name = todo.pop()
        if name in seen or name not in methods or name in _LANGUAGE_MODEL:
            continue
        seen.add(name)
        attributes = _attributes(methods[name])
        if attributes & _LANGUAGE_MODEL:
            return True
        todo += attributes
    return False


def _attributes(method: ast.FunctionDef) -> set[str]:
    """Names X of every `self.X` in the method."""
    return {
        node.attr
        for node in _walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Like ast.walk, past what runs only when the pruning option is on."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _OPTION in ast.unparse(child.test):
            for other in child.orelse:
                yield from _walk(other)
        else:
            yield from _walk(child)


def _methods(classes: dict[str, ast.ClassDef], name: str) -> _Methods:
    """Methods of a class, inherited ones included, nearest first."""
    methods: _Methods = {}
    if name in classes:
        methods = {node.name: node for node in classes[name].body if isinstance(node, ast.FunctionDef)}
        for base in classes[name].bases:
            if isinstance(base, ast.Name) and base.id != "SupportsMultiModal":
                methods = _methods(classes, base.id) | methods
    return methods


@functools.cache
def _read() -> _Source:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm is not installed")
    folder = Path(spec.origin).parent / "model_executor" / "models"
    classes: dict[str, ast.ClassDef] = {}
    cross = set()
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        names = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        if names & {"CrossAttention", "WhisperCrossAttention"}:
            cross.add(path.stem)
    return _Source(classes, frozenset(cross), _registry(folder / "registry.py"))


def _registry(path: Path) -> dict[str, tuple[str, str]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MULTIMODAL_MODELS":
            entries: dict[str, tuple[str, str]] = ast.literal_eval(node.value)
            return entries
    raise LookupError(f"{path} has no table of multimodal models: this vLLM is laid out differently")


if __name__ == "__main__":
    asked = sys.argv[1:]
    print(json.dumps({name: why for name, why in probe().items() if not asked or name in asked}, indent=2))
