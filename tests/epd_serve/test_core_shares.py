"""`--core-share`: what each instance gets, and what is refused. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.core_shares import DECODE_SHARE, LEAST_SHARE, neighbours_shares, parse_core_shares, share_cores
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.placement import InstancePlan, lower
from epd_serve.stage_work import StageWork

QWEN_7B = StageWork(encode=4.5e12, prefill=8.9e12, decode=0.9e12)


def plans(layout: str) -> tuple[InstancePlan, ...]:
    parsed = parse(layout)
    return lower(parsed, range(parsed.device_count))


def shares(text: str, layout: str, work: StageWork | None = None) -> dict[str, float | None]:
    given = share_cores(text, plans(layout), work)
    return {plan.id: None if plan.core_share is None else round(plan.core_share, 6) for plan in given}


@pytest.mark.parametrize("layout", ["(E-P)-D", "TP1", "E-P-D"])
def test_without_the_option_nobody_is_limited(layout: str) -> None:
    assert set(shares("", layout).values()) == {None}


@pytest.mark.parametrize(
    ("text", "layout", "expected"),
    [
        ("E=0.3,P=0.7", "(E-P)-D", {"E0": 0.3, "P0": 0.7, "D0": None}),
        (" E = 0.3 , P0 = .5 ", "(E-P)-D", {"E0": 0.3, "P0": 0.5, "D0": None}),
        ("E=0.4", "(E-P-D)", {"E0": 0.4, "P0": 0.3, "D0": 0.3}),
        ("E=0.3,E1=0.1", "(E-PD)x2", {"E0": 0.3, "PD0": 0.7, "E1": 0.1, "PD1": 0.9}),
        ("E1=0.1", "(E-PD)x2", {"E0": None, "PD0": None, "E1": 0.1, "PD1": 0.9}),
        ("E=0.2", "(2E-PD)", {"E0": 0.2, "E1": 0.2, "PD0": 0.6}),
        ("P=0.6", "(E-P)-P-D", {"E0": 0.4, "P0": 0.6, "P1": None, "D0": None}),
        ("E=0.25,PD=0.75", "(E:tp2-PD:tp2)", {"E0": 0.25, "PD0": 0.75}),
    ],
)
def test_roles_and_instances_are_named_and_the_rest_is_for_the_others(
    text: str, layout: str, expected: dict[str, float | None]
) -> None:
    assert shares(text, layout) == expected


@pytest.mark.parametrize(
    ("text", "layout", "reason"),
    [
        ("E=0.5,P=0.6", "(E-P)-D", "E0 0.5 + P0 0.6 is 1.1 of one device; together they can have at most 1"),
        ("E=0.6", "(2E-P)-D", "E0 0.6 + E1 0.6 is 1.2 of one device"),
        ("E=1", "(E-P)-D", "E0 1 leaves nothing for P0 on the same device; give less"),
        ("D=0.5", "(E-P)-D", "D shares its device with nobody, so cores it leaves would stand idle; leave D out"),
        ("P1=0.5", "(E-P)-P-D", "P1 shares its device with nobody"),
        ("E=0.5", "E-P-D", "E shares its device with nobody"),
        ("PD=0.5", "(E-P)-D", "the layout has no PD; did you mean P?"),
        ("E2=0.5", "(E-P)-D", "the layout has no E2; did you mean E?"),
        ("X=0.5", "(E-P)-D", "the layout has no X; it has E, P, D, E0, P0, D0"),
    ],
)
def test_what_does_not_fit_the_layout_is_refused(text: str, layout: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        share_cores(text, plans(layout))
    assert str(refused.value).startswith(f"--core-share: {reason}")
    assert refused.value.param == "--core-share"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("E=1.1", "E gets 1.1; a share is a fraction of a device's cores, above 0, at most 1"),
        ("E=0", "E gets 0;"),
        ("E=-0.5", "E gets -0.5;"),
        ("E=nan", "E gets nan;"),
        ("E=30%", "E gets 30%;"),
        ("E=", "E gets nothing;"),
        ("E", "'E' is not NAME=SHARE; for example E=0.3,P=0.7, or auto"),
        ("=0.3", "'=0.3' is not NAME=SHARE"),
        ("automatic", "'automatic' is not NAME=SHARE"),
        ("E=0.3,E=0.4", "E is given twice"),
    ],
)
def test_what_is_no_share_is_refused_before_a_layout_is_looked_at(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_core_shares(text)
    assert str(refused.value).startswith(f"--core-share: {reason}")


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("(E-P)-D", {"E0": 0.335821, "P0": 0.664179, "D0": None}),
        ("(E-D)-P", {"E0": 0.7, "D0": 0.3, "P0": None}),
        ("(E-PD)", {"E0": 0.235075, "PD0": 0.764925}),
        ("(D-D)-P", {"D0": 0.5, "D1": 0.5, "P0": None}),
        ("E-P-D", {"E0": None, "P0": None, "D0": None}),
    ],
)
def test_auto_divides_by_what_is_computed_and_leaves_decode_its_bandwidth(
    layout: str, expected: dict[str, float | None]
) -> None:
    assert shares("auto", layout, QWEN_7B) == expected


def test_auto_treats_compute_alike_when_the_model_is_unknown() -> None:
    assert shares("auto", "(E-P)-D") == {"E0": 0.5, "P0": 0.5, "D0": None}
    assert shares("auto", "(E-P-D)") == {"E0": 0.35, "P0": 0.35, "D0": DECODE_SHARE}


def test_auto_gives_a_small_encoder_enough_for_one_picture() -> None:
    tiny = StageWork(encode=1.0, prefill=1e6, decode=1.0)
    assert shares("auto", "(E-P)-D", tiny) == {"E0": LEAST_SHARE, "P0": 1 - LEAST_SHARE, "D0": None}


flops = st.floats(1.0, 1e15)


@given(
    st.lists(st.sampled_from(["E", "P", "D", "PD", "EP", "EPD"]), min_size=2, max_size=9),
    st.one_of(st.none(), st.builds(StageWork, flops, flops, flops)),
)
def test_auto_always_divides_one_device(roles: list[str], work: StageWork | None) -> None:
    given = share_cores("auto", plans(f"({'-'.join(roles)})"), work)
    found = [plan.core_share for plan in given if plan.core_share is not None]
    assert len(found) == len(roles)
    assert min(found) >= min(LEAST_SHARE, 1 / len(roles)) - 1e-9
    assert sum(found) == pytest.approx(1, abs=1e-9)


def test_neighbours_are_listed_in_one_order_for_all_of_them() -> None:
    given = share_cores("E=0.3,P=0.7", plans("(E-P)x2-D"))
    by_name = {plan.id: neighbours_shares(plan, given) for plan in given}
    assert list(by_name["E0"].items()) == list(by_name["P0"].items()) == [("E0", 0.3), ("P0", 0.7)]
    assert by_name["E1"] == {"E1": 0.3, "P1": 0.7}
    assert by_name["D0"] == {}
