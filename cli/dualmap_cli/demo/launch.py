"""Started in place of each child: binds the child's life to the demo's, then becomes the child.

Run as ``python -I -S launch.py PARENT_PID COMMAND...``. A process group and an orderly stop (``children``) cover every
end of the demo but one: killed outright, it could not stop anybody. So the kernel is asked to kill the child when
its parent dies (prctl's PR_SET_PDEATHSIG, Linux only; elsewhere this only runs the command). The setting survives
exec, and a program of its own is safer for it than code between fork and exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind this process to its parent and run the command in its place."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died before the request reached the kernel.
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
