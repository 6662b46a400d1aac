"""`epd-bench aisbench`: AISBench loads an OpenAI endpoint; its rows are judged as those of `epd-bench load`.

It makes an environment for AISBench once (2.2 GB), writes its configurations, runs it at one rate after another and
reads what it recorded of each request: SLO attainment, effective throughput per device and goodput, which AISBench does
not know, beside the numbers that it prints itself. A rate that says nothing about the server ends with exit code 1 and
says why; Ctrl-C keeps the rates that were finished, with 130.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.aisbench import flags
from bench.aisbench.environment import check_tokenizer, environment
from bench.aisbench.flags import Asked
from bench.aisbench.rate import Endpointed, folder_of, label_of, measure_rate
from bench.aisbench.report import Rated, goodput_rps, one_rate, overview
from bench.aisbench.rows import look
from bench.clients.metrics import faults
from bench.clients.records import RecordsFile
from bench.clients.results import Results
from bench.clients.target import Target
from bench.record import environment as record_environment
from bench.record import flatten
from bench.workloads.images import Images
from deploy.plan.blueprint import DEMO_NAME
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.errors import ConfigError, StageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, keep. Returns 0, 1 where a rate is not valid, 128 + signal where one ended it."""
    asked = flags.asked(arguments)
    headers = {"authorization": f"Bearer {asked.api_key}"} if asked.api_key else {}
    target = Target(arguments.url, headers)
    model, tokenizer = _model(target, asyncio.run(target.served()), arguments.model, arguments.tokenizer)
    shape = asyncio.run(look(target, model))
    try:
        bench = environment(arguments.venv)
        check_tokenizer(bench, tokenizer)
    except KeyboardInterrupt:  # an environment that is half made is made again
        print("epd-bench: interrupted; nothing was sent", file=sys.stderr)
        return 130
    env = record_environment(argv, kind=arguments.kind, asked=arguments)
    env["load"] = {
        "client": f"AISBench {bench.version}",
        "url": str(target.endpoint),
        "model": model,
        "workload": arguments.workload,
        "requests_of_a_rate": asked.workload.count,
        "seed": arguments.seed,
        "arrivals": arguments.arrivals,
        "devices": asked.devices,
        "slos": [str(slo) for slo in asked.slos],
        "chunks_before_content": shape.before,
        "ttft": "from when a request was due" if asked.timed else "from sending",
    }
    rows_path = arguments.rows or (arguments.json and arguments.json.with_suffix(".rows.jsonl"))
    fixed = Endpointed(target.endpoint, model, tokenizer, shape, bench)
    results = Results(arguments.json, flag="--json", resume=False)
    results.begin(env)
    sweep = Sweep(asked, fixed, target, results)
    with _folder(arguments.out) as folder, RecordsFile(rows_path) if rows_path else contextlib.nullcontext() as rows:
        sweep.all(folder, Images(arguments.cache), rows)
    return sweep.exit_code()


@dataclass
class Sweep:
    """The rates one after another; each is told and written down as it ends.

    Attributes:
        rated: what was measured. signal: that ended it, or 0. over: why no more rates make sense.
    """

    asked: Asked
    fixed: Endpointed
    target: Target
    results: Results
    rated: list[Rated] = field(default_factory=list)
    signal: int = 0
    over: str = ""

    def all(self, folder: Path, pictures: Images, rows: RecordsFile | None) -> None:
        try:
            for number, rate in enumerate(self.asked.rates):
                self._one(rate, number, folder / folder_of(rate), pictures, rows)
                if self.signal or self.over:
                    break
        except KeyboardInterrupt:  # between two runs, while requests are made
            self.signal = 2
        if self.rated:
            print(f"\n{overview(self.rated, self.asked.slos, self.asked.devices)}")

    def exit_code(self) -> int:
        wrong = [one.text for rated in self.rated for one in rated.measured.objections]
        if self.signal:
            wrong = ["interrupted; what was measured until then is above and in the files"]
        elif self.over:
            wrong = [self.over]
        elif wrong:
            wrong[0] = f"not valid: {wrong[0]}"
        if wrong:
            print(f"epd-bench: {wrong[0]}", file=sys.stderr)
        return 128 + self.signal if self.signal else int(bool(wrong))

    def _one(self, rate: float, number: int, folder: Path, pictures: Images, rows: RecordsFile | None) -> None:
        print(f"{label_of(rate)}: {self.asked.workload.count} requests by AISBench …", file=sys.stderr)
        outcome = measure_rate(self.asked, self.fixed, rate, number, folder, pictures)
        self.signal = outcome.signal
        if outcome.rated is None:
            self.over = f"AISBench measured nothing at {outcome.nothing}"
            return
        self.rated.append(outcome.rated)
        print("\n" + one_rate(outcome.rated, self.asked.slos, timed=self.asked.timed))
        measured = outcome.rated.measured
        for row in measured.run.rows if rows else ():
            assert rows is not None
            rows.keep(row)
        figures = {**measured.figures, "aisbench": outcome.rated.own}
        for slo in self.asked.slos:
            goodput = goodput_rps(self.rated, slo)
            self.results.figures[f"goodput/slo_{slo}/rps"] = goodput
            if self.asked.devices:
                self.results.figures[f"goodput/slo_{slo}/rps_per_device"] = goodput / self.asked.devices
        self.results.keep({**measured.row(), "aisbench": dict(outcome.rated.own)}, flatten({label_of(rate): figures}))
        self.over = self.over or measured.run.stopped
        if "unreachable" in faults(measured.run.rows):
            try:
                asyncio.run(self.target.models())
            except StageError as error:
                self.over = f"the endpoint is gone: {error.message}"


def _model(
    target: Target, served: Sequence[tuple[str, str]], named: str | None, tokenizer: Path | None
) -> tuple[str, Path]:
    """The model to ask for, and where its tokenizer lies: AISBench needs one when all is over, so it is said before.

    Raises:
        ConfigError: there is none.
    """
    if named is None and not served:
        raise ConfigError(f"{target.endpoint} serves no model: say --model", param="--model")
    model = named or served[0][0]
    root = next((root for name, root in served if name == model), "")
    if tokenizer is None and model == DEMO_NAME:
        tokenizer = Path(builtin_model_dir())
    if tokenizer is None:
        if not root or not Path(root).is_dir():
            raise ConfigError(
                f"say --tokenizer DIR: AISBench needs the model's tokenizer, and {target.endpoint} does not say where "
                f"{model!r} lies on this machine",
                param="--tokenizer",
            )
        tokenizer = Path(root)
    return model, tokenizer.absolute()


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where AISBench's files go: to be kept, or for as long as the context."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="epd-bench-aisbench-") as name:
            yield Path(name)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}", param="--out") from error
    if taken:
        raise ConfigError(f"--out {out} is not empty: old results would be taken for new ones", param="--out")
    yield out.absolute()
