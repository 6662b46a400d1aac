"""What we use of Ray that it does not promise to keep: all of it is imported here.

The key-value store of its head, in which the notes of a deployment outlive its controller; the cluster's token; the
free devices of each node; the node that a placement group is rather to be on.
"""

from __future__ import annotations

import inspect

import ray
from ray.util.placement_group import placement_group

from deploy.options.versions import RAY
from epd_serve.errors import ConfigError

try:
    from ray._private.state import available_resources_per_node
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # its stub has not everything
    from ray.experimental import internal_kv

    kv_get, kv_list = internal_kv._internal_kv_get, internal_kv._internal_kv_list
    kv_put, kv_delete = internal_kv._internal_kv_put, internal_kv._internal_kv_del
    tokens = AuthenticationTokenLoader.instance()
    """Of the cluster that this process takes part in: `get_raw_token()`, "" where it asks for none."""
    if "_soft_target_node_id" not in inspect.signature(placement_group).parameters:
        raise ImportError("placement_group takes no _soft_target_node_id")
except (ImportError, AttributeError) as error:
    raise ConfigError(
        f"Ray {ray.__version__} lacks what EPD-Serve uses of it ({error}): pip install ray=={RAY}", param="--runtime"
    ) from error

__all__ = ["available_resources_per_node", "kv_delete", "kv_get", "kv_list", "kv_put", "placement_group", "tokens"]
