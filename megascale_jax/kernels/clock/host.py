"""The host's monotonic clock, read inside a program for CPUs.

A Python callback would cost half a millisecond a stamp and the interpreter's lock. So the handler that XLA calls is native: it is
built once per process, as the few instructions that it is, against XLA's stable C interface for custom calls
(``xla/ffi/api/c_api.h``, version `_API`), whose structures are described here.

With a third operand, the device's index in the mesh, it also counts the stamps of each device, for a host that looks meanwhile.
"""

import ctypes
import time
from functools import cache

import jax
import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

_API = (0, 1)
"""Version of the interface that this uses: the first one that has these fields, which XLA goes on to support."""
_TARGET = "megascale_host_clock"
DEVICES = 1 << 16
"""Devices of a mesh that are counted; stamps of others are taken and not counted."""
_counts = np.zeros(DEVICES, np.int64)

_INT, _LONG, _POINTER = ir.IntType(32), ir.IntType(64), ir.PointerType()
_VALUES = ir.LiteralStructType([_LONG, _POINTER, _LONG, _POINTER, _POINTER])
"""Operands, or results: size of the structure, extension, how many, types, addresses of buffers."""
_FRAME = ir.LiteralStructType([_LONG, _POINTER, _POINTER, _POINTER, _INT, _VALUES, _VALUES])
"""A call: size, extension, interface, context, stage, operands, results; more follows."""
_OPERANDS, _RESULTS = 5, 6
"""Their places in it."""
_BUFFER = ir.LiteralStructType([_LONG, _POINTER, _INT, _POINTER])
"""A buffer: size, extension, type, address of the data; more follows."""
_EXTENSION = ir.LiteralStructType([_LONG, _INT, _POINTER])
"""Size, kind, next one."""
_ASKED = ir.LiteralStructType([_EXTENSION, _POINTER])
"""The only extension of a call, which then only asks what the handler is: address of the answer."""
_VERSION = ir.LiteralStructType([_LONG, _POINTER, _INT, _INT])
_ANSWER = ir.LiteralStructType([_LONG, _VERSION])
_TIME = ir.LiteralStructType([_LONG, _LONG])
"""Seconds, nanoseconds."""


def stamp(after: jax.Array, previous: jax.Array, *, axes: tuple[str, ...] = ()) -> jax.Array:
    """The time in nanoseconds, int32 ``[2]``, low word first; counted for the device's place along mesh ``axes``, if there are any."""
    _register()
    result = jax.ShapeDtypeStruct(previous.shape, previous.dtype)
    device = (jax.lax.axis_index(axes),) if axes else ()
    return jax.ffi.ffi_call(_TARGET, result)(after, previous, *device)


def taken(device: int) -> int:
    """Stamps that a device has taken since the process began."""
    return int(_counts[device]) if 0 <= device < DEVICES else 0


@cache
def _register() -> None:
    """Make the handler known to XLA, once; its code is never freed."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(str(_handler()))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
    engine.finalize_object()
    _kept.append(engine)
    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype, make_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = make_capsule(engine.get_function_address(_TARGET), None, None)
    jax.ffi.register_ffi_target(_TARGET, capsule, platform="cpu", api_version=1)


_kept: list[llvm.ExecutionEngine] = []


def _handler() -> ir.Module:
    """``XLA_FFI_Error* handler(XLA_FFI_CallFrame*)``: the time into the first result, and the device's count; never an error."""
    module = ir.Module(_TARGET)
    handler = ir.Function(module, ir.FunctionType(_POINTER, [_POINTER]), _TARGET)
    read_clock = ir.Function(module, ir.FunctionType(_INT, [_INT, _POINTER]), "clock_gettime")
    code = ir.IRBuilder(handler.append_basic_block())

    def field(structure: ir.Value, kind: ir.LiteralStructType, *path: int) -> ir.Value:
        return code.gep(structure, [_INT(0), *map(_INT, path)], source_etype=kind)

    (frame,) = handler.args
    asked = code.load(field(frame, _FRAME, 1), typ=_POINTER)
    with code.if_then(code.icmp_unsigned("!=", asked, _POINTER(None))):
        answer = code.load(field(asked, _ASKED, 1), typ=_POINTER)
        for place, number in enumerate(_API, 2):
            code.store(_INT(number), field(answer, _ANSWER, 1, place))
        code.ret(_POINTER(None))
    now = code.alloca(_TIME)
    code.call(read_clock, [_INT(time.CLOCK_MONOTONIC), now])
    seconds, rest = (code.load(field(now, _TIME, place), typ=_LONG) for place in (0, 1))

    def data(values: int, number: int) -> ir.Value:
        buffers = code.load(field(frame, _FRAME, values, 4), typ=_POINTER)
        buffer = code.load(code.gep(buffers, [_INT(number)], source_etype=_POINTER), typ=_POINTER)
        return code.load(field(buffer, _BUFFER, 3), typ=_POINTER)

    code.store(code.add(code.mul(seconds, _LONG(10**9)), rest), data(_RESULTS, 0), align=4)
    with code.if_then(code.icmp_unsigned(">", code.load(field(frame, _FRAME, _OPERANDS, 2), typ=_LONG), _LONG(2))):
        device = code.load(data(_OPERANDS, 2), typ=_INT, align=4)
        with code.if_then(code.icmp_unsigned("<", device, _INT(DEVICES))):
            counts = code.inttoptr(_LONG(_counts.ctypes.data), _POINTER)
            # a device takes its stamps one after the other, and nobody else writes its count
            count = code.gep(counts, [device], source_etype=_LONG)
            code.store(code.add(code.load(count, typ=_LONG), _LONG(1)), count, align=8)
    code.ret(_POINTER(None))
    return module
