"""The first process of an environment that only waits to be used: a program of some 200 bytes, made here.

Environments for ``exec`` need a first process in any image, even one without a shell. This one ignores SIGCHLD, so that
the kernel reaps what is orphaned (sigaction(2), SA_NOCLDWAIT semantics of SIG_IGN), ends on SIGTERM and SIGINT, and
otherwise waits. It is shown to the container as one file on its own /dev. ELF: System V gABI chapter 4 and 5; system
call numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import os
import platform
import struct

from weenv.core.atomic import write_atomic
from weenv.core.errors import UnsupportedError

_BASE = 0x400000
_CODE = 64 + 56
"""Offset of the code: behind the ELF header and one program header."""

_SIGINT, _SIGTERM, _SIGCHLD = 2, 15, 17
_SA_RESTORER = 0x04000000
_EXIT_STATUS = 0


def _x86_64() -> tuple[int, bytes]:
    """(e_machine, code and data)."""

    def sigaction(signal: int, action: int) -> bytes:
        # mov eax,13 (rt_sigaction); mov edi,signal; mov esi,action; xor edx,edx; mov r10d,8; syscall
        return (
            b"\xb8" + struct.pack("<I", 13) + b"\xbf" + struct.pack("<I", signal) + b"\xbe" + struct.pack("<I", action)
            + b"\x31\xd2\x41\xba" + struct.pack("<I", 8) + b"\x0f\x05"
        )  # fmt: skip

    # mov edi,status; mov eax,231 (exit_group); syscall
    leave = b"\xbf" + struct.pack("<I", _EXIT_STATUS) + b"\xb8" + struct.pack("<I", 231) + b"\x0f\x05"
    # mov eax,34 (pause); syscall; jmp back to it
    wait = b"\xb8" + struct.pack("<I", 34) + b"\x0f\x05\xeb\xf7"
    length = 3 * len(sigaction(0, 0)) + len(wait)
    handler = _BASE + _CODE + length
    actions = (_CODE + length + len(leave) + 7) // 8 * 8
    end, ignore = _BASE + actions, _BASE + actions + 32
    code = sigaction(_SIGCHLD, ignore) + sigaction(_SIGTERM, end) + sigaction(_SIGINT, end) + wait + leave
    # struct kernel_sigaction: handler, flags, restorer, mask. The handler never returns, so any restorer does.
    data = struct.pack("<QQQQ", handler, _SA_RESTORER, handler, 0) + struct.pack("<QQQQ", 1, 0, 0, 0)
    return 62, code.ljust(actions - _CODE, b"\0") + data


def _aarch64() -> tuple[int, bytes]:
    """(e_machine, code and data)."""

    def move(register: int, value: int) -> bytes:
        low = struct.pack("<I", 0xD2800000 | (value & 0xFFFF) << 5 | register)  # movz
        high = struct.pack("<I", 0xF2A00000 | (value >> 16 & 0xFFFF) << 5 | register)  # movk, lsl 16
        return low + high

    call = struct.pack("<I", 0xD4000001)  # svc #0

    def sigaction(signal: int, action: int) -> bytes:
        return move(0, signal) + move(1, action) + move(2, 0) + move(3, 8) + move(8, 134) + call

    leave = move(0, _EXIT_STATUS) + move(8, 94) + call
    # ppoll(NULL, 0, NULL, NULL, 0), for ever
    poll = b"".join(move(register, 0) for register in range(5)) + move(8, 73) + call
    wait = poll + struct.pack("<I", 0x14000000 | (-(len(poll) // 4) & 0x3FFFFFF))  # b
    length = 3 * len(sigaction(0, 0)) + len(wait)
    handler = _BASE + _CODE + length
    actions = (_CODE + length + len(leave) + 7) // 8 * 8
    end, ignore = _BASE + actions, _BASE + actions + 24
    code = sigaction(_SIGCHLD, ignore) + sigaction(_SIGTERM, end) + sigaction(_SIGINT, end) + wait + leave
    # struct kernel_sigaction without restorer: handler, flags, mask
    data = struct.pack("<QQQ", handler, 0, 0) + struct.pack("<QQQ", 1, 0, 0)
    return 183, code.ljust(actions - _CODE, b"\0") + data


_MACHINES = {"x86_64": _x86_64, "aarch64": _aarch64}


def program(machine: str = "") -> bytes:
    """The executable for a machine as uname(2) names it. Raises UnsupportedError."""
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise UnsupportedError(f"no waiting process for {name} machines", hint="give a command that waits: sleep infinity")
    number, text = _MACHINES[name]()
    size = _CODE + len(text)
    header = struct.pack(
        "<4sBBBBQHHIQQQIHHHHHH",
        b"\x7fELF", 2, 1, 1, 0, 0, 2, number, 1, _BASE + _CODE, 64, 0, 0, 64, 56, 1, 0, 0, 0,
    )  # fmt: skip
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return header + segment + text


def install(directory: str) -> str:
    """Put the program there, once; its path. Raises OSError, UnsupportedError."""
    path = os.path.join(directory, "weenv-init")
    wanted = program()
    try:
        with open(path, "rb") as file:
            if file.read(len(wanted) + 1) == wanted:
                return path
    except FileNotFoundError:
        pass
    os.makedirs(directory, mode=0o700, exist_ok=True)
    write_atomic(path, wanted, mode=0o555, durable=False)
    return path
