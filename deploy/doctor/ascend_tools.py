"""What the vendor's tools say of an Ascend machine: topology by `npu-smi`, RoCE ports by `hccn_tool`. Parsers are pure.

Layouts are from the vendor's documentation and recorded outputs (npu-smi 23.0 to 25.5); never run on a card by us.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from deploy.doctor.facts import LinkFacts
from npu_ops.vendor_tool import ask

_ROW = re.compile(r"^\s*NPU(\d+)\s+(.*)$")
_TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"


def read_links(npus: Iterable[int]) -> LinkFacts:
    """Each question has the deadline of `vendor_tool.ask`; a tool that hangs once is not asked again."""
    text, note = ask("npu-smi", "info", "-t", "topo")
    ports: dict[int, str] = {}
    for npu in npus:
        answer, why = _ask_hccn("-i", str(npu), "-link", "-g")
        ports[npu] = link_state(answer) if answer is not None else why
        if answer is None:
            break
    return LinkFacts(parse_topology(text or ""), ports, "" if text else note)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Pairs of the matrix of `npu-smi info -t topo`; its header names the columns."""
    lines = text.splitlines()
    header = next((line for line in lines if len(re.findall(r"\bNPU\d+\b", line)) > 1 and "Affinity" in line), "")
    columns = [int(number) for number in re.findall(r"\bNPU(\d+)\b", header)]
    if not columns:  # one NPU: the header has a single column
        return {}
    found = {}
    for line in lines:
        row = _ROW.match(line)
        if row is None or line == header:
            continue
        cells = row.group(2).split()
        for column, cell in zip(columns, cells, strict=False):
            if cell != "X" and not cell.startswith("NPU"):
                found[int(row.group(1)), column] = cell
    return found


def link_state(text: str) -> str:
    """`link status: UP` as UP."""
    found = re.search(r"link status:\s*(\w+)", text)
    return found.group(1).upper() if found is not None else "unknown"


def _ask_hccn(*arguments: str) -> tuple[str | None, str]:
    answer, why = ask("hccn_tool", *arguments)
    return (answer, why) if "not on PATH" not in why else ask(_TOOL, *arguments)
