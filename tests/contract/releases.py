"""The table of releases in `epd_serve/engine/compat.py`, held against the wheels: each fact by its evidence there."""

from __future__ import annotations

import ast

from tests.contract.asking import Asker

PATH = "epd_serve/engine/compat.py"
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
EVIDENCE = {
    "keeps_blocks_in_flight": ("contains", f"{_SCHEDULER}.__init__:defer_block_free"),
    "tells_finished_requests": ("contains", f"{_SCHEDULER}:ec_connector.request_finished"),
    "names_items_by_request": (
        "contains",
        "vllm.renderers.base.BaseRenderer._process_mm_uuids:overriding even user-provided ones",
    ),
    "takes_items_as_metadata": (
        "symbol",
        "vllm.distributed.ec_transfer.ec_connector.utils.collect_ec_item_metadata",
    ),
}
"""Fact → the question to the wheel that answers it."""
ASKED_NAMES = frozenset({"request_finished"})
"""Hooks that some release never calls, and that the table is asked about before they are counted on."""


def check_releases(tree: ast.Module, version: str, asker: Asker) -> None:
    """Every fact of the table's row for vLLM `version` is the wheel's; a wheel without a row is a finding."""
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RELEASES"):
            continue
        assert isinstance(node.value, ast.Dict)
        rows = {ast.literal_eval(key): row for key, row in zip(node.value.keys, node.value.values, strict=True) if key}
        row = rows.get(tuple(map(int, version.split(".")[:2])))
        if not isinstance(row, ast.Call):
            asker.find(node.lineno, "RELEASES has no row for it")
            return
        for (fact, (kind, name)), said in zip(EVIDENCE.items(), row.args, strict=True):
            answer = asker.ask(row.lineno, kind, name)["is"]
            found = answer is True if kind == "contains" else answer != "missing"
            with asker.inside("release"):
                asker.probe(row.lineno, f"{fact}: `{name.partition(':')[2] or name}`", found)
            if ast.literal_eval(said) is not found:
                asker.find(row.lineno, f"{fact} is {found} there, and RELEASES says otherwise")
