"""What traces say: a picture of the timetable, and where each accelerator's time went.

Pure: needs neither deepspeed nor torch, and may run on another machine than the training did.
"""
