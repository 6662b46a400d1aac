"""A second tier among machines that are reached by IPv6."""

from __future__ import annotations

import subprocess
import sys

import pytest

from store.addresses import authority, environment_at
from tests.store.conftest import Master
from tests.waiting import PATIENCE_S

# A process of its own: how Mooncake looks for peers is decided once, when it is loaded.
TO_ITSELF_AND_BACK = """
import ctypes, sys
from store.mooncake.client import MooncakeClient, MooncakeConfig
config = MooncakeConfig(master=sys.argv[1], host="::1", segment_bytes=16 << 20, timeout_s=30.0)
there, back = MooncakeClient(config), MooncakeClient(MooncakeConfig(master=sys.argv[1], host="::1", timeout_s=30.0))
one, other = ctypes.create_string_buffer(b"feature", 4096), ctypes.create_string_buffer(4096)
there.register(ctypes.addressof(one), 4096)
back.register(ctypes.addressof(other), 4096)
print(there.put("k", [(ctypes.addressof(one), 4096)]), back.get("k", [(ctypes.addressof(other), 4096)]), other.value)
"""


def test_an_ipv6_address_is_bracketed_before_its_port() -> None:
    assert [authority(host, 8000) for host in ("10.0.0.4", "name", "fd00::4")] == [
        "10.0.0.4:8000",
        "name:8000",
        "[fd00::4]:8000",
    ]
    assert ("MC_USE_IPV6" in environment_at("fd00::4"), "MC_USE_IPV6" in environment_at("10.0.0.4")) == (True, False)


@pytest.mark.mooncake
@pytest.mark.slow
def test_a_feature_goes_there_and_back_by_ipv6() -> None:
    master = Master("::1")
    master.start()
    try:
        argv = [sys.executable, "-c", TO_ITSELF_AND_BACK, authority("::1", master.settings.rpc_port)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.stdout.split() == ["Outcome.DONE", "Outcome.DONE", "b'feature'"], done.stderr
    finally:
        master.kill()
