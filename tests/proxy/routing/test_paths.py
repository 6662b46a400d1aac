"""Path selection: the table of the design, and what holds for any set of roles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.roles import Role
from proxy.routing.paths import paths

ROLES = st.frozensets(st.sampled_from(list(Role)))


@pytest.mark.parametrize(
    ("roles", "multimodal", "text"),
    [
        ("EPD", "EPD", "EPD"),
        ("PD", "PD", "PD"),
        ("E PD", "E-PD", "PD"),
        ("EP D", "EP-D", "EP-D"),
        ("E P D", "E-P-D", "P-D"),
        ("P D", "P-D", "P-D"),
        ("EPD E PD", "EPD E-PD", "EPD PD"),
        ("EPD E P D", "EPD E-P-D", "EPD P-D"),
        ("E PD EP D", "E-PD EP-D", "PD EP-D"),
        ("E P EP D", "EP-D E-P-D", "EP-D P-D"),
        ("E P", "", ""),
        ("D", "", ""),
        ("", "", ""),
    ],
)
def test_paths_of_the_layouts(roles: str, multimodal: str, text: str) -> None:
    present = {Role(role) for role in roles.split()}
    assert " ".join(path.name for path in paths(present, multimodal=True)) == multimodal
    assert " ".join(path.name for path in paths(present, multimodal=False)) == text


@given(ROLES, st.booleans(), st.booleans())
def test_paths_use_present_roles_prefill_before_decode_and_answer(
    roles: frozenset[Role], multimodal: bool, fused: bool
) -> None:
    for path in paths(roles, multimodal=multimodal, fused=fused):
        assert set(path.required) <= roles
        assert path.decode.decodes or fused
        assert path.decode.prefills if path.prefill is None else path.prefill.prefills
        assert path.head.prefills and (path.tail is None) == (path.head.decodes or fused)
        assert not (path.encode and path.head.encodes), "nobody encodes twice"
        assert not path.encode or (multimodal and Role.E in roles)
        assert not fused or path.prefill is None


@pytest.mark.parametrize(
    ("roles", "multimodal", "text"),
    [
        ("EPD PD E P D", "EPD E-PD", "EPD PD"),
        ("E P D", "E-P", "P"),
        ("P D", "P", "P"),
        ("EP D", "EP", "EP"),
        ("E D", "", ""),
    ],
)
def test_what_needs_one_instance_has_a_prefill_alone_where_there_is_no_other(
    roles: str, multimodal: str, text: str
) -> None:
    present = {Role(role) for role in roles.split()}
    assert " ".join(path.name for path in paths(present, multimodal=True, fused=True)) == multimodal
    assert " ".join(path.name for path in paths(present, multimodal=False, fused=True)) == text


@given(ROLES, ROLES, st.booleans())
def test_more_roles_never_take_a_path_away(roles: frozenset[Role], more: frozenset[Role], multimodal: bool) -> None:
    ends = {(path.prefill, path.decode) for path in paths(roles, multimodal=multimodal)}
    assert ends <= {(path.prefill, path.decode) for path in paths(roles | more, multimodal=multimodal)}
