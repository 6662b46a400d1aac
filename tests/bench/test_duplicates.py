"""What `epd-bench duplicates` tells the second proxy, and how it counts."""

from __future__ import annotations

import json

from bench.duplicates import encoders


def test_encodes_are_counted_from_the_round_s_beginning(tmp_path):
    stamps = [
        {"t": 1.0, "instance": "E0", "subject": "k", "event": "encoded"},
        {"t": 2.0, "instance": "E1", "subject": "k", "event": "encoded"},
        {"t": 2.1, "instance": "E0", "subject": "k", "event": "feature_put"},
    ]
    (tmp_path / "E.jsonl").write_text("".join(json.dumps(stamp) + "\n" for stamp in stamps))

    assert encoders(tmp_path, 1.5) == ["E1"]
