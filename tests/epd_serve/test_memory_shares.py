"""One device, divided among its instances."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd_serve.memory_shares import ENGINE_DEFAULT_SHARE, RESERVE, Need, divide, fixed_shares
from epd_serve.roles import Role

GIB = 1 << 30


def encoder(weights: int = GIB, activations: int = GIB, longest: int = 0) -> Need:
    return Need("E0", Role.E, weights, activations, runtime=GIB, longest=longest)


def model(name: str, *, weights: int = 16 * GIB, kv_least: int = 2 * GIB, **other: object) -> Need:
    return Need(
        name,
        Role(name[:-1]),
        weights,
        2 * GIB,
        runtime=GIB,
        kv_token=1024,
        kv_least=kv_least,
        **other,  # type: ignore[arg-type]
    )


sizes = st.integers(0, 40 * GIB)


@st.composite
def neighbours(draw: st.DrawFn) -> list[Need]:
    roles = draw(st.lists(st.sampled_from([Role.E, Role.P, Role.D, Role.PD, Role.EPD]), min_size=2, max_size=5))
    made = []
    for number, role in enumerate(roles):
        kv = role is not Role.E
        made.append(
            Need(
                f"{role.value}{number}",
                role,
                weights=draw(sizes),
                activations=draw(sizes),
                runtime=draw(st.integers(0, 2 * GIB)),
                longest=0 if kv else draw(sizes),
                kv_token=draw(st.integers(1, 1 << 20)) if kv else 0,
                kv_least=draw(sizes) if kv else 0,
            )
        )
    return made


@given(neighbours(), st.integers(GIB, 512 * GIB), st.integers(0, 512 * GIB))
def test_shares_of_neighbours_sum_below_one_and_nothing_is_negative(needs: list[Need], total: int, free: int) -> None:
    found = divide(total, needs, free)
    assert all(grant.kv >= 0 and grant.longest >= 0 and (grant.share or 0) > 0 for grant in found.grants)
    usable = max(0, found.free - int(total * RESERVE))
    if found.missing:
        assert found.missing == sum(need.least for need in needs) - usable
        return
    assert sum(grant.share or 0 for grant in found.grants) < 1
    assert found.taken <= usable
    assert all(grant.kv >= grant.need.kv_least and grant.longest <= grant.need.longest for grant in found.grants)


@given(neighbours(), st.integers(GIB, 256 * GIB), st.integers(0, 256 * GIB))
def test_a_larger_device_takes_nothing_from_anybody(needs: list[Need], total: int, more: int) -> None:
    small, large = divide(total, needs), divide(total + more, needs)
    assert large.missing <= small.missing
    if not small.missing:
        pairs = zip(small.grants, large.grants, strict=True)
        assert all(after.kv >= before.kv and after.longest >= before.longest for before, after in pairs)


@given(neighbours(), st.integers(GIB, 256 * GIB), st.data())
def test_heavier_weights_leave_nobody_more_cache(needs: list[Need], total: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(needs) - 1))
    one = needs[at]
    heavier = Need(**{**one.__dict__, "weights": one.weights + GIB})
    before, after = divide(total, needs), divide(total, [*needs[:at], heavier, *needs[at + 1 :]])
    assert after.missing >= before.missing
    assert sum(grant.kv for grant in after.grants) <= sum(grant.kv for grant in before.grants)


def test_decode_gets_twice_the_cache_that_prefill_gets_beyond_the_least() -> None:
    found = divide(64 * GIB, [encoder(), model("P0"), model("D0")])
    _, prefill, decode = found.grants
    beyond_p, beyond_d = prefill.kv - 2 * GIB, decode.kv - 2 * GIB
    assert beyond_p > 0 and abs(beyond_d - 2 * beyond_p) <= 2
    assert (prefill.kv_override, decode.kv_override) == (prefill.kv, decode.kv)


def test_neighbours_are_told_their_cache_and_an_instance_alone_is_not() -> None:
    shared = divide(64 * GIB, [encoder(), model("P0")])
    assert [grant.kv_override is not None for grant in shared.grants] == [False, True]
    (alone,) = divide(64 * GIB, [model("P0")]).grants
    assert alone.share is None and alone.kv_override is None
    assert alone.kv == int(64 * GIB * ENGINE_DEFAULT_SHARE) - 18 * GIB


def test_an_encoder_gets_half_of_the_rest_for_the_longest_clip() -> None:
    small, large = divide(64 * GIB, [encoder(longest=40 * GIB), model("P0")]).grants
    assert 0 < small.longest < 40 * GIB
    assert abs(small.longest - (large.kv - 2 * GIB)) <= 2


def test_what_does_not_fit_is_counted() -> None:
    found = divide(40 * GIB, [model("P0"), model("D0")])
    assert found.missing == 2 * 21 * GIB - (40 * GIB - int(40 * GIB * RESERVE))
    assert divide(16 * GIB, [model("PD0")]).missing > 0


def test_a_device_in_use_has_less_to_divide() -> None:
    idle, used = divide(64 * GIB, [encoder(), model("P0")]), divide(64 * GIB, [encoder(), model("P0")], 40 * GIB)
    assert used.grants[1].kv == idle.grants[1].kv - 24 * GIB
    (alone,) = divide(64 * GIB, [model("PD0")], 40 * GIB).grants
    assert alone.share is not None and alone.share * 64 * GIB + GIB <= 40 * GIB


def test_a_share_of_the_operators_own_is_kept() -> None:
    _, own = divide(64 * GIB, [encoder(), model("P0", fixed_share=0.5)]).grants
    assert own.share == 0.5 and own.kv == 32 * GIB - 18 * GIB and own.kv_override is None
    _, told = divide(64 * GIB, [encoder(), model("P0", fixed_kv=3 * GIB)]).grants
    assert told.kv == 3 * GIB and told.kv_override is None


@given(st.lists(st.sampled_from(list(Role)), min_size=1, max_size=6))
def test_fixed_shares_stay_within_nine_tenths(roles: list[Role]) -> None:
    shares = fixed_shares(roles)
    if len(roles) == 1:
        assert shares == (None,)
    else:
        assert all((share or 0) > 0 for share in shares) and sum(share or 0 for share in shares) <= 0.901
