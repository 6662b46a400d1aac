"""Duplicates over several proxies: every request is answered, and every encode is counted."""

from __future__ import annotations

from bench.proxies import count_encodes


def test_a_single_request_is_one_encode():
    assert count_encodes(1, encoders=2, proxies=1, encode_s=0.001).for_duplicates == 1


def test_every_duplicate_is_answered_and_no_encoder_encodes_twice():
    encodes = count_encodes(8, encoders=2, proxies=2, encode_s=0.05)

    assert 1 <= encodes.for_duplicates <= 2
