"""The stages' own metrics, vLLM's, in one scrape with ours: each series gets its stage's name as label `instance`.

All stages are asked side by side. One that is late, gone, or says what is no metric costs its own series only, and is
counted. Names, types and labels stay; text goes through line by line, since nothing is computed with it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest

from epd_serve.instances import Instance
from proxy.metrics import LabelledCounter
from proxy.registry.table import InstanceTable
from proxy.workers.ask import RefusedError, TooLargeError, ask

ASK_S = 1.0
FRESH_S = 1.0
"""Whoever asks again so soon is told the same: a scrape costs each stage some milliseconds."""

MAX_BYTES, MAX_TOTAL_BYTES = 2 << 20, 8 << 20
"""Of one stage, and of all."""

_SAMPLE = re.compile(
    rb"([a-zA-Z_:][a-zA-Z0-9_:]*)"  # name
    rb"(?:\{(.*)\})?"  # labels
    rb"( (?:[+-]?[0-9][0-9.eE+-]*|[+-]?Inf|NaN)(?: [0-9]+)?)"  # value, and a time
)
_OWN_LABEL = re.compile(rb'(^|,)instance="')


class StageScrape:
    """In one event loop.

    Args:
        table: of the instances that are asked.
        registry: of the deployment; takes the count of what was missed, too.
        key: bearer token of the stages, or "".
    """

    def __init__(self, table: InstanceTable, registry: CollectorRegistry, key: str = "") -> None:
        self._table = table
        self._registry = registry
        self._authorization = f"authorization: Bearer {key}\r\n" if key else ""
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[bytes] | None = None
        self._missed = LabelledCounter(
            "epd_stage_scrapes_missed",
            "Scrapes that lack an instance's own metrics: it was `late` (1 s), `unreachable`, answered with "
            "an `error`, or with something `malformed` or `too_large`.",
            ("instance", "cause"),
            registry=registry,
        )

    async def text(self) -> bytes:
        """Prometheus text of `registry`, and of all stages."""
        if self._asking is None or (self._asking.done() and time.monotonic() >= self._asked_at + FRESH_S):
            self._asked_at = time.monotonic()
            self._asking = asyncio.create_task(self._ask_all(), name="metrics of the stages")
        stages = await asyncio.shield(self._asking)
        return generate_latest(self._registry) + stages

    async def _ask_all(self) -> bytes:
        instances = [view.instance for view in self._table.snapshot()]
        answers = await asyncio.gather(*map(self._ask, instances))
        texts: dict[str, bytes] = {}
        room_bytes = MAX_TOTAL_BYTES
        for instance, answer in zip(instances, answers, strict=True):
            if answer is not None and len(answer) > room_bytes:
                self._missed.labels(instance.id, "too_large").inc()
            elif answer is not None:
                texts[instance.id] = answer
                room_bytes -= len(answer)
        text, malformed = await asyncio.to_thread(merged, texts)  # a hundred stages say megabytes
        for name in malformed:
            self._missed.labels(name, "malformed").inc()
        return text

    async def _ask(self, instance: Instance) -> bytes | None:
        """What it says; None, and a count, where it does not."""
        try:
            return await ask(
                instance.url, "/metrics", headers=self._authorization, within_s=ASK_S, most_bytes=MAX_BYTES
            )
        except TimeoutError:
            cause = "late"
        except RefusedError:
            cause = "error"
        except OSError:
            cause = "unreachable"
        except TooLargeError:
            cause = "too_large"
        self._missed.labels(instance.id, cause).inc()
        return None


def merged(texts: Mapping[str, bytes]) -> tuple[bytes, set[str]]:
    """One exposition of several: each family once, with its help and type from whoever has it first.

    Args:
        texts: of each instance, by its name.

    Returns:
        The text, and the names of instances of which lines were left out because they are no samples.
    """
    heads: dict[bytes, dict[bytes, bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    malformed = set()
    for instance, text in texts.items():
        label = b'instance="%b"' % instance.encode()
        family = b""
        for line in text.split(b"\n"):
            if line.startswith((b"# HELP ", b"# TYPE ")):
                _, kind, family, *_ = line.split(b" ", 3)
                heads.setdefault(family, {}).setdefault(kind, line)
            elif line and not line.startswith(b"#"):
                sample = _SAMPLE.fullmatch(line)
                if sample is None:
                    malformed.add(instance)
                    continue
                name, labels, value = sample.groups()
                rest = b"," + _OWN_LABEL.sub(rb'\1exported_instance="', labels) if labels else b""
                owner = family if family and name.startswith(family) else name
                samples.setdefault(owner, []).append(b"%b{%b%b}%b" % (name, label, rest, value))
    return b"".join(_family(heads.get(name, {}), lines) for name, lines in samples.items()), malformed


def _family(head: Mapping[bytes, bytes], lines: Iterable[bytes]) -> bytes:
    return b"\n".join((*(head[kind] for kind in (b"HELP", b"TYPE") if kind in head), *lines, b""))
