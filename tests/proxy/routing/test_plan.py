"""Plans: paths by roles, where they go, what they keep away from; nothing but the question and the view decides."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epd_serve.roles import Role
from proxy.routing.plan import Plan, Question, View, make_plan, paths, ways
from proxy.routing.policy import POLICIES, Candidate

HEADS = (Role.P, Role.EP, Role.PD, Role.EPD)


@st.composite
def views(draw: st.DrawFn) -> View:
    live = {}
    for role in draw(st.sets(st.sampled_from(list(Role)), min_size=1)):
        live[role] = tuple(
            Candidate(
                f"{role}{number}",
                "1",
                draw(st.integers(0, 500)),
                last_pick=draw(st.integers(0, 9)),
                rate=draw(st.sampled_from([0.0, 100.0, 400.0])),
                suspended=draw(st.booleans()),
            )
            for number in range(draw(st.integers(1, 3)))
        )
    return View(live, frozenset(live), draw=draw(st.integers(0, 2**32 - 1)))


@st.composite
def questions(draw: st.DrawFn) -> Question:
    items = tuple(map(float, draw(st.lists(st.integers(1, 900), max_size=3))))
    names = [(f"{role}{number}", "1") for role in Role for number in range(3)]
    return Question(
        float(draw(st.integers(1, 900))),
        items,
        encoded=bool(items) and draw(st.booleans()),
        fused=draw(st.booleans()),
        avoid=draw(st.frozensets(st.sampled_from(names))),
    )


@dataclass(frozen=True)
class Parts:
    """Who takes part in a plan."""

    plan: Plan

    @property
    def all(self) -> list[Candidate]:
        picks = [self.plan.head, *([self.plan.tail] if self.plan.tail is not None else [])]
        return [pick.chosen for pick in picks]


@given(questions(), views(), st.sampled_from(sorted(POLICIES)))
def test_a_plan_is_of_instances_that_are_there_and_the_same_for_the_same_question(
    question: Question, view: View, policy: str
) -> None:
    plan = make_plan(question, view, policy)
    assert plan == make_plan(question, view, policy)
    if plan is None:
        return
    there = {one.id for role in view.live for one in view.live[role]}
    assert all(one.id in there for one in Parts(plan).all)
    roles = [plan.path.head, *([plan.path.tail] if plan.path.tail else [])]
    assert [one.id.rstrip("0123456789") for one in Parts(plan).all] == roles
    assert 0 < plan.left <= question.tokens
    assert plan.clear is not any(one.incarnation_id in question.avoid for one in Parts(plan).all)


@given(questions(), views(), st.sampled_from(sorted(POLICIES)))
@example(
    Question(1.0, fused=True, avoid=frozenset({("EPD0", "1")})),
    View({role: (Candidate(f"{role}0", "1", 0.0),) for role in (Role.E, Role.EPD, Role.P)}, frozenset()),
    "first-token",
)
def test_it_keeps_away_from_where_the_request_failed_while_there_is_another_way(
    question: Question, view: View, policy: str
) -> None:
    plan = make_plan(question, view, policy)
    rest = {
        role: tuple(one for one in its if one.incarnation_id not in question.avoid) for role, its in view.live.items()
    }
    without = View({role: its for role, its in rest.items() if its}, view.wanted, draw=view.draw)
    elsewhere = make_plan(question, without, policy)
    if plan is None or elsewhere is None:
        return
    # P answers alone what needs one instance for both only where no other kind is live.
    kinds = {path.head for path in paths(view.live, multimodal=bool(question.items), fused=question.fused)}
    if elsewhere.path.head in kinds:
        suspended = any(one.suspended for one in Parts(elsewhere).all)
        assert plan.clear or suspended


@given(questions(), views())
def test_without_a_plan_there_is_no_way_and_with_one_its_path_is_one_of_them(question: Question, view: View) -> None:
    plan = make_plan(question, view)
    if plan is not None:
        assert plan.path.encode in ways(question, view)
    else:
        assert not view.live.keys() & set(HEADS) or (Role.D not in view.live and not question.fused) or question.fused


def test_a_head_that_encodes_itself_waits_for_no_encoder() -> None:
    busy = {Role.E: (Candidate("E0", "1", 10_000.0),), Role.P: (Candidate("P0", "1", 0.0),)}
    view = View({**busy, Role.D: (Candidate("D0", "1", 0.0),), Role.EPD: (Candidate("EPD0", "1", 50.0),)}, frozenset())
    apart = Question(100.0, (80.0,))
    plan = make_plan(apart, view)
    assert plan is not None and plan.head.chosen.id == "EPD0" and not plan.path.encode
    done = make_plan(Question(100.0, (80.0,), encoded=True), view)
    assert done is not None and done.head.chosen.id == "P0" and done.path.encode, "what is encoded is of use there"


def test_decode_waits_for_the_first_item_only_beside_a_tower_on_the_same_cores() -> None:
    live = {role: (Candidate(f"{role}0", "1", 0.0),) for role in (Role.E, Role.P, Role.D)}
    for ahead in (False, True):
        for shares in (False, True):
            view = View(live, frozenset(live), tower_shares_cores=shares)
            plan = make_plan(Question(9.0, (4.0,), ahead=ahead), view)
            assert plan is not None and plan.decode_waits is (ahead and shares)


# --- paths ----------------------------------------------------------------------------------------------------------

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
