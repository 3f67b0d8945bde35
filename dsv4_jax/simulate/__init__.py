"""Request traces through the real manager, without a device: what a cache of some size and policy would do.

Nothing here imports jax. `dsv4-jax simulate` is the command.
"""

from .engine import simulate
from .hosts import simulate_handed, simulate_joint
from .linking import link_outputs
from .network import Link
from .report import hosts_report
from .simulation import Server, Simulation
from .step_time import StepTime
from .synthesis import ChatTrace, make_trace
from .trace import TraceRequest, TraceRun, read_trace, write_trace

__all__ = [
    "ChatTrace",
    "Link",
    "Server",
    "Simulation",
    "StepTime",
    "TraceRequest",
    "TraceRun",
    "hosts_report",
    "link_outputs",
    "make_trace",
    "read_trace",
    "simulate",
    "simulate_handed",
    "simulate_joint",
    "write_trace",
]
