"""What encoders have said that they work on: from their word until what becomes of it, or their silence."""

from __future__ import annotations

from epd_serve.engine.ec.expected_features import ExpectedFeatures


def test_a_feature_is_expected_until_it_has_ended() -> None:
    expected = ExpectedFeatures(wait_s=2.0)
    assert not expected.expects("k", 0.0)
    expected.began(["k", "other"], 0.0)
    assert expected.expects("k", 1.9)
    assert expected.ended("k") and not expected.expects("k", 1.9) and not expected.ended("k")
    assert expected.expects("other", 1.9)


def test_an_encoder_that_falls_silent_is_waited_for_no_longer_than_anybody_waits_for_a_feature() -> None:
    expected = ExpectedFeatures(wait_s=2.0)
    expected.began(["k"], 0.0)
    expected.renew(["k"], 1.5)
    assert expected.expects("k", 3.0)
    assert not expected.expects("k", 3.5)


def test_what_is_on_its_way_to_a_second_tier_is_not_expected_again() -> None:
    expected = ExpectedFeatures(wait_s=2.0)
    expected.began(["k"], 0.0)
    expected.ended("k")
    expected.renew(["k"], 0.1)
    assert not expected.expects("k", 0.1)
