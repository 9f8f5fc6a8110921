"""Limits each tenant's requests per second, by a token bucket. Pure; `now_s` is an argument."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

BURST_S = 10.0
"""A quiet tenant may send this many seconds' worth at once: scripts submit in bursts."""
TENANTS = 1000
"""Buckets kept; beyond that the full ones go, of tenants without a request for `BURST_S`."""


class _Bucket(Struct):
    """A tenant's token bucket, as of an instant."""

    tokens: float
    at_s: float


class Rates:
    """The request rate of each tenant.

    Args:
        per_s: of a tenant that `by_tenant` does not name.
    """

    def __init__(self, *, per_s: float, by_tenant: Mapping[str, float]) -> None:
        self.refused_count = 0
        self._per_s = per_s
        self._by_tenant = by_tenant
        self._buckets: dict[str, _Bucket] = {}

    def limit(self, tenant: str) -> float:
        """The average number of requests a second that a tenant may send."""
        return self._by_tenant.get(tenant, self._per_s)

    def wait_s(self, tenant: str, *, now_s: float) -> float:
        """Take one request of a tenant; 0 if it may ask now, else the wait in seconds."""
        limit = self.limit(tenant)
        most = max(1.0, limit * BURST_S)
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) >= TENANTS:
                self._forget(now_s)
            bucket = self._buckets[tenant] = _Bucket(most, now_s)
        bucket.tokens = min(most, bucket.tokens + limit * (now_s - bucket.at_s))
        bucket.at_s = now_s
        if bucket.tokens < 1.0:
            self.refused_count += 1
            return (1.0 - bucket.tokens) / limit
        bucket.tokens -= 1.0
        return 0.0

    def _forget(self, now_s: float) -> None:
        """Forget full buckets: one of `BURST_S` ago is full again, as a new one is."""
        for tenant in [t for t, b in self._buckets.items() if now_s - b.at_s >= BURST_S]:
            del self._buckets[tenant]
