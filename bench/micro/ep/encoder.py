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
    """Commands: save features one after the other, `every_s`. Answers carry CLOCK_MONOTONIC seconds of the last."""
    answer, orders = answering(), commands()
    config = next(orders)
    producer = FeatureProducer(StageWiring.from_json(config["wiring"]))
    features = {tokens: random_feature(tokens, config["hidden"]) for tokens in config["tokens"]}
    cache: dict[str, Any] = {}  # as vLLM's: one dict for the life of the worker
    answer(ready=True)
    for order in orders:
        for key in order["keys"]:
            cache[key] = features[order["tokens"]]
            while len(cache) > _KEPT:
                del cache[next(iter(cache))]
            encoded = time.monotonic()
            producer.save(cache, key)
            time.sleep(order["every_s"])
        answer(encoded=encoded)
    producer.close()


if __name__ == "__main__":
    main()
