"""Regression tests against results that were recorded with an earlier version of the code."""
