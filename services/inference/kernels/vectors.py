"""LLVM's vectors for loops whose sums must stay in registers, which Numba's do not.

`WIDTH` float32 are a vector: one register of a machine with AVX-512 (16) or AVX2 (8), two of an ARM. `QUICK`: a product and its sum
are one instruction here; where they are not, each would be a call. `Emitter` writes instructions into the function that
Numba compiles; addresses are int64, offsets are of float32.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

_FEATURES = binding.get_host_cpu_features()
AVX512 = bool(_FEATURES.get("avx512f"))
QUICK = bool(_FEATURES.get("fma")) or platform.machine() in ("aarch64", "arm64")
WIDTH = 16 if AVX512 else 8
SIZE = 4  # bytes of a float32

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, WIDTH)
ZERO = ir.Constant(VECTOR, [0.0] * WIDTH)

Value = Any  # an LLVM value; llvmlite has no types for them


class Emitter:
    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder
        self._fma = self._intrinsic(f"llvm.fma.v{WIDTH}f32", ir.FunctionType(VECTOR, [VECTOR] * 3))
        self._prefetch = self._intrinsic(
            "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), I32, I32, I32])
        )

    def _intrinsic(self, name: str, type: ir.FunctionType) -> Value:
        return cgutils.get_or_insert_function(self.builder.module, type, name)

    def at(self, address: Value, index: Value, stride: Value | None = None) -> Value:
        """The address of the element `index` (times `stride`) behind `address`."""
        if stride is not None:
            index = self.builder.mul(index, stride)
        return self.builder.add(address, self.builder.mul(index, I64(SIZE)))

    def _pointer(self, address: Value, offset: int, type: ir.Type) -> Value:
        return self.builder.inttoptr(self.builder.add(address, I64(SIZE * offset)), type.as_pointer())

    def load(self, address: Value, offset: int = 0) -> Value:
        loaded = self.builder.load(self._pointer(address, offset, VECTOR))
        loaded.align = SIZE
        return loaded

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        """A vector of any length."""
        self.builder.store(value, self._pointer(address, offset, value.type)).align = SIZE

    def spread(self, address: Value, offset: int = 0) -> Value:
        """One float32 in every place."""
        scalar = self.builder.load(self._pointer(address, offset, F32))
        alone = self.builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, I32(0))
        return self.shuffle(alone, alone, [0] * WIDTH)

    def shuffle(self, a: Value, b: Value, places: list[int]) -> Value:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(places)), places))

    def fma(self, a: Value, b: Value, sum: Value) -> Value:
        return self.builder.call(self._fma, [a, b, sum])

    def prefetch(self, address: Value, offset: int) -> None:
        self.builder.call(self._prefetch, [self._pointer(address, offset, ir.IntType(8)), I32(0), I32(3), I32(1)])

    def variables(self, n: int) -> list[Value]:
        """Registers, as LLVM makes of them; zero whenever this place is passed."""
        made = [cgutils.alloca_once(self.builder, VECTOR) for _ in range(n)]
        for variable in made:
            self.builder.store(ZERO, variable)
        return made

    def add_product(self, variable: Value, a: Value, b: Value) -> None:
        self.builder.store(self.fma(a, b, self.builder.load(variable)), variable)

    def sums(self, vectors: list[Value]) -> Value:
        """One vector of the sums of WIDTH vectors, in their order."""
        while len(vectors) > 1:
            vectors = [self._pairs(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def _pairs(self, a: Value, b: Value) -> Value:
        """Neighbours' sums, of a in the first half, of b in the second."""
        even, odd = list(range(0, 2 * WIDTH, 2)), list(range(1, 2 * WIDTH, 2))
        return self.builder.fadd(self.shuffle(a, b, even), self.shuffle(a, b, odd))
