"""The encoder process of `epd-bench transfer ep`: the real `FeatureProducer` of a stage, without a vision tower.

The features are random and lie ready; what happens from the moment the tower would be done is the stage's own code:
writer thread, put into the store, announcement on its socket.
"""

from __future__ import annotations

import time
from typing import Any

from bench.children import answering, commands
from epd_serve.demo.features import random_feature
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.wiring import StageWiring

_KEPT = 4  # features that the stand-in for vLLM's encoder cache holds


def main() -> None:
    """Commands: `save` one feature, or a `burst` of them. Answers carry CLOCK_MONOTONIC seconds."""
    answer = answering()
    told = commands()
    config = next(told)
    producer = FeatureProducer(StageWiring.from_json(config["wiring"]))
    features = {tokens: random_feature(tokens, config["hidden"]) for tokens in config["tokens"]}
    cache: dict[str, Any] = {}  # as vLLM's: one dict for the life of the worker
    answer(ready=True)
    for command in told:
        for key in command["keys"]:
            cache[key] = features[command["tokens"]]
            while len(cache) > _KEPT:
                del cache[next(iter(cache))]
            encoded = time.monotonic()
            producer.save(cache, key)
            if command.get("every_s"):
                time.sleep(command["every_s"])
        answer(encoded=encoded)
    producer.close()


if __name__ == "__main__":
    main()
