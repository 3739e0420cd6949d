"""Vectors of floats for the compiled loops, with the same bits on every processor.

LLVM vectorises plain loops over rows, too, but it then checks whether arrays overlap and keeps intermediate values in
memory: for nets with a few units that takes longer than the arithmetic. Here the width of a vector is a constant and
not the width of the processor's registers, so the order of every sum is fixed. Multiply-adds are rounded once: they are
calls of `llvm.fma`, which a processor without such an instruction computes in software.

numba reuses compiled code as long as the source file of the loop is unchanged. After a change to this file, also change
the files that import it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types

SIZE = 16  # floats in a vector
FLOAT, WORD = ir.FloatType(), ir.IntType(32)


REGISTER = 8  # floats in a partial sum
SUMS = 4 * REGISTER  # floats that a sum adds at a time, as four partial sums


def intrinsic(function: Callable[..., Any]) -> Any:
    """What loops call is what the function says how to compile: it has other arguments."""
    return extending.intrinsic(function)


class Vector(types.Type):
    """So many floats."""

    def __init__(self, size: int) -> None:
        super().__init__(name=f"Vector({size})")
        self.size = size


@extending.register_model(Vector)
class _Model(extending.models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(FLOAT, fe_type.size))  # type: ignore[no-untyped-call]


VECTOR, REST, PARTS = Vector(SIZE), Vector(REGISTER), Vector(SUMS)


def _sign(sign: Any, name: str) -> None:
    """What is written with signs is rounded after each of them."""

    @extending.type_callable(sign)
    def typed(context: Any) -> Any:
        return lambda a, b: a if isinstance(a, Vector) and a == b else None

    @extending.lower_builtin(sign, Vector, Vector)  # type: ignore[no-untyped-call, untyped-decorator]
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, name)(*args)


_sign(operator.add, "fadd")
_sign(operator.sub, "fsub")
_sign(operator.mul, "fmul")
_sign(operator.truediv, "fdiv")


def _splat(builder: Any, value: Any, size: int) -> Any:
    kind = ir.VectorType(value.type, size)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, WORD(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(WORD, size), [0] * size))


def _pointer(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """To array[row, at], or array[at] where it has one axis; nobody asks whether it is there."""
    array = context.make_array(sig.args[0])(context, builder, args[0])
    row, at = (context.cast(builder, arg, kind, types.intp) for arg, kind in zip(args[1:3], sig.args[1:3], strict=True))
    if sig.args[0].layout != "C":  # data of a user's own
        places = (row, at) if sig.args[0].ndim == 2 else (at,)
        steps = [builder.mul(place, builder.extract_value(array.strides, k)) for k, place in enumerate(places)]
        bytes_ = builder.bitcast(array.data, ir.IntType(8).as_pointer())
        return builder.bitcast(builder.gep(bytes_, [functools.reduce(builder.add, steps)]), array.data.type)
    if sig.args[0].ndim == 2:
        at = builder.add(builder.mul(row, builder.extract_value(array.shape, 1)), at)
    return builder.gep(array.data, [at])


def _loader(kind: Vector) -> Any:
    @intrinsic
    def load(typing: Any, array: Any, row: Any, at: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            place = _pointer(context, builder, sig, args)
            return builder.load(builder.bitcast(place, ir.VectorType(FLOAT, kind.size).as_pointer()), align=4)

        return kind(array, row, at), emit

    return load


load, load_rest, load_parts = map(_loader, (VECTOR, REST, PARTS))


@intrinsic
def store(typing: Any, array: Any, row: Any, at: Any, vector: Any) -> Any:
    """array[row, at:][:16] = vector"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = _pointer(context, builder, sig, args)
        builder.store(args[3], builder.bitcast(place, args[3].type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, row, at, vector), emit


@intrinsic
def spread(typing: Any, array: Any, row: Any, at: Any) -> Any:
    """array[row, at], sixteen times"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, builder.load(_pointer(context, builder, sig, args)), SIZE)

    return VECTOR(array, row, at), emit


@intrinsic
def get(typing: Any, array: Any, row: Any, at: Any) -> Any:
    """array[row, at]"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, sig, args))

    return array.dtype(array, row, at), emit


@intrinsic
def put(typing: Any, array: Any, row: Any, at: Any, value: Any) -> Any:
    """array[row, at] = value"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[3], _pointer(context, builder, sig, args))
        return context.get_dummy_value()

    return types.void(array, row, at, array.dtype), emit


@intrinsic
def filled(typing: Any, value: Any) -> Any:
    """This number, sixteen times"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, args[0], SIZE)

    return VECTOR(types.float32), emit


def _call(builder: Any, name: str, *args: Any) -> Any:
    """Emit a call of an LLVM intrinsic, such as llvm.fma, for numbers or vectors."""
    kind = args[0].type
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    suffix = "f32" if element == FLOAT else "f64"
    if isinstance(kind, ir.VectorType):
        suffix = f"v{kind.count}{suffix}"
    full = f"llvm.{name}.{suffix}"
    function = builder.module.globals.get(full)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [kind] * len(args)), full)
    return builder.call(function, args)


