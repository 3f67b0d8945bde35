"""What `dsv4-jax bench` measures with: every op and whole decode steps, timed against ceilings of the same run.

| file | what it holds |
| --- | --- |
| shapes.py | named argument shapes of every op, with the bytes and FLOPs each cannot do without |
| ops.py | random arguments, and the calls that are timed |
| timing.py | how a call and a step are timed, and what the device can do at most |
| measure.py | one op, shape and implementation measured and checked |
| step.py, model.py | a whole decode step of the attention stack; of whole layers with weights as released |
| records.py | the record of a run: the one form of every benchmark's JSON |
| plot.py | the roofline |

Targets, other projects' times and the pages of results are in the repository's benchmarks/, not in the package.
"""
