"""Choosing N, M and the advance: from what training itself shows, or from one short profile (AvgPipe, sections 4.2 and 5).

What decides is pure: settings, profiles, predictors, choice, the search for the advance.
"""
