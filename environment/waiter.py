"""The first process of an environment that only waits, and the parent of those added to it: one program, made here.

Environments need a first process in any image, even one without a shell, and a command must not be able to hide from
the end of its time. The program is some 1500 bytes and is shown to the container as one file on its own /dev.

Alone, it ignores SIGCHLD, so that the kernel reaps what is orphaned (sigaction(2)), ends with status 0 on SIGTERM and
SIGINT, and waits. With arguments ``"" PATH... "" ARG0 ...`` (:func:`held`) it does the same until it gets RELEASE, and then
becomes the first PATH that can be executed, as execvp(3) goes through them. With arguments ``PATH ARG0 ...`` it becomes the
reaper of its descendants (prctl(2), PR_SET_CHILD_SUBREAPER), runs PATH as a child and ends as that does: with its status, or
128 + n for signal n. While it lives, whatever the command forks, sessions and daemons too, has it for an ancestor.

Where a command cannot be executed it says why on standard error and ends with 127 or 126, as a shell would; with 126 where
it cannot be forked.

ELF: System V gABI, chapters 4 and 5. System call numbers: arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h. Instructions: Intel SDM volume 2; Arm ARM (DDI 0487) chapter C6.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence

from weenv.core.errors import UnsupportedError

RELEASE = 10
"""SIGUSR1. Lets a program that holds its command back go on with it."""

_BASE = 0x400000
_HEADERS = 64 + 56
"""Bytes of the ELF header and of one program header; the code follows."""

_SIGINT, _SIGQUIT, _SIGTERM, _SIGCHLD, _SIGTSTP = 2, 3, 15, 17, 20
_SUBREAPER = 36
_SA_RESTORER, _SA_NODEFER = 0x04000000, 0x40000000
"""The second: a signal that is blocked within its handler would stay so in what the handler executes (execve(2))."""

_REFUSED = {
    errno.ENOENT: (127, "no such file, or the interpreter that it names is not there"),
    errno.ENOTDIR: (127, "no such file"),
    errno.EACCES: (126, "permission denied, or it is no file"),
    errno.ENOEXEC: (126, "it is no program for this machine"),
    errno.E2BIG: (126, "its arguments and variables are too long"),
    errno.EIO: (126, "input/output error: bytes of it that are not on the node could not be had; weenv status says why"),
    0: (126, "the kernel refuses it"),
    -1: (126, "there is no process for it: the limit of processes, or the memory, is used up"),
}
"""Why a command cannot be executed: errno (0: any other, -1: it was not even forked) -> exit status and words."""


def held(candidates: Sequence[str], args: Sequence[str]) -> tuple[str, ...]:
    """The arguments, after the program itself, with which it waits and then becomes the first of the candidates."""
    return ("", *candidates, "", *args)


def _words(number: int) -> bytes:
    return f"weenv: the command cannot be executed: {_REFUSED[number][1]}\n".encode()


class _Code:
    """Instructions with labels, which :meth:`link` fills in."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.labels: dict[str, int] = {}
        self.uses: list[tuple[int, str, str]] = []

    def label(self, name: str) -> None:
        self.labels[name] = len(self.data)

    def use(self, kind: str, name: str, filler: bytes) -> None:
        self.uses.append((len(self.data), kind, name))
        self.data += filler

    def align(self, size: int) -> None:
        self.data += bytes(-(_HEADERS + len(self.data)) % size)

    def link(self) -> bytes:
        for where, kind, name in self.uses:
            target = self.labels[name]
            if kind == "absolute":  # 32 bits of address
                struct.pack_into("<I", self.data, where, _BASE + _HEADERS + target)
            elif kind == "relative":  # x86: 32 bits, from the end of the field
                struct.pack_into("<i", self.data, where, target - where - 4)
            elif kind == "address":  # x86: the data itself holds a 64 bit address
                struct.pack_into("<Q", self.data, where, _BASE + _HEADERS + target)
            else:
                words, (old,) = (target - where) // 4, struct.unpack_from("<I", self.data, where)
                field = (words & 0x3FFFFFF) if kind == "b" else (words & 0x7FFFF) << 5
                struct.pack_into("<I", self.data, where, old | field)
        return bytes(self.data)


