"""What the installed vLLM's request models make of damaged bodies, in a process of its own. Prints those on which they
crash though the proxy lets them through, and those that they would take though the proxy says that a type is wrong."""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

import vllm
from pydantic import ValidationError

from epd_serve.errors import EpdError
from proxy import strict_json
from proxy.request.parse import parse
from tests.contract.request_fields import MODELS
from tests.proxy.fakes import settings
from tests.proxy.fuzzing import Damage, model_of

TYPE_REFUSED = re.compile(r" must be (an object|a list|a string)( or (a list|a string))?\.$")


def main(bodies: int, seed: int) -> None:
    damage, config = Damage("demo", seed), settings(vllm_version=vllm.__version__)
    crashes, strict, taken, mistyped = [], [], 0, 0
    for _ in range(bodies):
        endpoint, raw = damage.next()
        try:
            request = parse(endpoint, raw, config)
            body = dict(request.body)
            error = _error(model_of(request.endpoint, body), body)
            taken += error is None
            # vLLM's server answers 400 to pydantic's errors and to its own.
            if not (error is None or isinstance(error, ValidationError) or type(error).__name__.startswith("VLLM")):
                crashes.append(f"{error!r}: {raw.decode()}")
        except EpdError as refused:
            # What the proxy reads itself, messages and their parts, it has to know for certain.
            ours = endpoint.is_anthropic or refused.message.startswith(("messages[", "input["))
            if TYPE_REFUSED.search(refused.message) and not ours:
                mistyped += 1
                body = strict_json.decode(raw)
                if _error(model_of(endpoint, body), body) is None:
                    strict.append(f"{refused.message}: {raw.decode()}")
    print(json.dumps({"crashes": crashes, "strict": strict, "taken": taken, "mistyped": mistyped}))


def _error(model: str, body: dict[str, Any]) -> Exception | None:
    module, _, name = MODELS[model].rpartition(".")
    try:
        getattr(importlib.import_module(module), name).model_validate(body)
    except Exception as error:  # noqa: BLE001 - whatever it is, is the finding
        return error
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
