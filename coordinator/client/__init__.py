"""Scripts and commands that use a cell: `connect` finds it, `Cell` asks it.

Start at `cells` for what can be asked, at `requests` for how a request travels, and at `target`
for how a cell is found. The distribution `aryl-client` is this package, as `aryl_client`.
"""

from __future__ import annotations

from common.access import AccessError as AccessError
from common.access import Cause as Cause
from common.api import Description as Description
from common.api import Events as Events
from common.api import JobRow as JobRow
from common.api import LoanRow as LoanRow
from common.api import Logs as Logs
from common.api import NodeRow as NodeRow
from common.api import ServiceRow as ServiceRow
from common.api import Status as Status
from common.api import StoryRow as StoryRow
from common.api import Submitted as Submitted
from common.api import TenantRow as TenantRow
from common.errors import ArylError as ArylError
from common.errors import ConfigError as ConfigError
from common.errors import ProtocolError as ProtocolError
from common.errors import Unavailable as Unavailable
from common.model import CheckpointSpec as CheckpointSpec
from common.model import Dependency as Dependency
from common.model import DependencyKind as DependencyKind
from common.model import GpuRequest as GpuRequest
from common.model import JobChange as JobChange
from common.model import JobSpec as JobSpec
from common.model import JobState as JobState
from common.model import RetrySpec as RetrySpec
from common.model import WorkerRange as WorkerRange
from coordinator.client.blocking import Cell as Cell
from coordinator.client.blocking import connect as connect
from coordinator.client.cells import AsyncCell as AsyncCell
from coordinator.client.cells import connect_async as connect_async
from coordinator.client.cells import job_spec as job_spec
from coordinator.client.requests import EXIT_CODES as EXIT_CODES
from coordinator.client.requests import ApiAway as ApiAway
from coordinator.client.requests import ApiRefused as ApiRefused
from coordinator.client.requests import Client as Client
from coordinator.client.requests import NoCoordinator as NoCoordinator
