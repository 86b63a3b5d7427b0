"""Batch evaluation: run an agent on every task of a file, report with intervals, compare two runs."""