@intrinsic
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of vectors or numbers of one type, rounded once."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, "fma", *args)

    return a(a, a, a), emit


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """a where it is more than b, else b"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return VECTOR(VECTOR, VECTOR), emit


def _where(condition: Any) -> Any:
    """The last argument where a condition of the ones before holds, else zero."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        holds = condition(context, builder, sig, args)
        return builder.select(holds, args[-1], ir.Constant(args[-1].type, None))

    return emit


def _labels(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    place = _pointer(context, builder, sig, args)
    return builder.load(builder.bitcast(place, ir.VectorType(WORD, SIZE).as_pointer()), align=4)


@intrinsic
def where_positive(typing: Any, a: Any, b: Any) -> Any:
    """b where a is above zero, else zero"""

    def positive(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fcmp_ordered(">", args[0], ir.Constant(args[0].type, None))

    return VECTOR(VECTOR, VECTOR), _where(positive)


@intrinsic
def where_label(typing: Any, y: Any, row: Any, at: Any, label: Any, a: Any) -> Any:
    """a where y[row, at:] is this label, else zero"""

    def same(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        label = context.cast(builder, args[3], sig.args[3], types.int32)
        return builder.icmp_signed("==", _labels(context, builder, sig, args), _splat(builder, label, SIZE))

    return VECTOR(y, row, at, label, VECTOR), _where(same)


@intrinsic
def where_labelled(typing: Any, y: Any, row: Any, at: Any, a: Any) -> Any:
    """a where y[row, at:] is a label, not -1, else zero"""

    def labelled(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = _labels(context, builder, sig, args)
        return builder.icmp_signed(">=", found, ir.Constant(found.type, None))

    return VECTOR(y, row, at, VECTOR), _where(labelled)


def _called(name: str) -> Any:
    @intrinsic
    def call(typing: Any, a: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _call(builder, name, *args)

        return VECTOR(VECTOR), emit

    return call


floor, root = _called("floor"), _called("sqrt")


@intrinsic
def power_of_two(typing: Any, exponent: Any) -> Any:
    """Of whole numbers from -126 to 127"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        words = ir.VectorType(WORD, SIZE)
        biased = builder.add(builder.fptosi(args[0], words), ir.Constant(words, [127] * SIZE))
        return builder.bitcast(builder.shl(biased, ir.Constant(words, [23] * SIZE)), args[0].type)

    return VECTOR(VECTOR), emit


@intrinsic
def scalar_power_of_two(typing: Any, exponent: Any) -> Any:
    """Return 2.0 to the power of a whole number from -1022 to 1023, given as a float64"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(64)
        biased = builder.add(builder.fptosi(args[0], word), word(1023))
        return builder.bitcast(builder.shl(biased, word(52)), args[0].type)

    return types.float64(types.float64), emit


@intrinsic
def no_parts(typing: Any) -> Any:
    """The sums before the first number"""
    return PARTS(), lambda context, builder, sig, args: ir.Constant(ir.VectorType(FLOAT, SUMS), None)


@intrinsic
def begun(typing: Any, value: Any) -> Any:
    """A register of sums that goes on from this one"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.insert_element(ir.Constant(ir.VectorType(FLOAT, REGISTER), None), args[0], WORD(0))

    return REST(types.float32), emit


@intrinsic
def folded(typing: Any, sums: Any) -> Any:
    """Registers in pairs, then the two halves of the last one, again and again"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def part(value: Any, begin: int, size: int) -> Any:
            places = ir.Constant(ir.VectorType(WORD, size), list(range(begin, begin + size)))
            return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), places)

        registers, size = [part(args[0], begin, REGISTER) for begin in range(0, sums.size, REGISTER)], REGISTER
        while len(registers) > 1:
            registers = [builder.fadd(*registers[k : k + 2]) for k in range(0, len(registers), 2)]
        (value,) = registers
        while size > 1:
            size //= 2
            value = builder.fadd(part(value, 0, size), part(value, size, size))
        return builder.extract_element(value, WORD(0))

    return types.float32(sums), emit
