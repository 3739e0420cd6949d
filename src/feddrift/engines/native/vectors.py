"""Vectors of floats for the compiled loops, with the same bits on every processor.

LLVM also vectorises plain loops over rows, but it then checks whether arrays overlap and keeps intermediate values in
memory. For nets with a few units this takes longer than the arithmetic. Here the length of a vector does not depend on
the processor, so the order of every sum is fixed. A multiply-add is rounded once: it calls `llvm.fma`, which a
processor without such an instruction computes in software.

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

VECTOR_SIZE = 16  # floats in a vector
FLOAT = ir.FloatType()
WORD = ir.IntType(32)
REGISTER_SIZE = 8  # floats in a register
PARTS_SIZE = 4 * REGISTER_SIZE  # partial sums of a long sum: those of four registers


def make_intrinsic(function: Callable[..., Any]) -> Any:
    """Return a function that compiled loops can call; the argument is a function that emits its code."""
    return extending.intrinsic(function)


class Vector(types.Type):
    """Numba type of a vector of `size` floats."""

    def __init__(self, size: int) -> None:
        super().__init__(name=f"Vector({size})")
        self.size = size


@extending.register_model(Vector)
class _VectorModel(extending.models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(FLOAT, fe_type.size))  # type: ignore[no-untyped-call]


VECTOR = Vector(VECTOR_SIZE)
REGISTER_VECTOR = Vector(REGISTER_SIZE)
PARTS = Vector(PARTS_SIZE)


def _register_operator(operation: Any, name: str) -> None:
    """Compile an operator on vectors to the LLVM instruction of this name; its result is rounded."""

    @extending.type_callable(operation)
    def type_operator(context: Any) -> Any:
        return lambda a, b: a if isinstance(a, Vector) and a == b else None

    @extending.lower_builtin(operation, Vector, Vector)  # type: ignore[no-untyped-call, untyped-decorator]
    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, name)(*args)


_register_operator(operator.add, "fadd")
_register_operator(operator.sub, "fsub")
_register_operator(operator.mul, "fmul")
_register_operator(operator.truediv, "fdiv")


def _broadcast_value(builder: Any, value: Any, size: int) -> Any:
    kind = ir.VectorType(value.type, size)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, WORD(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(WORD, size), [0] * size))


def _get_pointer(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Return the pointer to array[row, column], or to array[column] of an array with one axis.

    Bounds are not checked.
    """
    array = context.make_array(sig.args[0])(context, builder, args[0])
    row = context.cast(builder, args[1], sig.args[1], types.intp)
    column = context.cast(builder, args[2], sig.args[2], types.intp)
    if sig.args[0].layout != "C":  # an array of the user may have any strides
        indices = (row, column) if sig.args[0].ndim == 2 else (column,)
        offsets = [builder.mul(index, builder.extract_value(array.strides, k)) for k, index in enumerate(indices)]
        first_byte = builder.bitcast(array.data, ir.IntType(8).as_pointer())
        return builder.bitcast(builder.gep(first_byte, [functools.reduce(builder.add, offsets)]), array.data.type)
    if sig.args[0].ndim == 2:
        column = builder.add(builder.mul(row, builder.extract_value(array.shape, 1)), column)
    return builder.gep(array.data, [column])


def _make_loader(kind: Vector) -> Any:
    """Return a function that loads a vector of this type from array[row, column:]."""

    @make_intrinsic
    def load_vector(typing: Any, array: Any, row: Any, column: Any) -> Any:
        def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = _get_pointer(context, builder, sig, args)
            return builder.load(builder.bitcast(pointer, ir.VectorType(FLOAT, kind.size).as_pointer()), align=4)

        return kind(array, row, column), emit_code

    return load_vector


load_vector, load_register, load_parts = map(_make_loader, (VECTOR, REGISTER_VECTOR, PARTS))


@make_intrinsic
def store_vector(typing: Any, array: Any, row: Any, column: Any, vector: Any) -> Any:
    """Write a vector to array[row, column : column + VECTOR_SIZE]."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _get_pointer(context, builder, sig, args)
        builder.store(args[3], builder.bitcast(pointer, args[3].type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, row, column, vector), emit_code


@make_intrinsic
def broadcast_element(typing: Any, array: Any, row: Any, column: Any) -> Any:
    """Return a vector of copies of array[row, column]."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _broadcast_value(builder, builder.load(_get_pointer(context, builder, sig, args)), VECTOR_SIZE)

    return VECTOR(array, row, column), emit_code


@make_intrinsic
def get_element(typing: Any, array: Any, row: Any, column: Any) -> Any:
    """Return array[row, column]."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_get_pointer(context, builder, sig, args))

    return array.dtype(array, row, column), emit_code


@make_intrinsic
def put_element(typing: Any, array: Any, row: Any, column: Any, value: Any) -> Any:
    """Write a value to array[row, column]."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[3], _get_pointer(context, builder, sig, args))
        return context.get_dummy_value()

    return types.void(array, row, column, array.dtype), emit_code


