"""Entity tables: where the rows of entities are kept, and all that depends on it."""
