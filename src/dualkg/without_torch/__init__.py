"""Queries of a saved run by NumPy alone: importing PyTorch would take seconds, a query does not."""
