"""In which order a stage computes the micro-batches of one batch (paper, section 4).

All of it is pure but `deepspeed_schedules`, which lowers a plan to DeepSpeed's instructions:

- `actions`: one forward or backward, immutable, printable, parseable;
- `plans`: 1F1B, GPipe and advance forward as tuples of actions;
- `priority`: which of the N pipelines a stage serves first;
- `simulate`: checks plans before they run, and predicts time, busy fraction and stored micro-batches;
- `timetable`: text pictures of plans and simulations.
"""
