"""Ray's own store of keys and values, in which the processes of one job tell each other what they know."""

import json
from typing import Any

_NAMESPACE = b"openrlhf_bapo"


def put(key: bytes, value: Any = True) -> None:
    """Set a key of this Ray job to a JSON value, in place of its last one."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_job() + key, json.dumps(value).encode(), namespace=_NAMESPACE)


def get(key: bytes) -> Any:
    """Return the value that a process of this Ray job set a key to last; None if no process did."""
    from ray.experimental import internal_kv

    value = internal_kv._internal_kv_get(_job() + key, namespace=_NAMESPACE)
    return None if value is None else json.loads(value)


def _job() -> bytes:
    import ray

    return ray.get_runtime_context().get_job_id().encode()
