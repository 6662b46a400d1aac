"""A record says what the value is, or the value is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import CorruptFeatureError, StoreError
from store.feature import RECORD_BYTES, FeatureMeta, decoded, encoded
from store.mooncake.master import MasterSettings, health_url, master_command

META = FeatureMeta("k" * 64, (1196, 3584), "float16", 1196 * 3584 * 2, 0x0123456789ABCDEF)

metas = st.builds(
    FeatureMeta,
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=48),
    st.lists(st.integers(0, (1 << 63) - 1), max_size=8).map(tuple),
    st.sampled_from(["float16", "bfloat16", "", "uint8"]),
    st.integers(1, 1 << 40),
    st.integers(0, (1 << 64) - 1),
)


@given(metas)
def test_what_is_encoded_is_decoded(meta: FeatureMeta) -> None:
    record = encoded(meta)
    assert len(record) == RECORD_BYTES
    assert decoded(record, meta.key, meta.nbytes) == meta


@given(st.integers(0, RECORD_BYTES * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    record = bytearray(encoded(META))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptFeatureError):
        decoded(bytes(record), META.key, META.nbytes)


def test_another_key_size_or_kind_of_value_is_refused() -> None:
    record = encoded(META)
    for key, data, nbytes in [
        ("other", record, META.nbytes),
        (META.key, record, META.nbytes + 1),
        (META.key, record[:-1], META.nbytes),
        (META.key, bytes(RECORD_BYTES), META.nbytes),
    ]:
        with pytest.raises(CorruptFeatureError):
            decoded(data, key, nbytes)


@pytest.mark.parametrize("bad", [{"shape": (1,) * 9}, {"dtype": "x" * 65}, {"shape": (-1,)}])
def test_what_does_not_fit_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(StoreError):
        replace(META, **bad)  # type: ignore[arg-type]


def test_a_master_binds_both_its_ports_to_the_address_it_is_given() -> None:
    settings = MasterSettings(host="10.0.0.1", rpc_port=1, metrics_port=2)
    command = master_command(settings)
    assert {"--rpc_address=10.0.0.1", "--rpc_port=1", "--metrics_host=10.0.0.1", "--metrics_port=2"} < set(command)
    assert health_url(settings) == "http://10.0.0.1:2/health"
