"""The fields of vLLM's requests by release: asked of the wheels, written to `proxy/fields/vllm_fields.py`, and all
judged.

The proxy lets through what vLLM has and `proxy/fields/rules.py` allows. A field that a release has and nobody judged is
a finding by its name, and so is a judgement of what no release has, and a generated file that has fallen behind.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from proxy.fields.rules import IGNORED, NESTED, PASSED, REFUSED, names_of
from tests.contract.asking import NotRecordedError
from tests.contract.facts import Facts
from tests.contract.findings import Finding
from tests.contract.wheels import Wheel

GENERATED = "proxy/fields/vllm_fields.py"
RULES = "proxy/fields/rules.py"
MODELS = {
    "chat": "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest",
    "completion": "vllm.entrypoints.openai.completion.protocol.CompletionRequest",
    "response": "vllm.entrypoints.openai.responses.protocol.ResponsesRequest",
    "tokenize_text": "vllm.entrypoints.serve.tokenize.protocol.TokenizeCompletionRequest",
    "tokenize_chat": "vllm.entrypoints.serve.tokenize.protocol.TokenizeChatRequest",
    "detokenize": "vllm.entrypoints.serve.tokenize.protocol.DetokenizeRequest",
}
_CLOSED = frozenset({"metadata", "text", "reasoning", "tool_choice", "include"})
"""Objects that pass whole: models that take nothing but words and numbers."""

_HEAD = '''\
"""The fields of vLLM's requests, by model and release. Written by `make npu-contract` from the released wheels.

