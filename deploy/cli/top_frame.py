"""One frame of `epd-serve top`: a deployment as lines of text, as wide and as high as the terminal. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.text import Text

from deploy.cli.changing import change_text, planned_lines, step_text

SORTS = ("instance", "pending", "running", "KV")
MOST_ACTIONS, BAR_CELLS = 5, 4
KEYS = "q quit  s sort  f role  j/k scroll"
COLUMNS = {
    "instance": "<9.9", "role": "<4.4", "device": ">6.6", "phase": "<9.9", "pending": ">7.7", "run": ">4.4",
    "wait": ">4.4", "KV": ">9.9", "arena": ">9.9", "tokens/s": ">8.8",
}  # fmt: skip
"""Head and format; with the gaps between them 79 cells."""

NODE_CELLS, WIDE = 14, 96
PHASES = {"up": "green", "starting": "yellow", "draining": "magenta", "stopping": "magenta", "down": "bold red"}
EIGHTHS = " ▏▎▍▌▋▊▉█"

Json = Mapping[str, Any]


class Seen(NamedTuple):
    """What was asked: `/deployment`, the rows of `/instances` by id, and `/rates`; `at`: seconds since the epoch."""

    deployment: Json
    table: Mapping[str, Json]
    rates: Json
    at: float


@dataclass
class View:
    """What the keys have chosen: `role` "" for all, `first` instance that is shown."""

    sort: str = SORTS[0]
    role: str = ""
    first: int = 0

    def press(self, key: str, roles: Sequence[str]) -> bool:
        """Returns whether it is to end."""
        choices = ["", *roles]
        if key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key == "f":
            self.role = choices[(choices.index(self.role) + 1) % len(choices)] if self.role in choices else ""
        elif key in ("j", "k"):
            self.first = max(0, self.first + (1 if key == "j" else -1))
        return key == "q"


def roles_of(seen: Seen) -> list[str]:
    return sorted({one["role"] for one in seen.deployment["instances"]})


def frame(seen: Seen, view: View, width: int, height: int | None) -> Text:
    """Args:
    height: lines that there are room for, or None for as many as there are.
    """
    head, actions = [*_head(seen, width)], [*_actions(seen.deployment)]
    rows = _sorted(seen, view)
    if height is not None:
        actions = actions[: max(0, min(MOST_ACTIONS, height - len(head) - 6))]
        room = max(1, height - len(head) - 3 - (len(actions) + 1 if actions else 0))
        view.first = min(view.first, max(0, len(rows) - room))
        shown = rows[view.first : view.first + room]
    else:
        shown = rows
    wide = width >= WIDE
    lines = [*head, Text(), _columns(wide), *(_row(one, seen.table.get(one["id"]), wide) for one in shown)]
    if actions:
        lines += [Text("actions", style="bold"), *actions]
    if height is not None:
        left = f"  {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
        chosen = f"sorted by {view.sort}{f', {view.role} only' if view.role else ''}{left}"
        lines.append(Text(f"{KEYS}   {chosen}", style="dim"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def _head(seen: Seen, width: int) -> Iterable[Text]:
    deployment, rates = seen.deployment, seen.rates
    clock = time.strftime("%H:%M:%S", time.localtime(seen.at))
    state = {"steady": "green", "degraded": "bold red"}.get(deployment["state"], "yellow")
    title = Text.assemble(
        (f"epd-serve {deployment['launch']}  ", "bold"), f"{deployment['layout']}  ", (deployment["state"], state)
    )
    if deployment["paused_s"]:
        title.append(f"  new requests wait, {deployment['paused_s']:.0f} s more", "yellow")
    yield title + Text(clock.rjust(max(0, width - title.cell_len)), "dim")
    if deployment["trouble"]:
        yield Text(f"not reached: {deployment['trouble']}", "red")
    yield Text(
        f"{rates['requests_per_s']:.1f} requests/s  {rates['tokens_per_s']:.0f} tokens/s  "
        f"running {rates['running']}, {rates['waiting']} of them waiting"
    )
    for line, one in rates["lines"].items():
        if one["waiting"]:
            work = f"in line ({line}) {one['waiting']} with {one['work_s']:.2f} s of work"
            yield Text(f"{work}, {one['late']} late, {one['over_share']} over their share")
    yield Text(f"TTFT {_percentiles(rates['ttft_ms'])}   TPOT {_percentiles(rates['tpot_ms'])}   (last minute)")
    if "serving" in rates:
        yield Text(f"of {rates['answered']} front doors: {rates['serving']} serve, the others are late", "yellow")
    slo = rates["slo"]
    if slo["judged"]:
        shares = f"{slo['judge']} {slo['attainment']:.1%}, mean {slo['mean']['attainment']:.1%}"
        yield Text(f"within TTFT {1000 * slo['ttft_s']:g} ms, TPOT {1000 * slo['tpot_s']:g} ms: {shares}")
    if rates["planned"]:
        yield from (Text(line, "yellow" if apart else "") for line, apart in planned_lines(rates["planned"]))
    refused, codes = rates["refused"], rates["codes"]
    others = {code: count for code, count in codes.items() if code not in refused}
    said = {"refused": _counted(refused), "errors": _counted(others), "tried again": rates["retried"]}
    trouble = [f"{what} {count}" for what, count in said.items() if count]
    yield Text("   ".join(trouble) or "nothing refused, no errors", "yellow" if trouble else "dim")


def _columns(wide: bool) -> Text:
    heads = [format(name, form) for name, form in COLUMNS.items()]
    return Text(" ".join([*heads, *(["node".ljust(NODE_CELLS), "why"] if wide else ())]), style="bold reverse")


def _row(one: Json, row: Json | None, wide: bool) -> Text:
    row = row or {}
    stage, store = row.get("stage") or {}, row.get("store") or {}
    phase = "open" if one["phase"] == "up" and row.get("circuit", "closed") != "closed" else one["phase"]
    speed = stage.get("item_tokens_per_s" if one["role"] == "E" else "prompt_tokens_per_s") or 0.0
    if one["role"] == "D":
        speed = stage.get("decode_tokens_per_s", 0.0) * stage.get("running", 0)
    cells = [
        one["id"],
        "P|D" if one["both"] else one["role"],
        ",".join(map(str, one["devices"])),
        phase,
        _pending(row.get("pending_s", 0.0), known=bool(row)),
        str(stage.get("running", one["in_flight"])),
        str(stage.get("waiting", "-")),
        _gauge(stage.get("kv_used") if stage.get("kv_tokens") else None),
        _gauge(store["used_bytes"] / store["capacity_bytes"] if store.get("capacity_bytes") else None),
        f"{speed:.0f}" if speed else "-",
    ]
    line = Text()
    for (head, form), cell in zip(COLUMNS.items(), cells, strict=True):
        style = PHASES.get(phase, "bold red") if head == "phase" else ""
        line.append(format(cell, form), style).append(" ")
    if wide:
        line.append(f"{one['node'][:NODE_CELLS]:{NODE_CELLS}} {one['reason'] or row.get('reason', '')}")
    return line


def _sorted(seen: Seen, view: View) -> list[Json]:
    def busy(one: Json) -> float:
        row = seen.table.get(one["id"]) or {}
        stage, pending_s = row.get("stage") or {}, row.get("pending_s", 0.0)
        load: dict[str, float] = {
            "pending": float("inf") if pending_s is None else pending_s,
            "running": stage.get("running", 0) + stage.get("waiting", 0),
            "KV": stage.get("kv_used", 0.0),
        }
        return load[view.sort]

    rows = [one for one in seen.deployment["instances"] if view.role in ("", one["role"])]
    return rows if view.sort == SORTS[0] else sorted(rows, key=busy, reverse=True)


def _actions(deployment: Json) -> Iterable[Text]:
    """What the controller does and has done, the newest first."""
    present = deployment["change"]
    for change in [*([present] if present is not None else ()), *reversed(deployment["past"])]:
        style = "" if change is present else "dim"
        how = f"{change['seconds']:.0f} s so far" if change is present else change_text(change)
        yield Text(f"{change['what']} {change['from']} → {change['to']}: {how}", style or "bold")
        for step in reversed(change["steps"]):
            yield Text(f"  at {step['began_s']:.1f} s  {step_text(step)}", style)


def _percentiles(ms: Json) -> str:
    return "  ".join(f"{name} {_milliseconds(value)}" for name, value in ms.items())


def _milliseconds(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms / 1000:.1f} s" if ms >= 10_000 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {code}" for code, count in sorted(counts.items(), key=lambda pair: -pair[1]))


def _pending(pending_s: float | None, *, known: bool) -> str:
    """Until its answers end, where nobody knows for how long."""
    return "-" if not known else "∞" if pending_s is None else f"{pending_s:.2f} s"


def _gauge(fraction: float | None) -> str:
    if fraction is None:
        return "-"
    eighths = round(min(1.0, max(0.0, fraction)) * BAR_CELLS * 8)
    full, part = divmod(eighths, 8)
    drawn = ("█" * full + (EIGHTHS[part] if part else "")).ljust(BAR_CELLS)
    return f"{drawn} {100 * fraction:3.0f}%"
