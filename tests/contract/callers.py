"""Who calls a hook, and with what: the call sites of a method in a wheel, by the name of what it is called on.

A call counts as one of the hook's when its receiver is named like what the engine holds: `self.ec_connector`,
`get_kv_transfer_group()`, `self.scheduler`. The other connectors of the wheel, which hand calls on, do not count; what
a base class does to itself does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.contract.signature import Shape
from tests.contract.source import WheelSource

_LOGITS = "logits_processor."
# By a part of the class's canonical name: what its receivers look like.
_RECEIVERS = (
    ("ec_connector", re.compile(r"(ec_connector|ec_transfer\(\)|\bec)$")),
    ("kv_connector", re.compile(r"(\bconnector|kv_connector|kv_transfer_group\(\)|connector_cls)$")),
    ("sched.", re.compile(r"(\bscheduler)$")),
    (_LOGITS, re.compile(r"(\bprocessor|\blogits?_?proc)$")),
)
_FACTORY = re.compile(r"^(connector_cls|connector_class)$")
_OTHERS = re.compile(r"/(ec_connector|kv_connector/v1)/(?!base\.py|factory\.py)|kv_pool/|/kv_p2p/")
_MAKERS = re.compile(r"/(ec|kv)_connector/factory\.py$")


class Callers:
    """Of one wheel; a method's files are parsed when it is asked for, and remembered."""

    def __init__(self, source: WheelSource) -> None:
        self._source = source
        self._texts: dict[str, str] | None = None
        self._trees: dict[str, ast.Module] = {}

    def of(self, owner: str, method: str) -> list[dict[str, object]]:
        """One row for each shape of call: `shape`, `at` (the first, path:line), `count`.

        `__init__` stands for the factory that makes the object.
        """
        found: dict[str, dict[str, object]] = {}
        for path, call in self._calls(owner, method):
            shape = str(Shape.of(call))
            row = found.setdefault(shape, {"shape": shape, "at": f"{path}:{call.lineno}", "count": 0})
            row["count"] = int(str(row["count"])) + 1
        return list(found.values())

    def _calls(self, owner: str, method: str) -> Iterator[tuple[str, ast.Call]]:
        making = method == "__init__"
        word = "connector_cls(" if making else f".{method}("
        family = next((part for part, _ in _RECEIVERS if part in owner), "")
        base = owner.rpartition(".")[0].replace(".", "/") + ".py"
        for path, text in self._python().items():
            if word not in text or (_OTHERS.search(path) and path != base):
                continue
            for node in ast.walk(self._tree(path, text)):
                if not isinstance(node, ast.Call):
                    continue
                if making:
                    maker = _MAKERS.search(path)
                    if maker and f"{maker[1]}_connector" == family and _FACTORY.match(ast.unparse(node.func)):
                        yield path, node
                elif isinstance(node.func, ast.Attribute) and node.func.attr == method:
                    receiver = ast.unparse(node.func.value)
                    if (receiver == "self" and path == base) or self._is_of(family, receiver, path):
                        yield path, node

    def _is_of(self, family: str, receiver: str, path: str) -> bool:
        pattern = next((pattern for part, pattern in _RECEIVERS if part == family), None)
        if pattern is None:
            return False
        if family == _LOGITS and "/v1/" not in path:  # others process images
            return False
        if receiver == "connector" and "ec_connector" in path:
            return family == "ec_connector"
        return bool(pattern.search(receiver))

    def _python(self) -> dict[str, str]:
        if self._texts is None:
            self._texts = dict(self._source.python_files())
        return self._texts

    def _tree(self, path: str, text: str) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(text)
        return self._trees[path]
