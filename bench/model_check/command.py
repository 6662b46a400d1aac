"""`epd-bench model-check`: does a model answer through EPD-Serve as through plain vLLM? At most five minutes, one file.

For who has weights that nobody has tested here. Text, images, a clip and a recording, by what the model takes, are
asked of both, greedy, and compared token for token; then new images, the same again and text, for the time to first
token; then what memory both hold. Servers that do not fit beside each other are asked one after the other: first plain
vLLM alone, `epd-bench model-check URL --json plain.json`, then ours with `plain.json` in the place of its URL.

Exit code 1 where an answer is different or missing, also for want of time. A difference at a token whose two best plain
vLLM holds nearly equal counts as none: rounding decides those.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench import record
from bench.clients.flags import header_of
from bench.clients.sender import ask
from bench.clients.target import CHAT, Target
from bench.micro.rows import figure_table, table_of
from bench.model_check import memory
from bench.model_check.items import QUESTIONS, Question, unmade
from bench.model_check.verdict import REFUSED, Answer, Verdict, judge, read_answer
from epd_serve.errors import ConfigError, StageError

LIMIT_S, TOKENS, REQUESTS = 300.0, 32, 8
FIRST_SEED = 1000
"""Of the images whose time to first token is taken: none that was asked before."""
KINDS = ("new image", "the same again", "text")
Row = dict[str, Any]


@dataclass(frozen=True)
class Server:
    """One that is asked. `name`: `ours` or `plain`. `end_s`: when the time is over (time.monotonic)."""

    name: str
    target: Target
    model: str
    end_s: float

    @property
    def left_s(self) -> float:
        return max(1.0, self.end_s - time.monotonic())

    def answer(self, question: Question, tokens: int) -> Answer:
        """Never raises: what goes wrong is an answer, too."""
        body = {**question.body(self.model, tokens), "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        try:
            answer = httpx.post(
                f"{self.target.endpoint}{CHAT}",
                json=body,
                headers=self.target.headers,
                timeout=self.left_s,
                trust_env=False,
            )
            return read_answer(answer.status_code, answer.json())
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            return Answer(0, repr(error)[:500])

    def ttft_ms(self, question: Question, tokens: int) -> float | None:
        """Of one streamed answer; None where it is not whole."""
        body = {**question.body(self.model, tokens), "stream": True}
        try:
            seconds = ask(self.target, body, self.left_s).ttft_s
        except StageError:
            return None
        return None if seconds is None else round(seconds * 1e3, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of EPD-Serve (or of plain vLLM alone, for a file)")
    parser.add_argument("plain", metavar="PLAIN", nargs="?", help="URL of plain vLLM, or the file of a run on it alone")
    parser.add_argument("--model", help="as both call it (default: what each serves)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of an answer, at most (default {TOKENS})")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"timed, of each kind (default {REQUESTS})")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help=f"of all (default {LIMIT_S:g} s)")
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="with every request")
    record.add_arguments(parser, quick="three timed requests of each kind")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Ask, compare, print, write. Returns 1 where something is to be explained."""
    if arguments.quick:
        arguments.requests = min(3, arguments.requests)
    end_s = time.monotonic() + arguments.limit
    headers = dict(map(header_of, arguments.header))
    servers, past = [_server("ours", arguments.url, arguments.model, headers, end_s)], {}
    if arguments.plain and "://" in arguments.plain:
        servers.append(_server("plain", arguments.plain, arguments.model, headers, end_s))
    elif arguments.plain:
        past = _rows_of(Path(arguments.plain))
    env = {**record.environment(argv, asked=arguments), "models": {one.name: one.model for one in servers}}
    rows: list[Row] = []
    with record.kept(arguments.json, env, rows):
        rows += _answers(servers, past, arguments.tokens, alone=not arguments.plain)
        rows += _times(servers, past, arguments)
        env["memory"] = {one.name: memory.of(one.target) for one in servers}
        if past:
            env["memory"]["plain"] = past["memory"]
    figures = _figures(rows)
    print(_report(rows, env["memory"], figures), flush=True)
    record.write(arguments.json, figures, env, rows)
    return 0 if all(Verdict(row["verdict"]).good for row in rows if "verdict" in row) else 1


