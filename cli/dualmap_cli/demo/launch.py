"""Starts a child process of the demo that the kernel kills if the demo dies.

Run as ``python -I -S launch.py PARENT_PID COMMAND...``. Process groups and an orderly stop (``children``) cover every
end of the demo except SIGKILL, after which the demo cannot stop its children. So this program asks the kernel to kill
the process when its parent dies (prctl's PR_SET_PDEATHSIG, Linux only). Then the program replaces itself by the command
with exec, which keeps this setting. A separate program is safer than code between fork and exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Let the kernel kill this process when its parent dies, and replace the process by the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died before the prctl call.
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
