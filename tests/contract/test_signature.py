"""Which calls a signature takes, and which override keeps a promise."""

from __future__ import annotations

import pytest

from tests.contract.signature import Shape, Signature


@pytest.mark.parametrize(
    ("signature", "shape", "reason"),
    [
        ("(a, b=...)", Shape(1), None),
        ("(a, b=...)", Shape(2), None),
        ("(a, b=...)", Shape(3), "takes 2 positional arguments, not 3"),
        ("(a, b=...)", Shape(0, ("b",)), "needs a"),
        ("(a, b=...)", Shape(1, ("a",)), "takes no argument 'a'; it takes b"),
        ("(a, *more, c)", Shape(5), "needs c"),
        ("(a, *more, c)", Shape(5, ("c",)), None),
        ("(a, **any)", Shape(1, ("x", "y")), None),
        ("(a, b)", Shape(0, open=True), None),
    ],
)
def test_a_call_fits_or_says_why_not(signature, shape, reason):
    assert Signature.parse(signature).refuses(shape) == reason


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        ("(a, b)", "(a, b)", None),
        ("(a, b, c=...)", "(a, b)", None),
        ("(*args, **more)", "(a, b, *, c)", None),
        ("(a)", "(a, b)", "does not take b"),
        ("(a)", "(a, *, b)", "does not take b"),
        ("(a, b, c)", "(a, b)", "needs c, which nobody passes"),
    ],
)
def test_an_override_replaces_or_says_why_not(mine, theirs, reason):
    assert Signature.parse(mine).cannot_replace(Signature.parse(theirs)) == reason


@pytest.mark.parametrize("text", ["(0)", "(2, x=, y=)", "(1, ...)", "(0, x=, ...)"])
def test_a_shape_is_read_as_it_is_written(text):
    assert str(Shape.parse(text)) == text