def _server(name: str, url: str, model: str | None, headers: Mapping[str, str], end_s: float) -> Server:
    target = Target(url, headers)
    served = target.served()
    if not (model or served):
        raise ConfigError(f"{target.endpoint} serves no model: say --model", param="--model")
    return Server(name, target, model or served[0][0], end_s)


def _rows_of(path: Path) -> dict[str, Any]:
    """Plain vLLM's answers, times and memory of a run on it alone. Raises ConfigError where it is none."""
    found = record.read_json(path, record.Record)
    answers = {row["question"]: Answer(**row["answers"]["ours"]) for row in found.rows if "question" in row}
    if not answers or any("verdict" in row for row in found.rows):
        raise ConfigError(f"{path} is no result of `epd-bench model-check` on plain vLLM alone", param="PLAIN")
    times = {row["kind"]: row["ttft_ms"]["ours"] for row in found.rows if "kind" in row}
    return {"answers": answers, "times": times, "memory": found.env["memory"]["ours"]}


def _answers(servers: Sequence[Server], past: Mapping[str, Any], tokens: int, alone: bool) -> Iterator[Row]:
    """A row per question. What a modality alone is refused is not asked in a mixture."""
    missing = unmade()
    for question in QUESTIONS:
        why = next((missing[one] for one in sorted(question.modalities) if one in missing), "")
        over = time.monotonic() > servers[0].end_s
        if why or over:
            verdict = {} if alone else {"verdict": (Verdict.FAILED if over else Verdict.NOT_ASKED).value}
            yield {"question": question.name, "answers": {}, "why": why or "the time was over", **verdict}
            continue
        answers = {one.name: one.answer(question, tokens) for one in servers}
        if past:
            answers["plain"] = past["answers"].get(question.name, Answer(0, "was not asked"))
        if len(question.items) == 1 and all(answer.status in REFUSED for answer in answers.values()):
            missing |= dict.fromkeys(question.modalities, "the model does not take it")
        row: Row = {"question": question.name, "answers": {name: one._asdict() for name, one in answers.items()}}
        if not alone:
            row["verdict"], row["why"] = judge(answers["ours"], answers["plain"])
        yield {"why": "", **row}


def _times(servers: Sequence[Server], past: Mapping[str, Any], arguments: argparse.Namespace) -> Iterator[Row]:
    """A row per kind: milliseconds to the first token, one request at a time, the servers in turns."""
    times: dict[str, dict[str, list[float]]] = {kind: {one.name: [] for one in servers} for kind in KINDS}
    for number in range(-1, arguments.requests):  # the first warms up
        image = Question("", (("image", FIRST_SEED + number),))
        for server in servers:
            for kind, question in zip(KINDS, (image, image, Question("")), strict=True):
                if time.monotonic() > server.end_s:
                    continue
                taken = server.ttft_ms(question, min(8, arguments.tokens))
                if taken is not None and number >= 0:
                    times[kind][server.name].append(taken)
    for kind, by_server in times.items():
        if past:
            by_server["plain"] = past["times"].get(kind, [])
        yield {"kind": kind, "ttft_ms": by_server}


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    verdicts = [row["verdict"] for row in rows if "verdict" in row]
    found = {f"answers/{name.value}": float(verdicts.count(name.value)) for name in Verdict if name.value in verdicts}
    for row in (row for row in rows if "kind" in row):
        medians = {name: float(np.median(values)) for name, values in row["ttft_ms"].items() if values}
        found |= {f"ttft_ms/{row['kind']}/{name}": value for name, value in medians.items()}
        if "plain" in medians:
            found[f"ttft_over_plain/{row['kind']}"] = medians["ours"] / medians["plain"] if "ours" in medians else 0.0
    return found


def _report(rows: Sequence[Row], held: Mapping[str, Any], figures: Mapping[str, float]) -> str:
    """Each question, the figures, and what memory each server holds."""
    asked = [row for row in rows if "question" in row]
    answers = table_of(asked, {"question": "{question}", "verdict": _said, "why": lambda row: row["why"][:100]})
    memory = "\n".join(f"{name}: {json.dumps(own)}" for name, own in held.items())
    return f"{answers}\n\n{figure_table(figures)}\n\n{memory}"


def _said(row: Row) -> str:
    """Its verdict, or of a server that was asked alone the beginning of its answer."""
    return row.get("verdict") or (row["answers"].get("ours", {}).get("text") or "")[:60]
