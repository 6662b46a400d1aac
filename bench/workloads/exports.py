"""A workload as files of another load generator: the file of rows that each takes, and the command to run with it.

Images are data URLs for vLLM bench and aiperf: those go on the wire byte for byte, files both would decode and encode
anew. AISBench takes files (`bench/workloads/export_aisbench.py`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.workloads.arrivals import Arrivals, ClosedLoop, Gamma, Poisson
from bench.workloads.images import Images
from bench.workloads.spec import RequestSpec
from epd_serve.errors import ConfigError

REQUESTS = "requests.jsonl"
"""In the directory of every export, one line per request."""
SERVER = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Exported:
    """What an export leaves.

    Attributes:
        requests: of the workload, without rows that an export adds.
        command: the client's own, with a server that the user replaces.
        notes: what gets lost or has to be known, in sentences.
    """

    requests: int
    files: tuple[Path, ...]
    command: str
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def rows_to(directory: Path) -> Iterator[tuple[Path, Callable[[Mapping[str, Any]], None]]]:
    """The directory's `REQUESTS` and what adds a row to it; the file has its name only when it is complete.

    Raises:
        ConfigError: there was no row, or the directory cannot be written (disk full, no permission, a file in its
            place). What was written of the rows is removed.
    """
    path = directory / REQUESTS
    draft = path.with_suffix(".draft")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            yield path, lambda row: print(json.dumps(row, ensure_ascii=False), file=file)
            empty = file.tell() == 0
        if empty:
            raise ConfigError("nothing to export: the workload is empty", param="--n")
        draft.replace(path)
    except OSError as error:
        raise unwritable(directory, error) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def unwritable(directory: Path, error: OSError) -> ConfigError:
    """The one message for an export that cannot be written."""
    why = f"{error.strerror or error}: free some space, or export to another directory"
    return ConfigError(f"{directory} cannot be written: {why}", param="--export")


def export_vllm(
    requests: Iterable[RequestSpec], images: Images, directory: Path, arrivals: Arrivals | None = None, seed: int = 0
) -> Exported:
    """For `vllm bench serve --dataset-name custom_image` (the same in vLLM 0.23 and 0.32).

    A row is `{"content": [parts]}`, which takes requests with any number of images, none too. Rows have no arrival
    times and no lengths of their own: both are flags of the command, `arrivals` and `seed` too.

    Raises:
        ConfigError: nothing to export, or the directory cannot be written.
    """
    lengths, paces = list[int](), set[float]()
    with rows_to(directory.absolute()) as (path, write):
        for request in requests:
            parts = [{"type": "image_url", "image_url": {"url": images.data_url(one)}} for one in request.images]
            write({"content": [*parts, {"type": "text", "text": request.text}]})
            lengths.append(request.max_tokens)
            paces.add(request.pace)
    command = (
        f"vllm bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url {SERVER} "
        f"--model MODEL --dataset-name custom_image --dataset-path {path} --disable-shuffle --no-oversample "
        f"--num-prompts {len(lengths)} --custom-output-len {max(lengths)} --ignore-eos --seed {seed}"
    )
    notes = []
    if len(set(lengths)) > 1:
        notes.append(f"vLLM bench asks every request for the same length: {max(lengths)} tokens, the longest")
    if isinstance(arrivals, Poisson | Gamma):
        command += f" --request-rate {arrivals.rate_rps:g}"
        command += f" --burstiness {arrivals.burstiness:g}" if isinstance(arrivals, Gamma) else ""
        notes.append("vLLM bench draws its own arrivals at that rate: they are not those of the other exports")
    elif isinstance(arrivals, ClosedLoop):
        command += f" --max-concurrency {arrivals.concurrency}"
    else:
        kept = "no arrival times" if arrivals is None else str(arrivals)
        notes.append(f"vLLM bench draws arrivals itself, of a trace it keeps nothing ({kept}): add --request-rate")
    if paces != {1.0}:
        notes.append("bursts of arrivals are lost, bursts of images are kept")
    return Exported(len(lengths), (path,), command, tuple(notes))


def export_aiperf(
    requests: Iterable[RequestSpec], images: Images, directory: Path, arrivals: Arrivals | None = None
) -> Exported:
    """For aiperf's `--custom-dataset-type single_turn` (read from aiperf 0.13).

    `timestamp` is in milliseconds and acts with `--fixed-schedule`; `output_length` and `extra` are per request. aiperf
    puts a text before its images.

    Raises:
        ConfigError: nothing to export, or the directory cannot be written.
    """
    count, timed = 0, False
    with rows_to(directory.absolute()) as (path, write):
        for request in requests:
            count += 1
            row: dict[str, Any] = {"session_id": request.id, "text": request.text}
            if request.images:
                row["images"] = [images.data_url(one) for one in request.images]
            if request.arrival_s is not None:
                row["timestamp"], timed = round(request.arrival_s * 1000, 3), True
            write({**row, "output_length": request.max_tokens, "extra": {"ignore_eos": True}})
    command = (
        f"aiperf profile --endpoint-type chat --streaming --url {SERVER} --model MODEL "
        f"--input-file {path} --custom-dataset-type single_turn --request-count {count}"
    )
    if timed:
        return Exported(count, (path,), f"{command} --fixed-schedule")
    if isinstance(arrivals, ClosedLoop):
        return Exported(count, (path,), f"{command} --concurrency {arrivals.concurrency}")
    return Exported(count, (path,), command, ("no arrival times: add --request-rate R --arrival-pattern poisson",))
