"""Timelines of training: what each stage and each of its pipelines did, and what it waited for.

Pure: imports neither deepspeed nor torch, so that `avgpipe_ds.report` reads traces anywhere.
"""
