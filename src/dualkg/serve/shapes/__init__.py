"""Shapes: what answers look like, as the OpenAPI description tells it."""
