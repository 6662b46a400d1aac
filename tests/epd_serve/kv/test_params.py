"""Both ends name one child's transfer alike, and agree on what a prompt is."""

from __future__ import annotations

import pytest

from epd_serve.kv.params import prompt_hash, receive_params, send_params, transfer_key
from epd_serve.wire import TransferKey

RID = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("at_prefill", "at_decode", "child"),
    [
        (f"chatcmpl-{RID}-1a2b3c4d", f"chatcmpl-{RID}-ffffffff", f"chatcmpl-{RID}"),
        (f"0_chatcmpl-{RID}-ffffffff", f"0_chatcmpl-{RID}-00000000", f"0_chatcmpl-{RID}"),
        (f"cmpl-{RID}-0-deadbeef", f"cmpl-{RID}-0-1a2b3c4d", f"cmpl-{RID}-0"),
        (f"chatcmpl-{RID}", f"chatcmpl-{RID}", f"chatcmpl-{RID}"),  # before vLLM 0.28: no suffix
        (f"cmpl-{RID}-12", f"cmpl-{RID}-12", f"cmpl-{RID}-12"),
    ],
)
def test_a_childs_key_is_the_same_at_both_ends(at_prefill: str, at_decode: str, child: str) -> None:
    keys = {transfer_key({"transfer_id": "T"}, request_id) for request_id in (at_prefill, at_decode)}
    assert keys == {TransferKey("T", child)}


def test_children_of_one_request_have_their_own_keys() -> None:
    ids = [f"{i}_chatcmpl-{RID}-1a2b3c4d" for i in range(3)] + [f"cmpl-{RID}-{i}-1a2b3c4d" for i in range(3)]
    assert len({transfer_key({"transfer_id": "T"}, request_id) for request_id in ids}) == 6


def test_requests_without_params_are_served_alone() -> None:
    assert send_params(None, "r") is None
    assert send_params({}, "r") is None
    assert receive_params({"transfer_id": "T"}, "r") is None


def test_params_are_read_as_the_proxy_wrote_them() -> None:
    peer = {"instance": "P0", "incarnation": "i", "endpoint": "ipc:///p"}
    parsed = receive_params({"transfer_id": "T", "peer": peer}, "r")
    assert parsed is not None
    assert (parsed.peer, parsed.incarnation, parsed.endpoint) == ("P0", "i", "ipc:///p")
    sent = send_params({"transfer_id": "T", "incarnation": "i"}, "r")
    assert sent is not None
    assert sent.incarnation == "i"


def test_a_prompt_is_its_tokens_and_its_items() -> None:
    hashes = {
        prompt_hash([1, 2, 3], []),
        prompt_hash([1, 2], []),
        prompt_hash([1, 2, 3], ["a"]),
        prompt_hash([1, 2, 3], ["b"]),
        prompt_hash([1, 2, 3], ["a", "b"]),
        prompt_hash([1, 2, 3], ["ab"]),
        prompt_hash([1, 2, 3], ["b", "a"]),
    }
    assert len(hashes) == 7
    assert prompt_hash((1, 2, 3), iter(["a"])) == prompt_hash([1, 2, 3], ["a"])
