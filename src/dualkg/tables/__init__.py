"""Entity tables: where the rows of entities are kept, and all that depends on it."""

from dualkg.tables.base import EntityScores, EntityTables, Side, lookup
from dualkg.tables.local import LocalTables
from dualkg.tables.processes import Processes
from dualkg.tables.sharded import Shard, ShardedTables

__all__ = ["EntityScores", "EntityTables", "LocalTables", "Processes", "Shard", "ShardedTables"]
__all__ += ["Side", "lookup"]
