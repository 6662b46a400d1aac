"""What `npu-smi` prints, as values: which chip has which id, its memory, who uses it, its SoC. Pure; asks nobody.

Layouts differ between driver versions (23.0, 24.1, 25.x, 26.0) and boards: columns are wider or narrower, A3 rows name
a physical id beside the chip's, 26.0 adds the process id inside the container. The parsers go by what cells hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_COLUMNS = re.compile(r"\s{2,}|\t")
_BUS_ID = re.compile(r"[0-9A-Fa-f]{4}:\S{2}:\S{2}\.\S")
_USED_OF_TOTAL = re.compile(r"(\d+)\s*/\s*(\d+)")
_MAPPED = ("NPU ID", "Chip ID", "Chip Logic ID", "Chip Name")
_MIB = 1 << 20


@dataclass(frozen=True)
class NpuChip:
    """A chip as the tool's tables name it: `npu` is the card, `chip` the chip on it. `name`: "Ascend 910B3"."""

    npu: int
    chip: int
    name: str


@dataclass(frozen=True)
class NpuProcess:
    """A process on a chip. `pid` is the host's, also inside a container; the tool cuts `name` short."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class NpuUsage:
    """One chip in `npu-smi info`. `name`: "910B3" on A2, "Ascend910" on A3. Bytes of HBM, or of DDR where none is."""

    name: str
    used_bytes: int
    total_bytes: int
    processes: tuple[NpuProcess, ...] = ()


def parse_mapping(table: str) -> dict[int, NpuChip]:
    """Logic id → chip from `npu-smi info -m`. Rows without a logic id (the Mcu) are no devices.

    An A3 board shows two chips per NPU, each with its own logic id; that id is what the runtime takes.
    """
    rows = [_COLUMNS.split(line.strip()) for line in table.splitlines() if line.strip()]
    if not rows or not set(_MAPPED) <= set(rows[0]):
        return {}
    npu, chip, logic, name = (rows[0].index(title) for title in _MAPPED)
    return {
        int(row[logic]): NpuChip(int(row[npu]), int(row[chip]), row[name])
        for row in rows[1:]
        if len(row) == len(rows[0]) and all(row[column].isdecimal() for column in (npu, chip, logic))
    }


def parse_usage(table: str) -> dict[tuple[int, int], NpuUsage]:
    """(NPU id, chip id) → usage from `npu-smi info`. Two rows a chip, then a table of processes."""
    chips: dict[tuple[int, int], NpuUsage] = {}
    processes: dict[tuple[int, int], list[NpuProcess]] = {}
    above: list[str] = []  # the first of a chip's two rows: NPU id and name
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        ids = cells[0].split()
        if len(cells) >= 4 and len(ids) == 2 and all(text.isdecimal() for text in (*ids, cells[1])):
            process = NpuProcess(int(cells[1]), cells[2], int(cells[3]) * _MIB if cells[3].isdecimal() else None)
            processes.setdefault((int(ids[0]), int(ids[1])), []).append(process)
        elif len(cells) == 3 and _BUS_ID.fullmatch(cells[1]) and ids and ids[0].isdecimal() and len(above) >= 2:
            memories = [(int(used), int(total)) for used, total in _USED_OF_TOTAL.findall(cells[2])]
            used, total = next((pair for pair in reversed(memories) if pair[1]), (0, 0))  # HBM comes last
            if total:
                key = int(above[0]), int(ids[0])
                chips[key] = NpuUsage(" ".join(above[1:]), used * _MIB, total * _MIB)
        above = ids if len(ids) >= 2 and ids[0].isdecimal() else []
    return {
        key: NpuUsage(usage.name, usage.used_bytes, usage.total_bytes, tuple(processes.get(key, ())))
        for key, usage in chips.items()
    }


def soc_of(name: str, board: str = "") -> str:
    """The SoC's name as CANN uses it, e.g. of its platform files; "" where it cannot be told.

    A2: "Ascend" and the chip's name, "Ascend910B3". A3 chips are all called "Ascend910", and the number that tells them
    apart is the NPU's name on the board: "Ascend910_9392".

    Args:
        name: the chip's, from either table.
        board: output of `npu-smi info -t board -i NPU -c CHIP`; needed for A3 only.
    """
    bare = name.replace(" ", "").removeprefix("Ascend")
    if bare != "910":
        return f"Ascend{bare}" if bare[:1].isdecimal() else ""
    npu_name = re.search(r"^\s*NPU Name\s*:\s*(\w+)\s*$", board, re.MULTILINE)
    return f"Ascend910_{npu_name.group(1)}" if npu_name is not None and npu_name.group(1) != "NA" else ""


def parse_platform(text: str) -> dict[str, int]:
    """Cores by kind from a SoC's platform file of CANN, `<arch>-linux/data/platform_config/<soc>.ini`."""
    counts = dict(re.findall(r"^\s*(cube|vector)_core_cnt\s*=\s*(\d+)", text, re.MULTILINE))
    return {kind: int(count) for kind, count in counts.items() if int(count)}
