"""For tools that still ask for it, such as `setup.py egg_info`: everything is in `pyproject.toml`."""

from setuptools import setup

setup()