@make_intrinsic
def fill_vector(typing: Any, value: Any) -> Any:
    """Return a vector of copies of a number."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _broadcast_value(builder, args[0], VECTOR_SIZE)

    return VECTOR(types.float32), emit_code


def _call_intrinsic(builder: Any, name: str, *args: Any) -> Any:
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


@make_intrinsic
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of vectors or numbers of one type, rounded once."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call_intrinsic(builder, "fma", *args)

    return a(a, a, a), emit_code


@make_intrinsic
def take_larger(typing: Any, a: Any, b: Any) -> Any:
    """Return a where it is larger than b, else b (also where a is NaN)."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return VECTOR(VECTOR, VECTOR), emit_code


def _select_where(condition: Any) -> Any:
    """Return a function that emits code: the last argument where a condition on the others is true, else zero."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        is_selected = condition(context, builder, sig, args)
        return builder.select(is_selected, args[-1], ir.Constant(args[-1].type, None))

    return emit_code


def _load_labels(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    pointer = _get_pointer(context, builder, sig, args)
    return builder.load(builder.bitcast(pointer, ir.VectorType(WORD, VECTOR_SIZE).as_pointer()), align=4)


@make_intrinsic
def where_positive(typing: Any, a: Any, b: Any) -> Any:
    """Return b where a is above zero, else zero."""

    def is_positive(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fcmp_ordered(">", args[0], ir.Constant(args[0].type, None))

    return VECTOR(VECTOR, VECTOR), _select_where(is_positive)


@make_intrinsic
def where_label(typing: Any, y: Any, row: Any, column: Any, label: Any, a: Any) -> Any:
    """Return a where y[row, column : column + VECTOR_SIZE] is this label, else zero."""

    def has_label(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        label = context.cast(builder, args[3], sig.args[3], types.int32)
        return builder.icmp_signed(
            "==", _load_labels(context, builder, sig, args), _broadcast_value(builder, label, VECTOR_SIZE)
        )

    return VECTOR(y, row, column, label, VECTOR), _select_where(has_label)


@make_intrinsic
def where_any_label(typing: Any, y: Any, row: Any, column: Any, a: Any) -> Any:
    """Return a where y[row, column : column + VECTOR_SIZE] is a label, else zero; -1 is not a label."""

    def has_any_label(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        labels = _load_labels(context, builder, sig, args)
        return builder.icmp_signed(">=", labels, ir.Constant(labels.type, None))

    return VECTOR(y, row, column, VECTOR), _select_where(has_any_label)


def _make_unary_intrinsic(name: str) -> Any:
    @make_intrinsic
    def apply_intrinsic(typing: Any, a: Any) -> Any:
        def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _call_intrinsic(builder, name, *args)

        return VECTOR(VECTOR), emit_code

    return apply_intrinsic


floor = _make_unary_intrinsic("floor")
square_root = _make_unary_intrinsic("sqrt")


@make_intrinsic
def power_of_two(typing: Any, exponent: Any) -> Any:
    """Return 2.0 to the power of whole numbers from -126 to 127, given as a vector of floats."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        words = ir.VectorType(WORD, VECTOR_SIZE)
        biased = builder.add(builder.fptosi(args[0], words), ir.Constant(words, [127] * VECTOR_SIZE))
        return builder.bitcast(builder.shl(biased, ir.Constant(words, [23] * VECTOR_SIZE)), args[0].type)

    return VECTOR(VECTOR), emit_code


@make_intrinsic
def scalar_power_of_two(typing: Any, exponent: Any) -> Any:
    """Return 2.0 to the power of a whole number from -1022 to 1023, given as a float64."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(64)
        biased = builder.add(builder.fptosi(args[0], word), word(1023))
        return builder.bitcast(builder.shl(biased, word(52)), args[0].type)

    return types.float64(types.float64), emit_code


@make_intrinsic
def zero_parts(typing: Any) -> Any:
    """Return partial sums that are zero."""
    return PARTS(), lambda context, builder, sig, args: ir.Constant(ir.VectorType(FLOAT, PARTS_SIZE), None)


@make_intrinsic
def start_register(typing: Any, value: Any) -> Any:
    """Return a register whose first partial sum is this value; the others are zero."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.insert_element(ir.Constant(ir.VectorType(FLOAT, REGISTER_SIZE), None), args[0], WORD(0))

    return REGISTER_VECTOR(types.float32), emit_code


@make_intrinsic
def sum_parts(typing: Any, sums: Any) -> Any:
    """Return the total of partial sums: pairs of registers are added until one is left, then the halves of this one."""

    def emit_code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def take_part(value: Any, begin: int, size: int) -> Any:
            places = ir.Constant(ir.VectorType(WORD, size), list(range(begin, begin + size)))
            return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), places)

        registers = [take_part(args[0], begin, REGISTER_SIZE) for begin in range(0, sums.size, REGISTER_SIZE)]
        while len(registers) > 1:
            registers = [builder.fadd(*registers[k : k + 2]) for k in range(0, len(registers), 2)]
        (value,) = registers
        size = REGISTER_SIZE
        while size > 1:
            size //= 2
            value = builder.fadd(take_part(value, 0, size), take_part(value, size, size))
        return builder.extract_element(value, WORD(0))

    return types.float32(sums), emit_code
