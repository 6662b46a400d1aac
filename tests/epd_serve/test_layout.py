"""The layout notation: every layout of the papers, canonical text, and carets under faults."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import LayoutError
from epd_serve.layout import Group, Layout, Member
from epd_serve.layout_parser import parse
from epd_serve.roles import Role

CANONICAL = {
    "TP1": "EPD",
    "TP2": "EPD:tp2",
    "TP1x2": "2EPD",
    "TP2×2": "2EPD:tp2",
    "E-PD": "E-PD",
    "(E-PD)": "(E-PD)",
    "EP-D": "EP-D",
    "EP+D": "EP-D",
    "E+P+D": "E-P-D",
    "ED-P": "ED-P",
    "E-P-D": "E-P-D",
    "(E-P)-D": "(E-P)-D",
    "(E-D)-P": "(E-D)-P",
    "(E-PD)x2": "(E-PD)x2",
    "(E-PD)×2": "(E-PD)x2",
    "1E3P4D": "E-3P-4D",
    "1EP1D": "EP-D",
    "2E1P:tp2": "2E-P:tp2",
    "2E-P-D": "2E-P-D",
    "Ex2-P-D": "2E-P-D",
    "2Ex3-P-D": "6E-P-D",
    "E-E-P-D": "2E-P-D",
    "E-P-E-D": "E-P-E-D",
    "(E)-P-D": "E-P-D",
    "(E)x2-P-D": "2E-P-D",
    "(2E-P)-D": "(2E-P)-D",
    "(E-E)-P-D": "(2E)-P-D",
    "(E-P)-(E-P)-D": "(E-P)x2-D",
    "P:tp2-D:tp2": "P:tp2-D:tp2",
    "P:tp1-D": "P-D",
    "E:tp2x2-PD": "2E:tp2-PD",
    "(E:tp2-P:tp2)-D": "(E:tp2-P:tp2)-D",
    "TP1-E-PD": "EPD-E-PD",
    "EPD": "EPD",
    " (E-P)-D ": "(E-P)-D",
}


@pytest.mark.parametrize(("spec", "canonical"), CANONICAL.items())
def test_every_layout_of_the_papers_parses_to_its_canonical_text(spec: str, canonical: str) -> None:
    assert str(parse(spec)) == canonical


members = st.builds(Member, role=st.sampled_from(Role), count=st.integers(1, 4))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    tp = draw(st.integers(1, 4))
    drawn = draw(st.lists(members, min_size=1, max_size=3))
    return Group(tuple(Member(m.role, tp, m.count) for m in drawn), draw(st.integers(1, 4)))


layouts = st.lists(groups(), min_size=1, max_size=5).map(Layout.of)


@given(layouts)
def test_parsing_the_text_of_a_layout_gives_it_back(layout: Layout) -> None:
    assert parse(str(layout)) == layout


@given(layouts)
def test_canonical_text_is_a_fixed_point(layout: Layout) -> None:
    assert str(parse(str(layout))) == str(layout)


@given(layouts)
def test_merging_neighbours_keeps_the_counts(layout: Layout) -> None:
    spread = Layout.of([Group(group.members) for group in layout.groups for _ in range(group.repeat)])
    assert spread == layout
    assert (spread.device_count, spread.instance_count) == (layout.device_count, layout.instance_count)


@given(st.text(alphabet="EPDTx×-+():tp0123456789 eQ²", max_size=14))
def test_any_text_parses_to_something_stable_or_is_refused_inside_the_text(spec: str) -> None:
    refusal, layout = None, None
    try:
        layout = parse(spec)
    except LayoutError as error:
        refusal = error
    assert refusal is None or 0 <= refusal.position <= len(refusal.spec)
    assert layout is None or parse(str(layout)) == layout


FAULTS = {
    "": (0, "is empty"),
    "   ": (0, "is empty"),
    "X": (0, "unknown stage 'X'"),
    "E-Q": (2, "unknown stage 'Q'"),
    "e-p-d": (0, "stages are capital: E"),
    "E_P": (1, "unexpected '_'"),
    "E P": (1, "unexpected ' '"),
    "(E-P": (0, "never closed"),
    "(E-P-D": (0, "never closed"),
    "E-P)-D": (3, "never opened"),
    "()": (1, "before this parenthesis"),
    "(E-)-P": (3, "before this parenthesis"),
    "((E-P))-D": (1, "do not nest"),
    "(E-(P-D))": (3, "do not nest"),
    "(E:tp2-P)-D": (7, "mixed tp"),
    "(TP1-E)": (1, "TP is a whole monolith"),
    "EE-P": (1, "E twice"),
    "EPDP": (3, "P twice"),
    "PE-D": (0, "write EP"),
    "DP": (0, "write PD"),
    "0E-P-D": (0, "zero"),
    "Ex0-P-D": (2, "zero"),
    "TP0": (2, "zero"),
    "P:tp0-D": (4, "zero"),
    "TP": (2, "expected a number"),
    "Ex-P": (2, "expected a number"),
    "P:2-D": (1, "expected :tp"),
    "99999999999E-P-D": (0, "more than 4096"),
    "P:tp99999-D": (4, "more than 1024"),
    "(E-PD)x4096": (0, "8192 instances"),
    "E--P": (2, "found '-'"),
    "E-": (2, "ends where an instance was expected"),
    "-E": (0, "found '-'"),
    "(E+P)-D": (2, "unexpected '+'"),
    "2-E": (1, "found '-'"),
}


@pytest.mark.parametrize(("spec", "fault"), FAULTS.items())
def test_a_fault_is_named_with_a_caret_under_it(spec: str, fault: tuple[int, str]) -> None:
    position, reason = fault
    with pytest.raises(LayoutError) as refused:
        parse(spec)
    assert refused.value.position == position

    assert reason in refused.value.reason
    assert str(refused.value).splitlines()[2] == "  " + " " * position + "^"
