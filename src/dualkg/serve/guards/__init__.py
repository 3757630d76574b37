"""Guards: what a request passes before a route reads it. Each is an ASGI application around another."""
