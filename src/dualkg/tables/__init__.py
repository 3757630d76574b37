"""Entity tables: where the rows of entities are kept, and all that depends on it."""

from dualkg.tables.base import EntityScores, EntityTables
from dualkg.tables.host import HostTables
from dualkg.tables.local import LocalTables
from dualkg.tables.lookup import Side, lookup
from dualkg.tables.processes import Processes
from dualkg.tables.shard import Shard
from dualkg.tables.sharded import ShardedTables

__all__ = ["EntityScores", "EntityTables", "HostTables", "LocalTables", "Processes", "Shard"]
__all__ += ["ShardedTables", "Side", "lookup"]
