"""What people are shown of nodes."""

from __future__ import annotations

import pytest

from deploy.memory.placement_table import short_node


@pytest.mark.parametrize(
    ("node", "shown"),
    [
        ("local", "local"),
        ("192.168.100.100", "192.168.100.100"),
        ("4f9c" * 14, "4f9c4f9c"),
        ("epd-node-5d4f8c-x2x7q.1a2b3c4d", "epd-node-5d4f8c-x2x7q"),
        ("epd-node-5d4f8c-k9k1p.5e6f7a8b", "epd-node-5d4f8c-k9k1p"),
    ],
)
def test_a_node_is_shown_by_what_tells_it_from_others(node: str, shown: str) -> None:
    assert short_node(node) == shown
