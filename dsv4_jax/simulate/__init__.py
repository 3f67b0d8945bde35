"""Request traces through the engine's core and manager, without a device: what a cache of some size would do.

Nothing here imports jax. `dsv4-jax simulate` is the command.
"""

from typing import Any

from ..former_names import former_name
from .engine import simulate
from .simulation import Server, Simulation
from .step_time import StepTime
from .trace import TraceRequest, read_trace

__all__ = [
    "Server",
    "Simulation",
    "StepTime",
    "TraceRequest",
    "read_trace",
    "simulate",
]

_FORMER = {  # names that were here, for one release: where they are now
    "ChatTrace": "synthesis.ChatTrace",
    "make_trace": "synthesis.make_trace",
    "write_trace": "trace.write_trace",
    "Link": "network.Link",
    "TraceRun": "trace.TraceRun",
    "hosts_report": "report.hosts_report",
    "link_outputs": "linking.link_outputs",
    "simulate_handed": "hosts.simulate_handed",
    "simulate_joint": "hosts.simulate_joint",
}


def __getattr__(name: str) -> Any:
    return former_name(__name__, _FORMER, name)
