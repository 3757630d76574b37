"""The facts behind the bundled graph `world`, one module for each source."""
