"""Evaluation of whole data sets."""
