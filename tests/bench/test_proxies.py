"""Duplicates over several proxies: every request is answered, and every encode is counted."""

from __future__ import annotations

from bench.proxies import count_encodes


def test_a_single_request_is_one_encode():
    assert count_encodes(1, encoders=2, proxies=1, encode_s=0.001).for_duplicates == 1


def test_64_duplicates_over_two_encoders_and_two_proxies_are_one_encode():
    encodes = count_encodes(64, encoders=2, proxies=2)

    assert (encodes.for_duplicates, encodes.for_known) == (1, 0)
