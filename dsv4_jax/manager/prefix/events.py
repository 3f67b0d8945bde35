"""The event log under the name that the manager has for it."""

from __future__ import annotations

from ...events import BlockEvent, EventBatch, EventLog, coalesce

__all__ = ["BlockEvent", "EventBatch", "EventLog", "coalesce"]
