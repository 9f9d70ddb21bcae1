"""Finite fields of up to some hundred elements, for the Slim Fly. Pure.

An element is a number whose digits in base p are the coefficients of a polynomial; products are taken modulo the first
monic irreducible polynomial of the right degree."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from fireflyer.base.errors import UsageError

__all__ = ["FiniteField", "prime_power"]


def prime_power(number: int) -> tuple[int, int] | None:
    """p and n where `number` is p^n with a prime p."""
    for prime in range(2, number + 1):
        if number % prime:
            continue
        power = 0
        while number % prime == 0:
            number, power = number // prime, power + 1
        return (prime, power) if number == 1 else None
    return None


class FiniteField:
    """The field of `order` elements, 0 to `order` - 1. Raises `UsageError` where there is none."""

    def __init__(self, order: int) -> None:
        found = prime_power(order)
        if found is None:
            raise UsageError(f"{order} is no power of a prime: no field has {order} elements")
        self.order = order
        self._prime, self._degree = found
        self._modulus = self._irreducible()

    def add(self, a: int, b: int) -> int:
        return self._number((x + y) % self._prime for x, y in zip(self._digits(a), self._digits(b), strict=True))

    def subtract(self, a: int, b: int) -> int:
        return self._number((x - y) % self._prime for x, y in zip(self._digits(a), self._digits(b), strict=True))

    def multiply(self, a: int, b: int) -> int:
        return self._number(self._reduced(self._product(self._digits(a), self._digits(b)), self._modulus))

    def powers(self) -> list[int]:
        """1, x, x^2, … of a primitive element x: each element but 0 once."""
        for element in range(1, self.order):
            found = [1]
            while (after := self.multiply(found[-1], element)) != 1:
                found.append(after)
            if len(found) == self.order - 1:
                return found
        raise AssertionError("every finite field has a primitive element")

    def _digits(self, number: int) -> list[int]:
        return [number // self._prime**place % self._prime for place in range(self._degree)]

    def _number(self, digits: Iterable[int]) -> int:
        return sum(digit * self._prime**place for place, digit in enumerate(digits))

    def _product(self, a: list[int], b: list[int]) -> list[int]:
        found = [0] * (len(a) + len(b) - 1)
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                found[i + j] = (found[i + j] + x * y) % self._prime
        return found

    def _reduced(self, polynomial: list[int], modulus: list[int]) -> list[int]:
        """Remainder by a monic polynomial; coefficients from the lowest."""
        rest = list(polynomial)
        degree = len(modulus) - 1
        for top in range(len(rest) - 1, degree - 1, -1):
            factor = rest[top]
            for place, coefficient in enumerate(modulus):
                rest[top - degree + place] = (rest[top - degree + place] - factor * coefficient) % self._prime
        return (rest + [0] * degree)[:degree]

    def _irreducible(self) -> list[int]:
        """By trial division: degrees are small."""
        smaller = [
            [*low, 1]
            for degree in range(1, self._degree // 2 + 1)
            for low in product(range(self._prime), repeat=degree)
        ]
        for low in product(range(self._prime), repeat=self._degree):
            candidate = [*low, 1]
            if all(any(self._reduced(candidate, divisor)) for divisor in smaller):
                return candidate
        raise AssertionError("there is an irreducible polynomial of every degree")
