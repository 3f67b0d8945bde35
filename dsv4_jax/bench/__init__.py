"""The benchmark behind `dsv4-jax bench`: every op and whole decode steps, timed against ceilings of the same run.

| file | what it holds |
| --- | --- |
| shapes.py | named argument shapes of every op, with the bytes and FLOPs each cannot do without |
| targets.py | times required of an op at those shapes, its goals, and what the best peer needs |
| inputs.py, ops.py | random arguments, and the calls that are timed |
| timing.py | how a call is timed, and what the device can do at most |
| torch_ops.py | the same ops in plain torch, as a baseline |
| measure.py | one op, shape and implementation measured, checked and judged |
| records.py | the record of a run: the one form of every benchmark's JSON |
| render.py, overview.py, sections.py | the pages of results, made from records: all lines, the first page, titles |
| step.py, model.py | a whole decode step of the attention stack; of whole layers with weights as released |
| step_timing.py | how long such a step takes, against the floors of its parts |
| plot.py | the roofline |
"""
