"""What the engine remembers of a service's load beyond the samples that it keeps."""

from __future__ import annotations

import msgspec

from coordinator.engine.state.events import LoadMeasured
from coordinator.engine.state.tables import ClusterState
from coordinator.policies.contract.seasonal_load import Season
from tests.engine.house import CHAT, House


def test_the_season_of_a_load_reaches_policies_and_outlives_a_restart() -> None:
    """Each measured load is learned, the snapshot has it, and the kept state gives it back."""
    house, season = House(), Season()
    engine = house.engine
    for step in range(200):
        at_s, load = 600.0 * step, 10.0 + step % 7
        engine.handle(LoadMeasured(service=CHAT, load=load), now_s=at_s)
        season = season.after(at_s, load)
    (service,) = engine.snapshot().services
    assert service.season == season
    assert season.known_s > 0
    kept = msgspec.msgpack.encode(engine.state)
    assert msgspec.msgpack.decode(kept, type=ClusterState).services[CHAT].season == season
