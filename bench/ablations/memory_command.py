"""`epd-bench memory-tables`: how much more fits where the encoder is not beside prefill (EPD, tables 2 to 4).

Computed from sizes and weights of models; nothing is started, and nothing was measured on a device. `--check` starts
small presets for real, and compares what their vLLM makes of its KV cache with what was computed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.ablations import real_start
from bench.ablations.memory_subject import subject_of
from bench.ablations.memory_tables import Case, figures, papers_cases, shown
from bench.micro.real_stages import check_memory
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from epd_serve.demo.presets import RANDOM_PRESETS, write_preset
from epd_serve.errors import ConfigError
from epd_serve.stage_memory import CONTEXT_BYTES

PAPER_BYTES = 82 * 10**9
"""Of EPD's A800: "82GB memory"."""
CHECKED = ("tiny", "bench")
STAGES = 3

WORDS = """\
Beside them in brackets: what EPD reports of its A800. Its engine (vLLM 0.6.1) held more per picture than the flash
kernels that are counted here: its numbers are smaller, and where the encoder took most of that (MiniCPM-V), its gain is
up to three times the one computed. P with spare: our P as it starts, with an encoder loaded for lost features;
`--stage-args 'P:--language-model-only'` leaves that out. vLLM encodes a request in portions, so with it the context
and the KV cache bound a request before the encoder's activations do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="this model instead of the paper's three")
    parser.add_argument("--picture", default="largest", help="with --model: WIDTHxHEIGHT, or largest (default)")
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help=f"of a device (default {PAPER_BYTES / 2**30:.1f}, EPD's)"
    )
    parser.add_argument("--device", choices=sorted(CONTEXT_BYTES), default="cuda", help="whose runtime takes memory")
    parser.add_argument("--check", action="store_true", help=f"start {' and '.join(CHECKED)} for real, and compare")
    parser.add_argument("--presets", default=",".join(CHECKED), help="of --check, with commas")
    add_record_arguments(parser, quick="with --check: one preset")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Compute, print, write; start presets where that is asked. 1 where a real start is not as computed."""
    total = PAPER_BYTES if arguments.device_memory is None else int(arguments.device_memory * 2**30)
    runtime = CONTEXT_BYTES[arguments.device]
    if total <= runtime:
        raise ConfigError(f"--device-memory {arguments.device_memory:g} is less than the runtime takes")
    presets = _presets(arguments)
    if arguments.model is None:
        cases = papers_cases(total, runtime)
    else:
        subject = subject_of(arguments.model, arguments.picture)
        cases = [Case.of(Path(arguments.model).resolve().name, arguments.picture, subject, total, runtime)]
    kind = "emulated: computed from sizes of models, nothing was run"
    env = environment(argv, kind, asked=arguments)
    print(
        f"{kind}; a device of {total / 2**30:.1f} GiB\n\n{shown(cases)}\n\n{WORDS if arguments.model is None else ''}"
    )
    found: list[real_start.Started] = []
    try:
        for preset in presets:
            with tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch:
                write_preset(Path(scratch) / preset, preset)
                found += real_start.check(preset, Path(scratch) / preset)
    finally:
        if found:
            env["kind"] = f"{kind}; figures of check/: real stages on CPU"
            print(f"\nA real start of small presets on CPU ({real_start.LAYOUT}; real)\n{real_start.shown(found)}")
        rows = [one.row() for one in found] or [{"model": case.model, "picture": case.picture} for case in cases]
        write(arguments.json, figures(cases) | real_start.figures(found), env, rows)
    return 0 if all(one.agrees for one in found) else 1


def _presets(arguments: argparse.Namespace) -> list[str]:
    if not arguments.check:
        return []
    names = list(dict.fromkeys(arguments.presets.split(",")))
    if unknown := [name for name in names if name not in (*RANDOM_PRESETS, "demo")]:
        raise ConfigError(f"--presets {unknown[0]!r}: of demo, {', '.join(RANDOM_PRESETS)}", param="--presets")
    check_memory(STAGES)
    return names[:1] if arguments.quick else names
