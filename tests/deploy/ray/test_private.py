"""What we use of Ray that may go."""

from __future__ import annotations

import importlib.util

import pytest
from ray._private import state

from deploy.ray import private
from epd_serve.errors import ConfigError


def test_a_ray_that_lacks_what_we_use_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(state, "available_resources_per_node")
    spec = importlib.util.spec_from_file_location("private_anew", private.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ConfigError, match=r"available_resources_per_node.*pip install ray=="):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
