"""A vLLM plugin of a test's own in every stage that is started meanwhile; plain vLLM does not load it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def plugin(folder: Path, module: str) -> Iterator[None]:
    """`module`: its `register` is called in each process of a stage. `folder`: of the test, for the metadata."""
    name = module.rpartition(".")[2]
    metadata = folder / f"epd_test_{name}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: epd-test-{name.replace('_', '-')}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {module}:register\n")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), str(ROOT), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
