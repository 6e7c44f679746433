"""Starts a container's main process in its own root file system, or another process in a running container.

``roots.py`` runs this file as root, with the standard library only. The command is ``launch.py PLAN REPORT``, where
both arguments are inherited file descriptors. The plan is JSON (``roots.Plan`` writes it). The launcher writes errors
before the program's start to the report, and closes the report at the start. The launcher stays outside the container's
process namespace, forwards signals, and exits with the program's status.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

_NEW_MOUNTS = 0x00020000
_NEW_NAME = 0x04000000
_NEW_IPC = 0x08000000
_NEW_PIDS = 0x20000000
_NEW_NETWORK = 0x40000000
_KINDS = {"net": _NEW_NETWORK, "uts": _NEW_NAME, "ipc": _NEW_IPC, "pid_for_children": _NEW_PIDS, "mnt": _NEW_MOUNTS}

_READ_ONLY = 1
_REMOUNT = 32
_BIND = 4096
_RECURSIVE = 16384
_PRIVATE = 1 << 18
_DETACH = 2
# A remount as read-only must repeat the mount's existing restrictions: nosuid, nodev, noexec.
_KEPT = 2 | 4 | 8

_DEATH_SIGNAL = 1
_NO_NEW_PRIVILEGES = 38
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Exit status of shells and container runtimes: 128 + N after signal N, 127 if the program cannot be run.
_SIGNALLED = 128
_NOT_RUN = 127

# Mount point of the machine's file system during the setup of the container's root file system.
_HOST = "/.host"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def main(plan_fd: int, report: int) -> int:
    """Run the plan's program; return its exit status."""
    with os.fdopen(plan_fd) as file:
        plan = json.load(file)
    os.set_inheritable(report, False)
    try:
        if plan["join"] is None:
            _make_namespaces(plan)
        else:
            _join(plan["join"])
        # Signals stay blocked until the child exists and this process forwards them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        child = os.fork()
        if child == 0:
            _become(plan, report)
    except OSError as error:
        os.write(report, str(error).encode())
        return _NOT_RUN
    os.close(report)
    return _outlive(child)


def _make_namespaces(plan: Mapping[str, Any]) -> None:
    """Enter new namespaces, and a writable overlay over the unchanged root file system."""
    _check(_LIBC.setns(plan["network"], _NEW_NETWORK), "the pod's network namespace")
    os.close(plan["network"])
    _check(_LIBC.unshare(_NEW_MOUNTS | _NEW_PIDS | _NEW_NAME | _NEW_IPC), "new namespaces")
    hostname = plan["hostname"].encode()
    _check(_LIBC.sethostname(hostname, len(hostname)), "the host name")
    _mount("none", "/", flags=_RECURSIVE | _PRIVATE)
    scratch = plan["scratch"]
    _mount("tmpfs", scratch, kind="tmpfs", data="mode=755")
    upper, work, root = (f"{scratch}/{each}" for each in ("upper", "work", "root"))
    for folder in (upper, work, root):
        os.mkdir(folder)
    _mount("overlay", root, kind="overlay", data=f"lowerdir={plan['root']},upperdir={upper},workdir={work}")
    os.mkdir(root + _HOST)
    _mount("/", root + _HOST, flags=_BIND | _RECURSIVE)
    os.chroot(root)
    os.chdir("/")


def _join(process: int) -> None:
    """Enter the namespaces and the root file system of a container's main process."""
    root = os.open(f"/proc/{process}/root", os.O_PATH | os.O_DIRECTORY)
    kinds = {flag: os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind, flag in _KINDS.items()}
    for flag, namespace in kinds.items():
        _check(_LIBC.setns(namespace, flag), "a namespace of the container")
    os.fchdir(root)
    os.chroot(".")


def _become(plan: Mapping[str, Any], report: int) -> NoReturn:
    """Replace this process with the plan's program; on failure, write the reason to the report and exit."""
    try:
        if plan["join"] is None:
            _furnish(plan)
        os.chdir(plan["directory"])
        for stream in (1, 2):
            # A program can open /dev/stdout only if its user owns the file.
            os.fchown(stream, plan["uid"], plan["gid"])
        os.setgroups(plan["groups"])
        os.setgid(plan["gid"])
        os.setuid(plan["uid"])
        _check(_LIBC.prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0), "the tie to the launching process")
        if plan["no_new_privileges"]:
            _check(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            # Python ignores these signals, and the program would inherit the ignored state.
            signal.signal(ignored, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        os.umask(0o022)
        argv = plan["argv"]
        os.execvpe(argv[0], argv, plan["environment"])
    except OSError as error:
        os.write(report, f"{plan['argv'][0]}: {error}".encode())
    os._exit(_NOT_RUN)


def _furnish(plan: Mapping[str, Any]) -> None:
    """Mount /proc, /sys, /dev and the pod's volumes in the root file system, and unmount the machine's file system."""
    for folder in ("/proc", "/sys", "/dev"):
        os.makedirs(folder, exist_ok=True)
    try:
        _mount("proc", "/proc", kind="proc")
    except PermissionError:
        # A user namespace does not permit this mount if the machine masks parts of /proc, for example in a container.
        _mount(f"{_HOST}/proc", "/proc", flags=_BIND | _RECURSIVE)
    _mount(f"{_HOST}/sys", "/sys", flags=_BIND | _RECURSIVE)
    _mount("tmpfs", "/dev", kind="tmpfs", data="mode=755")
    for device in _DEVICES:
        _bind(f"/dev/{device}", f"/dev/{device}")
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir("/dev/shm")
    _mount("tmpfs", "/dev/shm", kind="tmpfs", data="mode=1777")
    for each in plan["mounts"]:
        _bind(each["source"], each["target"], read_only=each["read_only"])
    os.makedirs(plan["directory"], exist_ok=True)
    _check(_LIBC.umount2(_HOST.encode(), _DETACH), "taking the machine's file system away")
    os.rmdir(_HOST)
    if plan["read_only"]:
        _make_read_only("/")


def _bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Mount a file or folder of the machine at ``target``, which is created if missing."""
    if os.path.isdir(_HOST + source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(target):
            os.unlink(target)
        with open(target, "ab"):
            pass
    _mount(_HOST + source, target, flags=_BIND | _RECURSIVE)
    if read_only:
        _make_read_only(target)


def _make_read_only(target: str) -> None:
    kept = os.statvfs(target).f_flag & _KEPT
    _mount("none", target, flags=_REMOUNT | _BIND | _READ_ONLY | kept)


def _outlive(child: int) -> int:
    """Forward signals until the program ends; return its exit status, 128 + N after signal N."""
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else _SIGNALLED - code


def _mount(source: str, target: str, *, kind: str = "none", flags: int = 0, data: str = "") -> None:
    answer = _LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _check(answer, f"mounting {source} at {target}")


def _check(answer: int, what: str) -> None:
    """Raise OSError if a call to the C library failed."""
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), int(sys.argv[2])))
