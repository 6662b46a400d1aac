"""What a request asks of the admission queues: its modality, its priority, and how many sequences it decodes."""

from __future__ import annotations

from epd_serve.errors import RequestError
from proxy.admission.ticket import Kind
from proxy.config.limits import KeyLimits
from proxy.request.parse import Endpoint, ParsedRequest


def kind_of(request: ParsedRequest) -> Kind:
    return Kind.MEDIA if request.media else Kind.TEXT


def priority_of(request: ParsedRequest, limits: KeyLimits) -> int:
    """The client's `priority`, as vLLM means it: lower is sooner, 0 is usual. A better one than `limits` allow counts
    as the best that they do, as one beyond `admission.priority_limit` does.

    Raises:
        RequestError: it is no integer.
    """
    value = request.body.get("priority")
    if value is None:
        value = 0
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise RequestError("priority must be an integer; lower means sooner.", param="priority")
    return value if limits.best_priority is None else max(value, limits.best_priority)


def sequences_of(request: ParsedRequest, most: int) -> int:
    """Answers that are decoded side by side: `n` for each prompt.

    Raises:
        RequestError: a list of prompts asks for more than `most`, `max_sequences` of the settings.
    """
    n = request.body.get("n")
    answers = n if isinstance(n, int) else 1
    prompts = request.body["prompt"] if request.endpoint is Endpoint.COMPLETIONS else None
    if not isinstance(prompts, list) or isinstance(prompts[0], int):
        return answers
    sequences = answers * len(prompts)
    if len(prompts) > 1 and sequences > most:
        times = f", and n {answers} for each" if answers > 1 else ""
        raise RequestError(
            f"prompt has {len(prompts)} prompts{times}: {sequences} answers, at most {most} can be asked for at once; "
            "send several requests.",
            param="prompt",
        )
    return sequences
