"""A workload for `vllm bench serve --dataset-name custom_image` (the same in vLLM 0.23 and 0.32).

A row is `{"content": [parts]}`, which takes requests with any number of pictures, none too. Pictures are data URLs,
which vLLM passes on byte for byte; files it would decode and encode anew. Rows have no arrival times and no lengths of
their own: both are flags of the command.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench.workloads.arrivals import Arrivals, ClosedLoop, Gamma, Poisson
from bench.workloads.exported import Exported, in_words, rows_to
from bench.workloads.pictures import Pictures
from bench.workloads.spec import RequestSpec
from epd_serve.errors import ConfigError


def export_vllm(
    requests: Iterable[RequestSpec],
    pictures: Pictures,
    directory: Path,
    arrivals: Arrivals | None = None,
    seed: int = 0,
) -> Exported:
    """Write the rows.

    Args:
        arrivals, seed: for the flags of the command.

    Raises:
        ConfigError: nothing to export, or the directory cannot be written.
    """
    directory = directory.absolute()
    count, lengths, paced = 0, set[int](), False
    with rows_to(directory) as (path, write):
        for request in requests:
            parts: list[dict[str, object]] = [
                {"type": "image_url", "image_url": {"url": pictures.data_url(picture)}} for picture in request.pictures
            ]
            write({"content": [*parts, {"type": "text", "text": request.text}]})
            lengths.add(request.max_tokens)
            paced = paced or request.pace != 1.0
            count += 1
        if count == 0:
            raise ConfigError("nothing to export: the workload is empty", param="--n")
    longest = max(lengths)
    words = (
        "vllm bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url http://127.0.0.1:8000 "
        f"--model MODEL --dataset-name custom_image --dataset-path {path} --disable-shuffle --no-oversample "
        f"--num-prompts {count} --custom-output-len {longest} --ignore-eos --seed {seed}"
    )
    notes = []
    if len(lengths) > 1:
        notes.append(
            f"vLLM bench asks every request for the same length: {longest} tokens, the longest of the workload"
        )
    if isinstance(arrivals, Poisson):
        words += f" --request-rate {arrivals.rate_rps:g}"
    elif isinstance(arrivals, Gamma):
        words += f" --request-rate {arrivals.rate_rps:g} --burstiness {arrivals.burstiness:g}"
    elif isinstance(arrivals, ClosedLoop):
        words += f" --max-concurrency {arrivals.concurrency}"
    else:
        notes.append(f"vLLM bench draws arrivals itself, of a trace it keeps nothing ({in_words(arrivals)}): "
                     "add --request-rate")  # fmt: skip
    if isinstance(arrivals, Poisson | Gamma):
        notes.append("vLLM bench draws its own arrivals at that rate: they are not those of the other exports")
    if paced:
        notes.append("bursts of arrivals are lost, bursts of pictures are kept")
    return Exported(count, (path,), words, tuple(notes))
