"""Our code against all wheels: what does not fit, each with file and line. Offline; the wheels' answers are given."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from tests.contract.asking import Asker
from tests.contract.facts import Facts
from tests.contract.findings import Examined, Finding
from tests.contract.hooks import check_other_callers
from tests.contract.known import KNOWN
from tests.contract.origins import FLAGS, ORIGINS, STAND_INS, WORDS
from tests.contract.reading import read
from tests.contract.releases import ASKED_NAMES, check_releases
from tests.contract.releases import PATH as RELEASES_PATH
from tests.contract.wheels import Wheel
from tests.contract.words import VARIABLES

FOLDERS = ("bench", "deploy", "proxy", "epd_serve", "store", "npu_ops")
ROOT = Path(__file__).parents[2]


def sources(root: Path = ROOT) -> dict[str, str]:
    """Path (from the root) and text of every file of the product."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}


def probed_names(files: Mapping[str, str]) -> frozenset[str]:
    """Names that our code asks for at run time, by `hasattr` or in the table of releases."""
    found = set(ASKED_NAMES)
    for text in files.values():
        if "hasattr(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr":
                found |= {str(word.value) for word in node.args[1:] if isinstance(word, ast.Constant)}
    return frozenset(found)


def mentions(path: str, text: str, package: str) -> bool:
    """Whether a file can use anything of the package: by its text, or by the table of origins."""
    if package in text or (package in VARIABLES and VARIABLES[package].search(text)):
        return True
    rows = [row for row in (*ORIGINS, *STAND_INS) if row.path == path]
    worded = any((path, package) == (file, named) for (file, _), named in WORDS.items())
    return worded or FLAGS.get(path) == package or any(package in row.type for row in rows)


def examine(files: Mapping[str, str], facts: Mapping[Wheel, Facts]) -> list[Examined]:
    """Every file against every wheel; a wheel that calls hooks of another one comes after it."""
    probed = probed_names(files)
    trees: dict[str, ast.Module] = {}
    found: list[Examined] = []
    for wheel, answers in facts.items():
        whole = Examined(wheel.name)
        for path, text in files.items():
            if not mentions(path, text, wheel.package):
                continue
            tree = trees.setdefault(path, ast.parse(text))
            part = read(path, tree, answers, wheel.package, wheel.name, probed)
            if (path, wheel.package) == (RELEASES_PATH, "vllm"):
                check_releases(tree, wheel.version, Asker(answers, wheel.package, path, part))
            whole.findings += part.findings
            whole.uses += part.uses
            whole.probes += part.probes
            whole.hooks += part.hooks
            whole.followed |= part.followed
            whole.unproved += part.unproved
        if wheel.calls_hooks_of:
            hooks = [hook for one in found if one.wheel == wheel.calls_hooks_of for hook in one.hooks]
            check_other_callers(hooks, trees, Asker(answers, wheel.package, "", whole))
        found.append(whole)
    return found


def unexpected(results: list[Examined]) -> list[Finding]:
    """What does not fit and is not known (`known.py`), and what is known and is no longer so."""
    findings = sorted({finding for result in results for finding in result.findings})
    gone = "is no longer found; remove it"
    stale = [
        Finding("tests/contract/known.py", 1, known.wheel, f"{known.path}: {known.about!r} {gone}")
        for known in KNOWN
        if known.wheel in {result.wheel for result in results} and not any(known.covers(one) for one in findings)
    ]
    return [one for one in findings if not any(known.covers(one) for known in KNOWN)] + stale
