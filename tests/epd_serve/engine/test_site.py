"""The torchvision repair that CPU stages get through PYTHONPATH."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parents[3] / "epd_serve/engine/site"
needs_torchvision = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "torchvision")), reason="needs torch and torchvision"
)


def run(script: str, *more_path: Path) -> str:
    """Standard output of `script` in a fresh Python with the repair first on PYTHONPATH."""
    path = os.pathsep.join(str(entry) for entry in (SITE, *more_path))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_start_up_imports_no_torch():
    assert run("import sys; print({'torch', 'torchvision'} & set(sys.modules))") == "set()"


@pytest.mark.parametrize(("prefix", "disabled"), [("/opt/My Work/.venv", "1"), ("/opt/epd/.venv", None)])
def test_below_a_path_with_a_space_torch_compiles_nothing(prefix: str, disabled: str | None) -> None:
    script = f"""
import os, runpy, sys
os.environ.pop("TORCHDYNAMO_DISABLE", None)
sys.prefix = {prefix!r}
runpy.run_path({str(SITE / "sitecustomize.py")!r})
print(os.environ.get("TORCHDYNAMO_DISABLE"))
"""
    assert run(script) == str(disabled)


@needs_torchvision
@pytest.mark.slow  # torchvision takes seconds to import; every stage of the short end-to-end tests starts like this
def test_torchvision_imports_its_operators_are_declared_once_and_the_repair_takes_itself_away():
    """One process for all of it."""
    script = """
import sys, torchvision, torch
from torchvision.transforms.v2 import functional
print(torch.ops.torchvision.nms.default._schema)
print([finder for finder in sys.meta_path if "Torchvision" in str(finder)])
"""
    schema, finders = run(script).splitlines()
    assert schema.startswith("torchvision::nms(")
    assert finders == "[]"


def test_a_missing_torchvision_is_still_an_import_error(tmp_path):
    """The finder must not turn 'not installed' into something else (nor import torch for it)."""
    script = """
import sys
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
try:
    import torchvision
except ModuleNotFoundError as error:
    print(error.name, "torch" in sys.modules)
"""
    assert run(script) == "torchvision False"


def test_a_sitecustomize_further_down_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the other one', __name__)")

    assert run("print('script')", tmp_path).splitlines() == ["the other one sitecustomize", "script"]


def test_a_relative_or_missing_path_entry_does_no_harm(tmp_path):
    assert run("print('script')", Path("no/such/folder"), Path()) == "script"
