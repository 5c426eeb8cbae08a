"""Search for a short integer solution of one homogeneous linear equation.

The solutions of ``sum(d[j] * coefficients[j]) == 0`` are a lattice. Its basis is reduced in the sense of A.
K. Lenstra, H. W. Lenstra and L. Lovász ("Factoring polynomials with rational coefficients", 1982, in the
all-integer form of H. Cohen, "A Course in Computational Algebraic Number Theory", algorithm 2.6.7), and the
vectors of the ellipsoid around the box of bounds are enumerated (U. Fincke and M. Pohst, 1985). For a reduced
basis their number is bounded by the dimension alone. Exact integers and fractions throughout: the answer is a
proof, not an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil, floor, isqrt

__all__ = ["has_kernel_vector"]

_Vector = list[int]


def has_kernel_vector(coefficients: list[int], bounds: list[int]) -> bool:
    """Whether a nonzero integer ``d`` has ``sum(d * coefficients) == 0`` and ``abs(d[j]) <= bounds[j]``.

    Args:
        coefficients: positive integers, two or more.
        bounds: positive integers, one for each coefficient.
    """
    # Scaling each axis by about 1 / bound makes the box a cube of half width `edge`. Rounding down keeps
    # every vector of the box inside the cube; the fineness only decides how tightly.
    edge = max(bounds) << 16
    scales = [edge // bound for bound in bounds]
    basis = [
        [entry * scale for entry, scale in zip(vector, scales, strict=True)]
        for vector in _kernel_basis(coefficients)
    ]
    reduced = _ReducedBasis(basis)

    def fits(vector: _Vector) -> bool:
        return all(
            abs(entry) <= scale * bound for entry, scale, bound in zip(vector, scales, bounds, strict=True)
        )

    if any(map(fits, reduced.basis)):
        return True
    return any(map(fits, reduced.vectors_within(len(bounds) * edge * edge)))


def _kernel_basis(coefficients: list[int]) -> list[_Vector]:
    """Return a basis of the integer solutions, by Euclid's algorithm on all coefficients at once."""
    count = len(coefficients)
    rows = [(value, [int(i == j) for j in range(count)]) for i, value in enumerate(coefficients)]
    kernel: list[_Vector] = []
    while len(rows) > 1:
        rows.sort(key=lambda row: abs(row[0]))
        pivot, pivot_vector = rows[0]
        remaining = [rows[0]]
        for value, vector in rows[1:]:
            times = _nearest(value, pivot)
            row = (value - times * pivot, [a - times * b for a, b in zip(vector, pivot_vector, strict=True)])
            if row[0]:
                remaining.append(row)
            else:
                kernel.append(row[1])
        rows = remaining
    return kernel


def _nearest(numerator: int, denominator: int) -> int:
    """Return the integer nearest to the quotient."""
    if denominator < 0:
        numerator, denominator = -numerator, -denominator
    return (2 * numerator + denominator) // (2 * denominator)


class _ReducedBasis:
    """An LLL-reduced basis with its orthogonalisation in integers.

    ``minors[i]`` is the determinant of the Gram matrix of the first ``i`` vectors; the squared length of the
    orthogonalised vector ``i`` is ``minors[i + 1] / minors[i]``, and its coefficient on vector ``j`` is
    ``factors[i][j] / minors[j + 1]``.
    """

    def __init__(self, basis: list[_Vector]) -> None:
        self.basis = [list(vector) for vector in basis]
        self._orthogonalise()
        self._reduce()

    def _orthogonalise(self) -> None:
        count = len(self.basis)
        self.minors = [1] + [0] * count
        self.factors = [[0] * count for _ in range(count)]
        for i in range(count):
            for j in range(i + 1):
                value = sum([a * b for a, b in zip(self.basis[i], self.basis[j], strict=True)])
                for k in range(j):
                    value = (
                        self.minors[k + 1] * value - self.factors[i][k] * self.factors[j][k]
                    ) // self.minors[k]
                if j < i:
                    self.factors[i][j] = value
                else:
                    self.minors[i + 1] = value

    def _reduce(self) -> None:
        minors, factors = self.minors, self.factors
        k = 1
        while k < len(self.basis):
            self._shorten(k, k - 1)
            factor = factors[k][k - 1]
            if 4 * (minors[k + 1] * minors[k - 1] + factor * factor) < 3 * minors[k] * minors[k]:
                self._swap(k)
                k = max(1, k - 1)
            else:
                for j in range(k - 2, -1, -1):
                    self._shorten(k, j)
                k += 1

    def _shorten(self, k: int, j: int) -> None:
        times = _nearest(self.factors[k][j], self.minors[j + 1])
        if times:
            self.basis[k] = [a - times * b for a, b in zip(self.basis[k], self.basis[j], strict=True)]
            self.factors[k][j] -= times * self.minors[j + 1]
            for i in range(j):
                self.factors[k][i] -= times * self.factors[j][i]

    def _swap(self, k: int) -> None:
        basis, minors, factors = self.basis, self.minors, self.factors
        basis[k], basis[k - 1] = basis[k - 1], basis[k]
        for j in range(k - 1):
            factors[k][j], factors[k - 1][j] = factors[k - 1][j], factors[k][j]
        factor = factors[k][k - 1]
        minor = (minors[k - 1] * minors[k + 1] + factor * factor) // minors[k]
        for i in range(k + 1, len(basis)):
            old = factors[i][k]
            factors[i][k] = (minors[k + 1] * factors[i][k - 1] - factor * old) // minors[k]
            factors[i][k - 1] = (minor * old + factor * factors[i][k]) // minors[k + 1]
        minors[k] = minor

    def vectors_within(self, radius: int) -> Iterator[_Vector]:
        """Yield every nonzero vector whose squared length is at most ``radius``, up to the sign."""
        count = len(self.basis)
        lengths = [Fraction(self.minors[i + 1], self.minors[i]) for i in range(count)]
        slopes = [[Fraction(self.factors[i][j], self.minors[j + 1]) for j in range(i)] for i in range(count)]
        chosen = [0] * count

        def choose(level: int, room: Fraction) -> Iterator[_Vector]:
            if level < 0:
                if any(chosen):
                    yield [
                        sum([times * entry for times, entry in zip(chosen, column, strict=True)])
                        for column in zip(*self.basis, strict=True)
                    ]
                return
            above = range(level + 1, count)
            shift = sum([chosen[i] * slopes[i][level] for i in above], Fraction(0))
            width = isqrt(floor(room / lengths[level])) + 1
            # While all the slower ones are zero, the sign is free: take the vector that points up.
            first = ceil(-shift - width) if any(chosen[i] for i in above) else 0
            for times in range(first, floor(width - shift) + 1):
                left = room - (times + shift) ** 2 * lengths[level]
                if left >= 0:
                    chosen[level] = times
                    yield from choose(level - 1, left)
            chosen[level] = 0

        return choose(count - 1, Fraction(radius))
