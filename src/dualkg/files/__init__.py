"""Files and folders: careful reads, atomic writes, locks and checksums.

A reader never sees an incomplete file or folder. What a killed process leaves is finished or undone
by `recover` when the folder is next opened, and removed when it is next locked. A folder that is
locked is held by its descriptor: what is written goes there or nowhere, whatever takes its name.
Every file that is read is opened here, or by a library after `regular_file`.
"""

from dualkg.files.checksums import REMEMBERED_BYTES, FileRecord, file_damage, file_record
from dualkg.files.held import (
    INNER_LOCK,
    check_held,
    create_file,
    is_held,
    make_folder,
    remove,
    watched,
)
from dualkg.files.locking import folder_lock, lock_holder, locked, locks, rereads
from dualkg.files.reads import (
    NO_CHECKSUM,
    check_type,
    exists,
    expansion_limit,
    open_regular,
    read_bytes,
    read_json,
    read_text,
    regular_file,
)
from dualkg.files.writes import (
    Token,
    atomic_folder,
    atomic_write,
    check_new_file,
    check_new_folder,
    contents,
    link_or_copy,
    recover,
    remove_strays,
    strays,
    sync,
    write_json,
    write_text,
    writing,
    written_token,
)

__all__ = ["INNER_LOCK", "NO_CHECKSUM", "REMEMBERED_BYTES", "Token", "atomic_folder"]
__all__ += ["atomic_write", "check_held", "check_new_file", "check_new_folder", "check_type"]
__all__ += ["contents", "create_file", "exists"]
__all__ += ["FileRecord", "expansion_limit", "file_damage", "file_record", "folder_lock", "is_held"]
__all__ += ["link_or_copy", "lock_holder", "locked", "locks", "make_folder", "open_regular"]
__all__ += ["read_bytes", "read_json", "read_text", "recover", "regular_file", "remove"]
__all__ += ["remove_strays", "rereads", "strays", "sync", "watched", "write_json", "write_text"]
__all__ += ["writing", "written_token"]
