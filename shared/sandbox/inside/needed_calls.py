"""The system calls that a function run may make, on each architecture. All others are refused (confine.py).

The list was made from the kernel's headers, by what the standard library can call, and then checked: by problems of a pack and by
programs that use the standard library (test_sandbox_honest.py), on Python 3.11 to 3.13. Calls by which another C library or version
does the same are listed too. Arguments decide about `clone`, `fcntl`, `socket` and `socketpair`: see confine.py.

Calls that are not listed fail with ENOSYS, which the C library and Python take for a kernel without the call. Administrators and
exploits need them, and programs of other kinds.
"""

from __future__ import annotations

# Name, number on x86_64, number on aarch64; -: that architecture has no such call.
_TABLE = """
    # Descriptors and files
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
    pwritev 296 70, lseek 8 62, open 2 -, openat 257 56, openat2 437 437,
    creat 85 -, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59,
    ioctl 16 29, sendfile 40 71, splice 275 76, copy_file_range 326 285, truncate 76 45, ftruncate 77 46,
    fallocate 285 47, fadvise64 221 223, readahead 187 213, fsync 74 82, fdatasync 75 83, memfd_create 319 279,
    eventfd 284 -, eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
    # What stands where
    stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44,
    access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -,
    getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, getxattr 191 8, lgetxattr 192 9,
    fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13,
    # Changes of names: all that a run sees is read-only, and says so
    rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -,
    unlinkat 263 35, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, chmod 90 -, fchmod 91 52,
    fchmodat 268 53, fchmodat2 452 452, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88,
    umask 95 166,
    # Waiting for events
    select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73, epoll_create 213 -, epoll_create1 291 20,
    epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441,
    # On a connected pair of sockets
    sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, getsockname 51 204,
    getpeername 52 205, getsockopt 55 209, setsockopt 54 208,
    # Memory
    brk 12 214, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, msync 26 227,
    # Processes and threads
    fork 57 -, vfork 58 -, execve 59 221, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
    getpid 39 172, getppid 110 173, gettid 186 178, getpgrp 111 -, getpgid 121 155, setpgid 109 154,
    getsid 124 156, setsid 112 157, set_tid_address 218 96, set_robust_list 273 99, rseq 334 293, futex 202 98,
    arch_prctl 158 -, prctl 157 167, membarrier 324 283, pidfd_open 434 434, pidfd_send_signal 424 424,
    # Who and how much
    getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
    getgroups 115 158, uname 63 160, sysinfo 99 179, times 100 153, getrusage 98 165, getrlimit 97 163,
    setrlimit 160 164, prlimit64 302 261, getpriority 140 141, setpriority 141 140, sched_yield 24 124,
    sched_getaffinity 204 123, sched_setaffinity 203 122, sched_getscheduler 145 120, sched_getparam 143 121,
    sched_get_priority_max 146 125, sched_get_priority_min 147 126, sched_rr_get_interval 148 127,
    getcpu 309 168,
    # Signals and clocks
    kill 62 129, tkill 200 130, tgkill 234 131, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
    rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -,
    alarm 37 -, getitimer 36 102, setitimer 38 103, restart_syscall 219 128, nanosleep 35 101,
    clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -,
    getrandom 318 278,
"""


def _read(table: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {"x86_64": {}, "aarch64": {}}
    for line in table.splitlines():
        for entry in filter(None, map(str.strip, line.partition("#")[0].split(","))):
            name, *numbers = entry.split()
            for machine, number in zip(found, numbers, strict=True):
                if number != "-":
                    found[machine][name] = int(number)
    return found


NEEDED = _read(_TABLE)
