"""A workload as files of another load generator: the file of rows that each takes, and the command to run with it.

Images are data URLs for vLLM bench and aiperf: those go on the wire byte for byte, files both would decode and encode
anew. AISBench takes files (`bench/workloads/export_aisbench.py`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.workloads.images import Images
from bench.workloads.requests import Arrivals, ClosedLoop, Poisson, RequestSpec
from bench.workloads.traffic import traffic_of
from epd_serve.errors import ConfigError
from epd_serve.traffic import write_traffic

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


def write_rows(directory: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the directory's `REQUESTS`, which has its name only when it is complete; returns its absolute path.

    Raises:
        ConfigError: there is no row, or the directory cannot be written (disk full, no permission, a file in its
            place). What was written of the rows is removed.
    """
    path = directory.absolute() / REQUESTS
    draft = path.with_suffix(".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            for row in rows:
                print(json.dumps(row, ensure_ascii=False), file=file)
        if not draft.stat().st_size:
            raise ConfigError("nothing to export: the workload is empty", param="--n")
        draft.replace(path)
    except OSError as error:
        raise unwritable(directory, error) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return path


def unwritable(directory: Path, error: OSError) -> ConfigError:
    """The one message for an export that cannot be written."""
    why = f"{error.strerror or error}: free some space, or export to another directory"
    return ConfigError(f"{directory} cannot be written: {why}", param="--export")


def export_vllm(
    requests: Sequence[RequestSpec], images: Images, directory: Path, arrivals: Arrivals | None = None, seed: int = 0
) -> Exported:
    """For `vllm bench serve --dataset-name custom_image` (the same in vLLM 0.23 and 0.32).

    A row is `{"content": [parts]}`, which takes requests with any number of images, none too. Rows have no arrival
    times and no lengths of their own: both are flags of the command, `arrivals` and `seed` too.

    Raises:
        ConfigError: nothing to export, or the directory cannot be written.
    """
    path = write_rows(directory, ({"content": _content(one, images)} for one in requests))
    longest = max(one.max_tokens for one in requests)
    command = (
        f"vllm bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url {SERVER} "
        f"--model MODEL --dataset-name custom_image --dataset-path {path} --disable-shuffle --no-oversample "
        f"--num-prompts {len(requests)} --custom-output-len {longest} --ignore-eos --seed {seed}"
    )
    notes = []
    if any(one.max_tokens != longest for one in requests):
        notes.append(f"vLLM bench asks every request for the same length: {longest} tokens, the longest")
    if isinstance(arrivals, Poisson):
        command += f" --request-rate {arrivals.rate_rps:g}"
        notes.append("vLLM bench draws its own arrivals at that rate: they are not those of the other exports")
    elif isinstance(arrivals, ClosedLoop):
        command += f" --max-concurrency {arrivals.concurrency}"
    else:
        notes.append("vLLM bench draws arrivals itself: add --request-rate")
    if any(one.pace != 1.0 for one in requests):
        notes.append("bursts of arrivals are lost, bursts of images are kept")
    return Exported(len(requests), (path,), command, tuple(notes))


def _content(request: RequestSpec, images: Images) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": images.data_url(one)}} for one in request.images]
    return [*parts, {"type": "text", "text": request.text}]


def export_aiperf(
    requests: Sequence[RequestSpec], images: Images, directory: Path, arrivals: Arrivals | None = None
) -> Exported:
    """For aiperf's `--custom-dataset-type single_turn` (read from aiperf 0.13).

    `timestamp` is in milliseconds and acts with `--fixed-schedule`; `output_length` and `extra` are per request. aiperf
    puts a text before its images.

    Raises:
        ConfigError: nothing to export, or the directory cannot be written.
    """
    path = write_rows(directory, (_single_turn(one, images) for one in requests))
    command = (
        f"aiperf profile --endpoint-type chat --streaming --url {SERVER} --model MODEL "
        f"--input-file {path} --custom-dataset-type single_turn --request-count {len(requests)}"
    )
    if requests[0].arrival_s is not None:
        return Exported(len(requests), (path,), f"{command} --fixed-schedule")
    if isinstance(arrivals, ClosedLoop):
        return Exported(len(requests), (path,), f"{command} --concurrency {arrivals.concurrency}")
    note = "no arrival times: add --request-rate R --arrival-pattern poisson"
    return Exported(len(requests), (path,), command, (note,))


def _single_turn(request: RequestSpec, images: Images) -> dict[str, Any]:
    row: dict[str, Any] = {"session_id": request.id, "text": request.text, "output_length": request.max_tokens}
    if request.images:
        row["images"] = [images.data_url(one) for one in request.images]
    if request.arrival_s is not None:
        row["timestamp"] = round(request.arrival_s * 1000, 3)
    return row | {"extra": {"ignore_eos": True}}


def export_traffic(requests: Sequence[RequestSpec], directory: Path, arrivals: Arrivals | None) -> Exported:
    """Times and sizes without content, as a recording, for the planner: `traffic.jsonl`. An image is a token per 28x28
    pixels.

    Raises:
        ConfigError: requests without times; the directory cannot be written.
    """
    if arrivals is None and any(request.arrival_s is None for request in requests):
        raise ConfigError("traffic is sizes and times: say how fast, --rate R", param="--rate")
    if isinstance(arrivals, ClosedLoop):
        raise ConfigError("traffic has times, and a closed loop has none: --rate R", param="--concurrency")
    path = directory.absolute() / "traffic.jsonl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(directory, error) from error
    write_traffic(path, map(traffic_of, requests))
    command = f"epd-serve plan MODEL --profile FILE --devices N --workload recorded:{path}"
    return Exported(len(requests), (path,), command, ("tokens of images are by area; a recording has the model's own",))
