"""The wire rejects what does not fit, and says what."""

from __future__ import annotations

import pytest

from common.errors import ProtocolError
from common.messages import LedgerRequest, NodeReport, decode, encode
from common.model import NodeRole, Pool
from tests.tables import each_row

REPORT = NodeReport(
    node="n1",
    boot_id="b",
    sequence=1,
    home_pool=Pool.TRAINING,
    role=NodeRole.TRAINING,
    epoch=0,
    generation=0,
    instance="one",
    period_s=1.0,
)


def test_a_report_survives_the_wire() -> None:
    """What is encoded decodes to the same value."""
    assert decode(encode(REPORT), NodeReport) == REPORT


@each_row(
    "data",
    [b"", b"\xc1", encode(REPORT)[:-3], encode(LedgerRequest(node="a")), b"\x81\xa1v\x02"],
)
def test_a_bad_message_is_a_protocol_error(data: bytes) -> None:
    """Garbage, truncation, another kind and another version are the peer's fault."""
    with pytest.raises(ProtocolError, match="NodeReport"):
        decode(data, NodeReport)
