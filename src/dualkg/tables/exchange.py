"""How many bytes a process sends to exchange rows with others, and what follows from it."""

LEAST_BYTES = 2**16  # bytes of rows from which on a process finds out which way sends fewer


def all_reduce_bytes(num_bytes: float, num_processes: int) -> float:
    """The bytes that each process sends in a ring all-reduce of that many."""
    return 2 * (num_processes - 1) / num_processes * num_bytes


def all_to_all_bytes(num_bytes: float, num_processes: int) -> float:
    """The bytes that a process sends which has that many for each of the others."""
    return (num_processes - 1) * num_bytes


def sends_rows(num_rows: int, most_rows: int, num_processes: int) -> bool:
    """Whether rows are sent by their owners, rather than added up with the zeros of all others.

    The process with the most of the rows has `most_rows` of them, and the others wait for it.
    """
    of_owner = all_to_all_bytes(most_rows, num_processes)
    return of_owner < all_reduce_bytes(num_rows, num_processes)


def sums_some_rows(num_rows: int, num_touched: int, row_bytes: int) -> bool:
    """Whether it pays to sum only those rows of a gradient that some process has touched.

    Processes agree on these by a byte for each row.
    """
    return num_rows + num_touched * row_bytes < num_rows * row_bytes
