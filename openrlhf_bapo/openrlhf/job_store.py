"""Ray's own store of keys and values, in which the processes of one job tell each other what they know."""

_NAMESPACE = b"openrlhf_bapo"


def put(key: bytes, value: bytes = b"") -> None:
    """Set a key of this Ray job."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_job() + key, value, namespace=_NAMESPACE)


def get(key: bytes) -> bytes | None:
    """Return the value of a key of this Ray job; None if no process has set it."""
    from ray.experimental import internal_kv

    return internal_kv._internal_kv_get(_job() + key, namespace=_NAMESPACE)


def _job() -> bytes:
    import ray

    return ray.get_runtime_context().get_job_id().encode()