def _x86_64() -> tuple[int, bytes]:
    """(e_machine, code and data). Registers kept over calls: rbx the stack as it was, r12 the child."""
    code = _Code()

    def emit(text: str) -> None:
        code.data += bytes.fromhex(text)

    def number(prefix: str, value: int) -> None:
        emit(prefix)
        code.data += struct.pack("<I", value & 0xFFFFFFFF)

    def call(value: int) -> None:
        number("b8", value)  # mov eax, value
        emit("0f05")  # syscall

    def jump(opcode: str, name: str) -> None:
        emit(opcode)
        code.use("relative", name, bytes(4))

    def sigaction(signal: int, action: str) -> None:
        number("bf", signal)  # mov edi, signal
        emit("be")  # mov esi, action
        code.use("absolute", action, bytes(4))
        emit("31d2")  # xor edx, edx
        number("41ba", 8)  # mov r10d, 8
        call(13)  # rt_sigaction

    emit("4889e3")  # mov rbx, rsp
    emit("48833b03")  # cmp qword [rbx], 3: argc
    jump("0f8c", "waits")  # jl
    emit("488b4310")  # mov rax, [rbx+16]: argv[1]
    emit("803800")  # cmp byte [rax], 0
    jump("0f85", "added")  # jne
    code.label("waits")
    sigaction(_SIGCHLD, "ignore")
    sigaction(_SIGTERM, "end")
    sigaction(_SIGINT, "end")
    emit("48833b03")  # cmp qword [rbx], 3
    jump("0f8c", "pause")  # jl
    sigaction(RELEASE, "go")  # the last: who sees it caught may send it
    code.label("pause")
    call(34)  # pause
    jump("e9", "pause")
    code.label("handler")
    emit("31ff")  # xor edi, edi
    code.label("leave")
    call(231)  # exit_group
    code.label("released")
    sigaction(_SIGCHLD, "default")
    emit("4c8d6b18")  # lea r13, [rbx+24]: argv+2
    code.label("find")
    emit("498b4500")  # mov rax, [r13]
    emit("4983c508")  # add r13, 8
    emit("803800")  # cmp byte [rax], 0
    jump("0f85", "find")  # jne
    emit("488b03")  # mov rax, [rbx]: argc
    emit("4c8d74c310")  # lea r14, [rbx+rax*8+16]: the environment
    emit("488d6b18")  # lea rbp, [rbx+24]
    number("41bf", -errno.ENOENT)  # mov r15d, -ENOENT
    code.label("try")
    emit("488b7d00")  # mov rdi, [rbp]
    emit("803f00")  # cmp byte [rdi], 0
    jump("0f84", "none")  # je
    emit("4883c508")  # add rbp, 8
    emit("4c89ee4c89f2")  # mov rsi, r13; mov rdx, r14
    call(59)  # execve
    for code_number in errno.ENOENT, errno.ENOTDIR:
        number("3d", -code_number)  # cmp eax, -errno
        jump("0f84", "try")  # je
    emit("4189c7")  # mov r15d, eax
    number("3d", -errno.EACCES)
    jump("0f84", "try")
    code.label("none")
    emit("4489f8")  # mov eax, r15d
    jump("e9", "refused")
    code.label("added")
    number("bf", _SUBREAPER)
    number("be", 1)  # mov esi, 1
    emit("31d24531d24531c0")  # xor edx, edx; xor r10d, r10d; xor r8d, r8d
    call(157)  # prctl
    sigaction(_SIGCHLD, "default")  # inherited as ignored, it would have the kernel reap the command
    call(57)  # fork
    emit("85c0")  # test eax, eax
    jump("0f84", "child")  # jz
    emit("4189c4")  # mov r12d, eax
    for signal in (_SIGINT, _SIGQUIT, _SIGTSTP):  # those of a terminal are for the command
        sigaction(signal, "ignore")
    code.label("reap")
    emit("48c7c7ffffffff")  # mov rdi, -1
    emit("488d7424f0")  # lea rsi, [rsp-16]
    emit("31d24531d2")  # xor edx, edx; xor r10d, r10d
    call(61)  # wait4
    emit("83f8f6")  # cmp eax, -10: ECHILD, there is no command: the fork failed
    jump("0f84", "lost")  # je
    emit("4439e0")  # cmp eax, r12d
    jump("0f85", "reap")  # jne
    emit("8b7c24f0")  # mov edi, [rsp-16]
    emit("89f8")  # mov eax, edi
    emit("83e07f")  # and eax, 0x7f
    jump("0f84", "exited")  # jz
    emit("8db880000000")  # lea edi, [rax+128]
    jump("e9", "leave")
    code.label("exited")
    emit("c1ef08")  # shr edi, 8
    emit("81e7ff000000")  # and edi, 0xff
    jump("e9", "leave")
    code.label("child")
    emit("488b03")  # mov rax, [rbx]: argc
    emit("488b7b10")  # mov rdi, [rbx+16]: argv[1]
    emit("488d7318")  # lea rsi, [rbx+24]: argv+2
    emit("488d54c310")  # lea rdx, [rbx+rax*8+16]: the environment
    call(59)  # execve
    code.label("refused")
    for code_number in _REFUSED:
        if code_number > 0:
            number("3d", -code_number)  # cmp eax, -errno
            jump("0f84", f"refused {code_number}")  # je
    for code_number, (status, _) in sorted(_REFUSED.items(), key=lambda item: item[0] != 0):  # 0 is what comes next
        code.label("lost" if code_number < 0 else f"refused {code_number}")
        number("bf", 2)
        emit("be")  # mov esi, words
        code.use("absolute", f"words {code_number}", bytes(4))
        number("ba", len(_words(code_number)))  # mov edx, length
        call(1)  # write
        number("bf", status)
        jump("e9", "leave")
    for code_number in _REFUSED:
        code.label(f"words {code_number}")
        code.data += _words(code_number)
    # struct kernel_sigaction: handler, flags, restorer, mask. The handler never returns, so any restorer does.
    code.align(8)
    code.label("end")
    code.use("address", "handler", bytes(8))
    code.data += struct.pack("<Q", _SA_RESTORER)
    code.use("address", "handler", bytes(8))
    code.data += bytes(8)
    code.label("go")
    code.use("address", "released", bytes(8))
    code.data += struct.pack("<Q", _SA_RESTORER | _SA_NODEFER)
    code.use("address", "handler", bytes(8))
    code.data += bytes(8)
    code.label("ignore")
    code.data += struct.pack("<QQQQ", 1, 0, 0, 0)
    code.label("default")
    code.data += bytes(32)
    return 62, code.link()


