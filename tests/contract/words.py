"""Names of the wheel that our code writes as strings: flags and their values, keys of JSON flags, environment
variables, modules and entry-point groups."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.contract.asking import Asker
from tests.contract.origins import FLAGS, WORDS
from tests.contract.things import Thing, literals, of_type

VARIABLES = {
    "vllm": re.compile(r"VLLM_(?!ASCEND_)[A-Z0-9_]+"),
    "vllm_ascend": re.compile(r"VLLM_ASCEND_[A-Z0-9_]+"),
    "mooncake": re.compile(r"MC_[A-Z0-9_]+"),
    "torch_npu": re.compile(r"ASCEND_(?!BUFFER_POOL|TOOLKIT_HOME)[A-Z0-9_]+"),  # Mooncake's, CANN's
}
_FLAG = re.compile(r"--?[a-z][a-z0-9_-]*")
_WORD = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_OURS_TOO = {"vllm.": "vllm.plugins"}  # an entry-point group is no module: who reads the groups must name it


def check_words(tree: ast.Module, asker: Asker) -> None:
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    variables = VARIABLES.get(asker.package)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documentation:
            continue
        word = node.value
        if variables is not None and variables.fullmatch(word):
            asker.use(node.lineno, "variable", word)
            if asker.ask(node.lineno, "names", word)["is"] is False:
                asker.find(node.lineno, f"{word} is no environment variable of it: what is set here has no effect")
        elif re.fullmatch(rf"{asker.package}(\.\w+)+", word):
            _check_dotted(word, node.lineno, asker)
    for (path, scope), package in WORDS.items():
        if (path, package) == (asker.path, asker.package):
            _check_named(tree, scope, documentation, asker)
    if FLAGS.get(asker.path) == asker.package:
        for function in ast.walk(tree):
            if isinstance(function, ast.Module | ast.FunctionDef):
                _check_flags(function, asker)


def _check_named(tree: ast.Module, scope: str, documentation: set[int], asker: Asker) -> None:
    """Every word in a string of the function or table `scope` occurs in the wheel: in a table, its keys."""
    for part in tree.body:
        if isinstance(part, ast.FunctionDef) and part.name == scope:
            nodes = list(ast.walk(part))
        elif (
            isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == scope and isinstance(part.value, ast.Dict)
        ):
            nodes = [key for key in part.value.keys if key is not None]
        else:
            continue
        for node in nodes:
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documentation:
                continue
            for word in node.value.split(".") if _WORD.fullmatch(node.value) else ():
                asker.use(node.lineno, "name", word)
                if asker.ask(node.lineno, "names", word)["is"] is False:
                    asker.find(node.lineno, f"{word} does not occur in it")


def _check_dotted(word: str, line: int, asker: Asker) -> None:
    asker.use(line, "import", word)
    if asker.ask(line, "symbol", word)["is"] != "missing":
        return
    for prefix, module in _OURS_TOO.items():
        if word.startswith(prefix) and asker.ask(line, "contains", f"{module}:{word}")["is"] is True:
            return
    asker.find(line, f"{word} is neither a module nor an entry-point group")


def _check_flags(function: ast.Module | ast.FunctionDef, asker: Asker) -> None:
    for display in _displays(function):
        for at, node in enumerate(display):
            flag = _flag(node)
            if flag is None:
                continue
            asker.use(node.lineno, "flag", flag)
            row = asker.ask(node.lineno, "flag", flag)
            if row["is"] == "missing":
                meant = row.get("near") or []
                hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
                asker.find(node.lineno, f"it has no flag {flag}{hint}")
            elif at + 1 < len(display):
                _check_value(flag, row.get("text", ""), display[at + 1], function, asker)


def _check_value(flag: str, text: str, value: ast.expr, scope: ast.AST, asker: Asker) -> None:
    if isinstance(value, ast.Constant) and (allowed := literals(text)) is not None and value.value not in allowed:
        asker.find(value.lineno, f"{flag} does not take {value.value!r}, only {', '.join(allowed)}")
    owners = of_type(text, asker.package)
    takes_an_object = bool(owners) and all(thing.kind == "instance" for thing in owners)
    if takes_an_object and isinstance(value, ast.Call) and ast.unparse(value.func) == "json.dumps":
        for display in _dicts(value.args[0], value.lineno, scope):
            for key, content in zip(display.keys, display.values, strict=True):
                if isinstance(key, ast.Constant):
                    _check_key(flag, owners[0], str(key.value), key.lineno, content, asker)


def _check_key(flag: str, owner: Thing, key: str, line: int, content: ast.expr, asker: Asker) -> None:
    row = asker.ask(line, "member", f"{owner.name}:{key}")
    asker.use(line, "config key", f"{owner.name}:{key}")
    if row["is"] not in ("field", "unknown"):
        meant = row.get("near") or []
        hint = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
        asker.find(line, f"{flag} has no key {key!r}{hint}")
        return
    allowed = literals(row.get("text", ""))
    sides = [content.body, content.orelse] if isinstance(content, ast.IfExp) else [content]
    for side in sides:
        if isinstance(side, ast.Constant) and allowed is not None and side.value not in allowed:
            asker.find(side.lineno, f"{key!r} of {flag} does not take {side.value!r}, only {', '.join(allowed)}")


def _dicts(node: ast.expr, line: int, scope: ast.AST) -> Iterator[ast.Dict]:
    """The display itself, or the last one assigned to the name before that line."""
    if isinstance(node, ast.Dict):
        yield node
    elif isinstance(node, ast.Name):
        earlier = [
            part.value
            for part in ast.walk(scope)
            if isinstance(part, ast.Assign)
            and part.lineno <= line
            and isinstance(part.value, ast.Dict)
            and any(isinstance(target, ast.Name) and target.id == node.id for target in part.targets)
        ]
        yield from sorted(earlier, key=lambda found: found.lineno)[-1:]


def _displays(scope: ast.Module | ast.FunctionDef) -> Iterator[list[ast.expr]]:
    """Elements of every list, tuple and set (and keys and values of dicts) in the scope, not of functions within."""
    todo: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            yield node.elts
        elif isinstance(node, ast.Dict):
            yield [part for part in (*node.keys, *node.values) if part is not None]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield [node.value]
        todo += ast.iter_child_nodes(node)


def _flag(node: ast.expr) -> str | None:
    """`--flag`, or the flag of `f"--flag={value}"` and `"--flag=value"`."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return None
    word = first.value.partition("=")[0]
    return word if _FLAG.fullmatch(word) and word != "-m" else None  # -m: Python's
