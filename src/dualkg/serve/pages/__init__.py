"""Pages for people. Each is a module with `routes`; what a page loads is in this package, never on another host."""
