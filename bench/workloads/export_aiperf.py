"""A workload for aiperf's `--custom-dataset-type single_turn` (read from aiperf 0.13).

Pictures are data URLs: aiperf sends those byte for byte, and would encode a file anew. `timestamp` is in milliseconds
and acts with `--fixed-schedule`; `output_length` and `extra` are per request. aiperf puts a text before its pictures.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.workloads.arrivals import Arrivals, ClosedLoop
from bench.workloads.exported import Exported, rows_to
from bench.workloads.pictures import Pictures
from bench.workloads.spec import RequestSpec
from epd_serve.errors import ConfigError


def export_aiperf(
    requests: Iterable[RequestSpec], pictures: Pictures, directory: Path, arrivals: Arrivals | None = None
) -> Exported:
    """Write the rows.

    Raises:
        ConfigError: nothing to export, or the directory cannot be written.
    """
    directory = directory.absolute()
    count, timed = 0, False
    with rows_to(directory) as (path, write):
        for request in requests:
            write(_row(request, pictures))
            timed = timed or request.arrival_s is not None
            count += 1
        if count == 0:
            raise ConfigError("nothing to export: the workload is empty", param="--n")
    words = (
        "aiperf profile --endpoint-type chat --streaming --url http://127.0.0.1:8000 --model MODEL "
        f"--input-file {path} --custom-dataset-type single_turn --request-count {count}"
    )
    notes = []
    if timed:
        words += " --fixed-schedule"
    elif isinstance(arrivals, ClosedLoop):
        words += f" --concurrency {arrivals.concurrency}"
    else:
        notes.append("no arrival times: add --request-rate R --arrival-pattern poisson")
    return Exported(count, (path,), words, tuple(notes))


def _row(request: RequestSpec, pictures: Pictures) -> dict[str, Any]:
    row: dict[str, Any] = {"session_id": request.id, "text": request.text}
    if request.pictures:
        row["images"] = [pictures.data_url(picture) for picture in request.pictures]
    if request.arrival_s is not None:
        row["timestamp"] = round(request.arrival_s * 1000, 3)
    return {**row, "output_length": request.max_tokens, "extra": {"ignore_eos": True}}
