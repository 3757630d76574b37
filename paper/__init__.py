"""Reproduction of the paper: its tables, figures, studies and records."""
