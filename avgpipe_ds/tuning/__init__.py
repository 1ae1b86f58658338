"""Choosing N, M and the advance: from what training itself shows, or from one short profile (AvgPipe, sections 4.2 and 5).

Pure where it decides: imports neither deepspeed nor torch.
"""
