"""Tiny random-weight models of other architectures: one JSON file each in `families/`, turned into a model folder.

Owns the reading of those files and what follows from them: token ids, the chat template, the tokenizer with the
family's own special tokens. The vocabulary is that of `blank/`, as of every random model. Leaves to others: the names
in the command line (`presets`), drawing the weights (`checkpoint`).

A family file holds
    about         one line for `--help`
    tokens        special tokens beside the demo tokenizer's own
    placeholders  per modality, what stands for an item in the prompt; its keys are what the model understands
    tokenizer     keys of tokenizer_config.json by which a processor finds its tokens (optional)
    rename_weights  prefixes of weight names, as transformers saves them → as checkpoints have them (optional)
    transpose_weights  ends of names whose last two dimensions checkpoints have the other way round (optional)
    files         file name → content. `id:<token>` stands for a token's id, `vocab` for the size of the vocabulary
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FAMILIES = Path(__file__).parent / "families"
_TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{m.role}}\n"
    "{% if m.content is string %}{{m.content}}{% else %}"
    "{% for c in m.content %}ITEMS{% endfor %}"
    "{% for c in m.content %}{% if c.type=='text' %}{{c.text}}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def family_names() -> tuple[str, ...]:
    """Presets that this module makes, in alphabetical order."""
    return tuple(sorted(path.stem for path in _FAMILIES.glob("*.json")))


def read_family(name: str) -> dict[str, Any]:
    """The content of a family file."""
    family: dict[str, Any] = json.loads((_FAMILIES / f"{name}.json").read_text(encoding="utf-8"))
    return family


def write_family(model: Path, name: str) -> dict[str, Any]:
    """Write everything but the weights into `model`, which holds the tokenizer files of `blank/`.

    Returns:
        How weights have to change, for `checkpoint`: the entries above that end in `_weights`.
    """
    family = read_family(name)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    ids = _add_tokens(tokenizer, family["tokens"])
    _write(model / "tokenizer.json", tokenizer)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] += family["tokens"]
    _write(model / "tokenizer_config.json", settings | family.get("tokenizer", {}))
    for file, content in family["files"].items():
        _write(model / file, _filled(content, ids))
    items = "".join(
        f"{{% if c.type=='{modality}' %}}{placeholder}{{% endif %}}"
        for modality, placeholder in family["placeholders"].items()
    )
    (model / "chat_template.jinja").write_text(_TEMPLATE.replace("ITEMS", items))
    return {key: value for key, value in family.items() if key.endswith("_weights")}


def _add_tokens(tokenizer: dict[str, Any], tokens: list[str]) -> dict[str, int]:
    """Append special tokens to the content of tokenizer.json; ids of all tokens afterwards."""
    ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = tokenizer["added_tokens"][0]
    for token in tokens:
        ids[token] = len(ids)
        tokenizer["added_tokens"].append({**special, "id": ids[token], "content": token})
    return ids


def _filled(content: Any, ids: dict[str, int]) -> Any:
    if isinstance(content, dict):
        return {key: _filled(value, ids) for key, value in content.items()}
    if isinstance(content, list):
        return [_filled(value, ids) for value in content]
    if content == "vocab":
        return len(ids)
    if isinstance(content, str) and content.startswith("id:"):
        return ids[content.removeprefix("id:")]
    return content


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
