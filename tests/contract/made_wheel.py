"""A small wheel, written by tests: a package `vllm` with the kinds of things that the contract reads."""

from __future__ import annotations

import zipfile
from pathlib import Path

_BASE = "vllm/distributed/ec_transfer/ec_connector"

FILES = {
    "vllm/__init__.py": "from vllm.config import Config\n",
    "vllm/config.py": """
from typing import Literal
from dataclasses import dataclass
Policy = Literal["fcfs", "priority"]
@dataclass
class TransferConfig:
    role: Literal["producer", "consumer"] | None = None
    extra: dict[str, str] | None = None
@dataclass
class Config:
    transfer: TransferConfig | None = None
    policy: Policy = "fcfs"
    enforce_eager: bool = False
""",
    "vllm/request.py": """
from vllm.config import Config
class Item:
    identifier: str
class Request:
    def __init__(self, items: list[Item] | None, config: Config):
        self.items = items or []
        self.config = config
    @property
    def is_done(self) -> bool: return False
    def finish(self, reason: str, *, at: float = 0.0) -> Config: ...
def make(items: list[Item], config: Config) -> Request: ...
""",
    f"{_BASE}/base.py": """
from abc import ABC, abstractmethod
class Base(ABC):
    def __init__(self, config): self._private = config
    @abstractmethod
    def load(self, items, **kwargs): ...
    def finished(self, request, count: int): ...
    def never(self): ...
""",
    "vllm/worker.py": """
def step(ec_connector, cache, request):
    ec_connector.load(cache, layer=1)
    ec_connector.finished(request, 3)
""",
    "vllm/engine/arg_utils.py": """
from vllm.config import Config
class EngineArgs:
    def add(parser):
        kwargs = get_kwargs(Config)
        parser.add_argument("--transfer-config", **kwargs["transfer"])
        parser.add_argument("--policy", "-p", **{**kwargs["policy"], "default": None})
        parser.add_argument("--enforce-eager", **kwargs["enforce_eager"])
""",
    "vllm/envs.py": 'NAMES = {"VLLM_KNOWN": 1}\n',
    "vllm/plugins/__init__.py": 'GROUP = "vllm.general_plugins"\n',
}


def made_wheel(folder: Path, **changed: str) -> Path:
    """Writes the wheel. `changed`: other texts, by the last part of a module's name."""
    path = folder / "vllm_made-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, changed.get(Path(name).stem, text))
    return path
