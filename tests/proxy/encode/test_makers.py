"""What an encoder is at work on for another proxy goes to it, too."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from epd_serve.wire import FeatureExpected
from proxy.encode.encoders import Encoders
from proxy.registry.feature_directory import FeatureDirectory
from proxy.routing.policy import Candidate


def test_an_item_that_is_being_encoded_joins_its_maker_and_others_stay() -> None:
    directory = FeatureDirectory(10)
    directory.expected(FeatureExpected({"two": {}}, "life"), time.monotonic())
    encoders: Any = SimpleNamespace(_directory=directory)
    items: Any = [SimpleNamespace(key=key) for key in ("one", "two", "three")]
    shares = [[1, 2], [0]]
    Encoders._join_makers(encoders, items, [Candidate("E0", "other", 0.0), Candidate("E1", "life", 1e6)], shares)
    assert shares == [[2], [0, 1]]
    gone = [[1, 2], [0]]
    Encoders._join_makers(encoders, items, [Candidate("E0", "other", 0.0), Candidate("E2", "new", 0.0)], gone)
    assert gone == [[1, 2], [0]], "its maker may not be asked now"
