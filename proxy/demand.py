"""What a request asks of the lines in front of the stages: modality, priority, sequences that it decodes."""

from __future__ import annotations

from epd_serve.errors import RequestError
from proxy.admission import Kind
from proxy.request import ParsedRequest


def kind_of(request: ParsedRequest) -> Kind:
    return Kind.MEDIA if request.media else Kind.TEXT


def priority_of(request: ParsedRequest) -> int:
    """The client's `priority`, as vLLM means it: lower is sooner, 0 is usual.

    Raises:
        RequestError: it is no integer.
    """
    value = request.body.get("priority")
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise RequestError("priority must be an integer; lower means sooner.", param="priority")
    return value


def sequences_of(request: ParsedRequest) -> int:
    """Answers that are decoded side by side: `n` for each prompt."""
    answers = request.body.get("n")
    prompts = request.body.get("prompt")
    several = isinstance(prompts, list) and not isinstance(prompts[0], int)
    return (answers if isinstance(answers, int) else 1) * (len(prompts) if several and prompts else 1)
