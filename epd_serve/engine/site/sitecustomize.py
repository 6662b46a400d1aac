"""Lets `import torchvision` succeed beside a CPU-only torch, and torch run below a path with a space. Owns these two
repairs; nothing else may live here.

torch 2.13 gives its own folder unquoted to the C++ linker, so that whatever is compiled in such a place fails, and
kills an engine at the first request for logprobs: there torch compiles nothing.

The registry's torchvision wheel is linked against CUDA. Beside a CPU torch its C extension cannot load, and
`import torchvision` dies with "operator torchvision::nms does not exist" although all that image processors need are
its pure-Python transforms. They work once the schemas of two operators are *defined* before torchvision is imported.

Python runs a module of this name at start-up when its folder is on PYTHONPATH; the launcher puts it there for stages
on CPU, so that it acts in every process vLLM spawns (API server, EngineCore, workers). It imports no torch by itself:
a finder waits for the first `import torchvision`. A `sitecustomize` further down `sys.path` still runs.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

if " " in sys.prefix:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
_SCHEMAS = ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # fmt: skip


class TorchvisionOperators:
    """Meta-path finder that defines torchvision's operator schemas just before torchvision is first imported.

    It finds nothing itself (always returns None) and takes itself off `sys.meta_path` when it has acted.
    """

    library: object = None  # torch.library.Library; the schemas vanish with it, so it lives as long as this class

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not cls]
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and not _extension_loads(spec):
            cls.library = _define_schemas()


def _extension_loads(spec: importlib.machinery.ModuleSpec) -> bool:
    """True when torchvision's own C extension loads here (a matching pair of wheels): then there is nothing to repair.

    Loading it early is harmless, torchvision loads the same file again.
    """
    import torch

    folders = list(spec.submodule_search_locations or ())
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    for library in (os.path.join(folder, "_C" + suffix) for folder in folders for suffix in suffixes):
        if os.path.exists(library):
            try:
                torch.ops.load_library(library)
            except (OSError, ImportError):
                return False
            return True
    return False


def _define_schemas() -> object:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")  # FRAGMENT: others may define theirs beside ours
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    return library


def _run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that this file shadows (Debian and some IDEs ship one)."""
    here = os.path.realpath(os.path.dirname(__file__))
    others = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":  # imported by `site` at start-up, not by a test or a type checker
    sys.meta_path.insert(0, TorchvisionOperators)
    _run_next_sitecustomize()
