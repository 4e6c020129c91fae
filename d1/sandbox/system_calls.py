"""The system calls that a sandbox refuses, as a seccomp filter for bubblewrap.

Refused are those that hold memory outside of any process, which RLIMIT_AS does not count (memfd_create, shared
memory, queues and semaphores of System V and POSIX, io_uring, maps of BPF, shared mappings, which keep their pages when
they shrink), and sockets of all families but those in `FAMILIES`: a network namespace does not confine vsock.
"""

from __future__ import annotations

import errno
import socket
import struct

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
MACHINES = {  # name in uname -> AUDIT_ARCH_* of linux/audit.h, and the numbers of system calls
    "x86_64": (
        0xC000003E,
        {"mmap": 9, "shmget": 29, "socket": 41, "socketpair": 53, "semget": 64, "msgget": 68, "mq_open": 240}
        | {"memfd_create": 319, "bpf": 321},
    ),
    "aarch64": (
        0xC00000B7,
        {"mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198, "socketpair": 199, "mmap": 222}
        | {"memfd_create": 279, "bpf": 280},
    ),
}
EVERYWHERE = {"io_uring_setup": 425, "memfd_secret": 447}
X32 = 0x40000000  # x86_64's other numbers for the same calls begin here
MAP_SHARED = 1  # also a bit of MAP_SHARED_VALIDATE

# linux/bpf_common.h and linux/seccomp.h
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
NUMBER, MACHINE = 0, 4  # places in struct seccomp_data


def argument(place: int) -> int:
    """Where the lower half of a call's argument is in struct seccomp_data; both machines are little-endian."""
    return 16 + 8 * place


def refusals(machine: str) -> bytes:
    """The filter for a machine of `MACHINES`: an array of struct sock_filter."""
    audit, numbers = MACHINES[machine]
    calls = numbers | EVERYWHERE
    shared, families = calls.pop("mmap"), (calls.pop("socket"), calls.pop("socketpair"))
    steps = [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, audit),  # skips the next step, else none
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, REFUSE),
    ]
    for number in calls.values():
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    steps += [(EQUAL, 0, 4, shared), (LOAD, 0, 0, argument(3)), (ANY_BIT, 0, 1, MAP_SHARED)]
    steps += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    steps += [(EQUAL, 2, 0, families[0]), (EQUAL, 1, 0, families[1]), (RETURN, 0, 0, ALLOW)]
    steps += [(LOAD, 0, 0, argument(0))]
    for family in FAMILIES:
        steps += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    steps += [(RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)