A name stands for all releases; `name@A..B` for those from A to B.
"""

from __future__ import annotations

RELEASES = ({releases})

'''
_TAIL = '''

def _in(release: str, spec: str) -> bool:
    first, _, last = spec.partition("@")[2].partition("..")
    return not first or RELEASES.index(first) <= RELEASES.index(release) <= RELEASES.index(last)


FIELDS: dict[str, dict[str, frozenset[str]]] = {
    model: {
        release: frozenset(spec.partition("@")[0] for spec in specs.split() if _in(release, spec))
        for release in RELEASES
    }
    for model, specs in _SPECS.items()
}
"""Model → release → names."""

TYPES: dict[str, dict[str, str]] = {
    model: dict(spec.split("=") for spec in specs.split()) for model, specs in _TYPES.items()
}
"""Model → path of a field → what any release takes for it beside null: `o` an object, `l` a list, `L` a list of
objects, `s` a string, `n` a number or a boolean. Those only for which a list or an object is taken."""
'''


def check_request_fields(facts: Mapping[Wheel, Facts], generated: str) -> list[Finding]:
    """What is not judged, judged for nothing, or not as the wheels have it.

    Args:
        facts: of all wheels. generated: the text of `GENERATED`.

    Returns:
        No findings where there is no wheel of vLLM.
    """
    wheels = {wheel: answers for wheel, answers in facts.items() if wheel.package == "vllm"}
    found: list[Finding] = []
    try:
        for wheel, answers in wheels.items():
            found += (Finding(RULES, 1, wheel.name, message) for message in _unjudged(answers))
        if wheels:
            found += (Finding(RULES, 1, "every vLLM", message) for message in _stale(wheels))
            if generated != fields_text(wheels):
                found.append(Finding(GENERATED, 1, "every vLLM", "is not what the wheels say; run `make npu-contract`"))
    except NotRecordedError as error:
        found.append(Finding(RULES, 1, "every vLLM", f"{error} is not in the manifest; run `make npu-contract`"))
    return found


def fields_text(facts: Mapping[Wheel, Facts]) -> str:
    """The text of `GENERATED`."""
    wheels = {wheel: answers for wheel, answers in facts.items() if wheel.package == "vllm"}
    releases = [wheel.version for wheel in wheels]
    quoted = ", ".join(f'"{release}"' for release in releases)
    lines = ["_SPECS = {"]
    for model in MODELS:
        by_release = {wheel.version: set(_fields(answers, MODELS[model])) for wheel, answers in wheels.items()}
        specs = [_spec(name, by_release, releases) for name in sorted(set().union(*by_release.values()))]
        lines += _wrapped(model, specs)
    lines += ["}", "", "_TYPES = {"]
    for model in MODELS:
        types: dict[str, str] = {}
        for answers in wheels.values():
            _add_types(types, answers, model, "", MODELS[model])
        lines += _wrapped(model, [f"{path}={letters}" for path, letters in sorted(types.items()) if letters])
    return _HEAD.format(releases=quoted) + "\n".join([*lines, "}"]) + "\n" + _TAIL


def _wrapped(model: str, specs: list[str]) -> list[str]:
    wrapped = textwrap.wrap(" ".join(specs), 110, break_long_words=False, break_on_hyphens=False)
    return [f'    "{model}": """', *(f"        {line}" for line in wrapped), '    """,']


def _add_types(types: dict[str, str], answers: Facts, model: str, prefix: str, owner: str) -> None:
    """Add what `owner` lets pass at its fields to what other classes do; "" is anything."""
    row = answers.ask("request", owner)
    for name, classes in row.get("fields", {}).items():
        path = prefix + name
        if not _is_passed(model, path):
            continue
        letters = row.get("types", {}).get(name, "")
        before = types.get(path, letters)
        both = {*before, *letters} - ({"L"} if "l" in before + letters else set())
        types[path] = "".join(sorted(both)) if before and letters else ""
        # Of several classes, or of one of ours to read and others, each passes over what only another one has.
        if path in NESTED[model] and letters in ("o", "L") and len(classes.split()) == 1:
            _add_types(types, answers, model, f"{path}.", classes)


def _is_passed(model: str, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name in (NESTED[model][owner].split() if owner else names_of(PASSED)) and not name.endswith("_embeds")


def _spec(name: str, by_release: Mapping[str, set[str]], releases: list[str]) -> str:
    has = [release for release in releases if name in by_release[release]]
    if has == releases:
        return name
    assert has == releases[releases.index(has[0]) : releases.index(has[-1]) + 1], f"{name} went and came back"
    return f"{name}@{has[0]}..{has[-1]}"


def _fields(answers: Facts, name: str) -> dict[str, str]:
    fields: dict[str, str] = answers.ask("request", name).get("fields", {})
    return fields


def _unjudged(answers: Facts) -> Iterator[str]:
    """Of one release: fields without a verdict, at the top and in the objects below."""
    top = names_of(PASSED) | names_of(IGNORED) | REFUSED.keys()
    for model, root in MODELS.items():
        if not (fields := _fields(answers, root)):
            yield f"{root} has no fields: vLLM has moved it"
        for name, classes in fields.items():
            if name not in top and f"{model}.{name}" not in REFUSED:
                yield f"{model}.{name} is a field of vLLM's requests that nobody has judged"
            elif name in names_of(PASSED) - _CLOSED:
                yield from _unjudged_below(answers, model, name, classes)


def _unjudged_below(answers: Facts, model: str, path: str, classes: str) -> Iterator[str]:
    for one in classes.split():
        for name, below in _fields(answers, one).items():
            if path not in NESTED[model]:
                yield f"{model}.{path} has objects of {one}, and no names are judged for them"
                return
            if name not in NESTED[model][path].split():
                yield f"{model}.{path}.{name} is a field of vLLM's requests that nobody has judged"
            elif path.count(".") < 3 and name != "image_pil" and not name.endswith("_embeds"):  # refused, both
                yield from _unjudged_below(answers, model, f"{path}.{name}", below)


def _stale(wheels: Mapping[Wheel, Facts]) -> Iterator[str]:
    had = {name for answers in wheels.values() for root in MODELS.values() for name in _fields(answers, root)}
    for name in sorted(names_of(PASSED) - had):
        yield f"{name} is passed, and no release of vLLM has it"
