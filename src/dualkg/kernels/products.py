"""The product of two coordinates, and the conjugate, of each diagonal model.

A coordinate is a tuple of real numbers, one array for each. Plain arithmetic on `x[0]`, `x[1]`, …
is the same in NumPy, PyTorch and Triton, which compiles these lines.
"""

from typing import Any


def real_product(x: "Any", r: "Any") -> "Any":
    return (x[0] * r[0],)


def real_conjugate(x: "Any") -> "Any":
    return x


def complex_product(x: "Any", r: "Any") -> "Any":
    return x[0] * r[0] - x[1] * r[1], x[0] * r[1] + x[1] * r[0]


def complex_conjugate(x: "Any") -> "Any":
    return x[0], -x[1]


def quaternion_product(x: "Any", r: "Any") -> "Any":
    return (
        x[0] * r[0] - x[1] * r[1] - x[2] * r[2] - x[3] * r[3],
        x[0] * r[1] + x[1] * r[0] + x[2] * r[3] - x[3] * r[2],
        x[0] * r[2] - x[1] * r[3] + x[2] * r[0] + x[3] * r[1],
        x[0] * r[3] + x[1] * r[2] - x[2] * r[1] + x[3] * r[0],
    )


def quaternion_conjugate(x: "Any") -> "Any":
    return x[0], -x[1], -x[2], -x[3]


def swapped_product(x: "Any", r: "Any") -> "Any":
    """Half the product of the second halves, then of the first halves, as in SimplE."""
    return 0.5 * x[1] * r[1], 0.5 * x[0] * r[0]


def swapped_conjugate(x: "Any") -> "Any":
    return x[1], x[0]
