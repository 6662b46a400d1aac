"""Conversations: what is counted, and one small run over simulated stages."""

from __future__ import annotations

import pytest

from tests.soak import conversations
from tests.soak.conversations import Talks, figures, measured


def rows(way: str, **more: float) -> list[dict[str, object]]:
    turn = {"way": way, "tpot_s": 0.01}
    return [
        {**turn, "number": 1, "ttft_s": 0.4, "new_tokens": 1000, "oracle_tokens": 0},
        {**turn, "number": 2, "ttft_s": 0.1, "new_tokens": 100, "oracle_tokens": 960},
        {**turn, "number": 3, "ttft_s": 0.3, "new_tokens": 100, "oracle_tokens": 1056},
        {
            "way": way,
            "images": 3,
            "encoded": 3.0,
            "imbalance_p99": 1.5,
            "kv_bytes": 1200.0 * conversations.BYTES_PER_TOKEN,
            "hit_tokens": 1008.0,
            **more,
        },
    ]


def test_figures_are_of_later_turns_over_first_ones_and_of_what_was_needed() -> None:
    found = figures([*rows("prefixes"), *rows("load", imbalance_p99=1.25, encoded=6.0)])
    assert (found["later_turn_ttft_ratio"], found["encodes_per_image"]) == (0.5, 1.0)
    assert (found["kv_sent_over_new"], found["hits_over_oracle"]) == (1.0, 0.5)
    assert found["load_encodes_per_image"] == 2.0 and found["imbalance_over_load"] == 1.2


def test_samples_are_told_apart_by_their_labels() -> None:
    text = 'a_total{which="x",of="1"} 5.0\na_total{which="y",of="1"} 7.0\na_total_more 9.0\nb 1.0\n'
    found = list(conversations.samples(text, "a_total"))
    assert found == [({"which": "x", "of": "1"}, 5.0), ({"which": "y", "of": "1"}, 7.0)]
    assert list(conversations.samples(text, "b")) == [({}, 1.0)]


def test_a_later_turn_is_prefilled_and_sent_but_for_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "LAYOUT", "E-2P-2D")
    found = figures(list(measured("prefixes", Talks(2, think_s=0.3, turns=3, at_once=2, answer=40))))
    assert found["hits_over_oracle"] == found["encodes_per_image"] == 1.0
    assert 0.95 < found["kv_sent_over_new"] <= 1.0