def _aarch64() -> tuple[int, bytes]:
    """(e_machine, code and data). Registers kept over calls: x19 the stack as it was, w20 the child."""
    code = _Code()

    def word(value: int) -> None:
        code.data += struct.pack("<I", value)

    def move(register: int, value: int) -> None:
        word(0xD2800000 | (value & 0xFFFF) << 5 | register)  # movz

    def call(value: int) -> None:
        move(8, value)
        word(0xD4000001)  # svc #0

    def jump(kind: str, opcode: int, name: str) -> None:
        code.use(kind, name, struct.pack("<I", opcode))

    def sigaction(signal: int, action: str) -> None:
        move(0, signal)
        word(0x58000041)  # ldr x1, [pc+8]
        jump("b", 0x14000000, f"after {len(code.data)}")
        code.use("address", action, bytes(8))
        code.labels[f"after {len(code.data) - 12}"] = len(code.data)
        move(2, 0)
        move(3, 8)
        call(134)  # rt_sigaction

    word(0x910003F3)  # mov x19, sp
    word(0xF9400260)  # ldr x0, [x19]: argc
    word(0xF1000C1F)  # cmp x0, 3
    jump("conditional", 0x5400000B, "waits")  # b.lt
    word(0xF9400A60)  # ldr x0, [x19, 16]: argv[1]
    word(0x39400000)  # ldrb w0, [x0]
    jump("conditional", 0x35000000, "added")  # cbnz w0
    code.label("waits")
    sigaction(_SIGCHLD, "ignore")
    sigaction(_SIGTERM, "end")
    sigaction(_SIGINT, "end")
    word(0xF9400260)  # ldr x0, [x19]
    word(0xF1000C1F)  # cmp x0, 3
    jump("conditional", 0x5400000B, "pause")  # b.lt
    sigaction(RELEASE, "go")  # the last: who sees it caught may send it
    code.label("pause")
    for register in range(5):
        move(register, 0)
    call(73)  # ppoll
    jump("b", 0x14000000, "pause")
    code.label("handler")
    move(0, 0)
    code.label("leave")
    call(94)  # exit_group
    code.label("released")
    sigaction(_SIGCHLD, "default")
    word(0x91006275)  # add x21, x19, 24: argv+2
    code.label("find")
    word(0xF84086A0)  # ldr x0, [x21], 8
    word(0x39400000)  # ldrb w0, [x0]
    jump("conditional", 0x35000000, "find")  # cbnz w0
    word(0xF9400263)  # ldr x3, [x19]: argc
    word(0x8B030E76)  # add x22, x19, x3, lsl 3
    word(0x910042D6)  # add x22, x22, 16: the environment
    word(0x91006277)  # add x23, x19, 24
    word(0x92800000 | (errno.ENOENT - 1) << 5 | 24)  # mov x24, -ENOENT
    code.label("try")
    word(0xF84086E0)  # ldr x0, [x23], 8
    word(0x39400001)  # ldrb w1, [x0]
    jump("conditional", 0x34000001, "none")  # cbz w1
    word(0xAA1503E1)  # mov x1, x21
    word(0xAA1603E2)  # mov x2, x22
    call(221)  # execve
    for code_number in errno.ENOENT, errno.ENOTDIR:
        word(0x3100001F | code_number << 10)  # cmn w0, errno
        jump("conditional", 0x54000000, "try")  # b.eq
    word(0xAA0003F8)  # mov x24, x0
    word(0x3100001F | errno.EACCES << 10)
    jump("conditional", 0x54000000, "try")
    code.label("none")
    word(0xAA1803E0)  # mov x0, x24
    jump("b", 0x14000000, "refused")
    code.label("added")
    move(0, _SUBREAPER)
    move(1, 1)
    for register in range(2, 5):
        move(register, 0)
    call(167)  # prctl
    sigaction(_SIGCHLD, "default")  # inherited as ignored, it would have the kernel reap the command
    move(0, _SIGCHLD)
    for register in range(1, 5):
        move(register, 0)
    call(220)  # clone
    jump("conditional", 0x34000000, "child")  # cbz w0
    word(0x2A0003F4)  # mov w20, w0
    for signal in (_SIGINT, _SIGQUIT, _SIGTSTP):  # those of a terminal are for the command
        sigaction(signal, "ignore")
    code.label("reap")
    word(0x92800000)  # mov x0, -1
    word(0xD10043E1)  # sub x1, sp, 16
    move(2, 0)
    move(3, 0)
    call(260)  # wait4
    word(0x3100281F)  # cmn w0, 10: ECHILD, there is no command: the fork failed
    jump("conditional", 0x54000000, "lost")  # b.eq
    word(0x6B14001F)  # cmp w0, w20
    jump("conditional", 0x54000001, "reap")  # b.ne
    word(0xB85F03E0)  # ldur w0, [sp, -16]
    word(0x12001801)  # and w1, w0, 0x7f
    jump("conditional", 0x34000001, "exited")  # cbz w1
    word(0x11020020)  # add w0, w1, 128
    jump("b", 0x14000000, "leave")
    code.label("exited")
    word(0x53083C00)  # ubfx w0, w0, 8, 8
    jump("b", 0x14000000, "leave")
    code.label("child")
    word(0xF9400263)  # ldr x3, [x19]: argc
    word(0xF9400A60)  # ldr x0, [x19, 16]: argv[1]
    word(0x91006261)  # add x1, x19, 24: argv+2
    word(0x8B030E62)  # add x2, x19, x3, lsl 3
    word(0x91004042)  # add x2, x2, 16: the environment
    call(221)  # execve
    code.label("refused")
    for code_number in _REFUSED:
        if code_number > 0:
            word(0x3100001F | code_number << 10)  # cmn w0, errno
            jump("conditional", 0x54000000, f"refused {code_number}")  # b.eq
    for code_number, (status, _) in sorted(_REFUSED.items(), key=lambda item: item[0] != 0):  # 0 is what comes next
        code.label("lost" if code_number < 0 else f"refused {code_number}")
        move(0, 2)
        word(0x58000041)  # ldr x1, [pc+8]
        jump("b", 0x14000000, f"write {code_number}")
        code.use("address", f"words {code_number}", bytes(8))
        code.label(f"write {code_number}")
        move(2, len(_words(code_number)))
        call(64)  # write
        move(0, status)
        jump("b", 0x14000000, "leave")
    for code_number in _REFUSED:
        code.label(f"words {code_number}")
        code.data += _words(code_number)
    # struct kernel_sigaction without restorer: handler, flags, mask
    code.align(8)
    code.label("end")
    code.use("address", "handler", bytes(8))
    code.data += bytes(16)
    code.label("go")
    code.use("address", "released", bytes(8))
    code.data += struct.pack("<QQ", _SA_NODEFER, 0)
    code.label("ignore")
    code.data += struct.pack("<QQQ", 1, 0, 0)
    code.label("default")
    code.data += bytes(24)
    return 183, code.link()


_MACHINES = {"x86_64": _x86_64, "aarch64": _aarch64}


def program(machine: str = "") -> bytes:
    """The executable for a machine as uname(2) names it. Raises UnsupportedError."""
    name = machine or os.uname().machine
    if name not in _MACHINES:
        raise UnsupportedError(f"no waiting process for {name} machines", hint="give a command that waits: sleep infinity")
    number, text = _MACHINES[name]()
    size = _HEADERS + len(text)
    header = struct.pack(
        "<4sBBBBQHHIQQQIHHHHHH",
        b"\x7fELF", 2, 1, 1, 0, 0, 2, number, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0,
    )  # fmt: skip
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x10000)
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
    from weenv.core.atomic import write_atomic

    write_atomic(path, wanted, mode=0o555, durable=False)
    return path
