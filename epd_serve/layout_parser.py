"""Reads the layout notation of `layout.py`. Syntax only: `ED` or a lone `E` parse, `placement.check_servable` refuses.

Recursive descent over the text with one cursor; every refusal is a `LayoutError` with the offset of the fault.
"""

from __future__ import annotations

import re

from epd_serve.errors import LayoutError
from epd_serve.layout import MAX_INSTANCES, Group, Layout, Member
from epd_serve.roles import Role

MAX_TP = 1024

_COUNTED_TERMS = re.compile(r"(?:[0-9]+[EPD]+(?::tp[0-9]+)?){2,}")
_DIGITS = re.compile(r"[0-9]+")
_LETTERS = re.compile(r"[^\W\d_x×]+")


def parse(spec: str) -> Layout:
    """Parse a layout or one of its aliases.

    Raises:
        LayoutError: with the offset of the first fault; its text shows `spec` with a caret under it.
    """
    text = spec.strip()
    if not text:
        raise LayoutError("is empty; try (E-P)-D", spec, 0)
    layout = _Parser(text).layout()
    if layout.instance_count > MAX_INSTANCES:
        raise LayoutError(f"has {layout.instance_count} instances, more than {MAX_INSTANCES}", text, 0)
    return layout


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def layout(self) -> Layout:
        if _COUNTED_TERMS.fullmatch(self.text):
            return self._counted_terms()
        groups = [self._group()]
        while self.at < len(self.text):
            if not self._take("-") and not self._take("+"):
                raise self._unexpected()
            groups.append(self._group())
        return Layout.of(groups, self.text)

    def _counted_terms(self) -> Layout:
        groups = []
        while self.at < len(self.text):
            groups.append(self._lone_instance())
        return Layout.of(groups, self.text)

    def _group(self) -> Group:
        if self._peek("TP"):
            return self._monolith()
        if self._peek("("):
            return self._parenthesised()
        return self._lone_instance()

    def _monolith(self) -> Group:
        start = self.at
        self.at += 2
        tp = self._int("devices after TP", MAX_TP)
        return Group((Member(Role.EPD, tp=tp, position=start),), self._repeat())

    def _lone_instance(self) -> Group:
        count, member = self._instance()
        return Group((member,), count)

    def _parenthesised(self) -> Group:
        opened = self.at
        self.at += 1
        members: list[Member] = []
        while True:
            if self._peek("("):
                raise self._fault("parentheses do not nest: a group is one device")
            if self._peek("TP"):
                raise self._fault("TP is a whole monolith: inside parentheses write EPD")
            count, member = self._instance()
            if members and member.tp != members[0].tp:
                raise self._fault(
                    f"mixed tp in one group ({members[0].tp} and {member.tp}): its members share the same devices",
                    member.position,
                )
            members.append(Member(member.role, member.tp, count, member.position))
            if self._take(")"):
                break
            if self.at >= len(self.text):
                raise self._fault("this parenthesis is never closed", opened)
            if not self._take("-"):
                raise self._unexpected()
        return Group(tuple(members), self._repeat())

    def _instance(self) -> tuple[int, Member]:
        """One `instance`: how many of them, and the instance itself."""
        count = self._int("count", MAX_INSTANCES) if self._at_digit() else 1
        start = self.at
        role = self._stages()
        tp = 1
        if self._peek(":"):
            if not self._take(":tp"):
                raise self._fault("expected :tp and a number, for example P:tp2")
            tp = self._int("devices after :tp", MAX_TP)
        return count * self._repeat(), Member(role, tp, position=start)

    def _stages(self) -> Role:
        match = _LETTERS.match(self.text, self.at)
        if match is None:
            raise self._expected_stage()
        letters = match.group()
        for offset, letter in enumerate(letters):
            position = self.at + offset
            if letter not in "EPD":
                hint = f"; stages are capital: {letter.upper()}" if letter.upper() in "EPD" else ""
                raise self._fault(f"unknown stage {letter!r}: a stage is E, P or D{hint}", position)
            if letter in letters[:offset]:
                raise self._fault(f"{letter} twice in one instance; two instances are written 2{letter}", position)
        if letters not in Role.__members__:
            ordered = "".join(sorted(letters, key="EPD".index))
            raise self._fault(f"stages of one instance go in the order E, P, D: write {ordered}", self.at)
        self.at = match.end()
        return Role(letters)

    def _repeat(self) -> int:
        if not self._take("x") and not self._take("×"):
            return 1
        return self._int("repeat", MAX_INSTANCES)

    def _int(self, what: str, most: int) -> int:
        start = self.at
        match = _DIGITS.match(self.text, start)
        if match is None:
            raise self._fault(f"expected a number ({what})")
        self.at = match.end()
        digits = match.group().lstrip("0")
        if not digits:
            raise self._fault(f"{what} is zero; it has to be 1 or more", start)
        if len(digits) > len(str(most)) or int(digits) > most:
            raise self._fault(f"{what} is more than {most}", start)
        return int(digits)

    def _expected_stage(self) -> LayoutError:
        if self.at >= len(self.text):
            return self._fault("ends where an instance was expected: E, P, D, EP, PD or EPD")
        if self._peek(")"):
            return self._fault("expected an instance before this parenthesis")
        return self._fault(f"expected an instance (E, P, D, EP, PD or EPD), found {self.text[self.at]!r}")

    def _unexpected(self) -> LayoutError:
        character = self.text[self.at]
        if character == ")":
            return self._fault("this parenthesis was never opened")
        return self._fault(f"unexpected {character!r}: expected - between instances")

    def _fault(self, reason: str, position: int | None = None) -> LayoutError:
        return LayoutError(reason, self.text, self.at if position is None else position)

    def _at_digit(self) -> bool:
        return _DIGITS.match(self.text, self.at) is not None

    def _peek(self, token: str) -> bool:
        return self.text.startswith(token, self.at)

    def _take(self, token: str) -> bool:
        if not self._peek(token):
            return False
        self.at += len(token)
        return True
