"""A lock on a folder that one run at a time may write to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import platform
import weakref
from pathlib import Path

logger = logging.getLogger(__name__)

WITHOUT = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what a file system without locks answers


class Held(ValueError):
    """Another process holds the lock. The message names it, as in "process 12 on node3"."""


class FileLock:
    """`flock` on a file, exclusive or shared. The system releases it whenever its process ends.

    It holds between the machines of an NFS whose server has locks (Linux maps flock to its byte-range locks), but not
    under the mount options `nolock` or `local_lock`, nor on a Lustre mounted with `localflock`: there it holds on each
    machine alone. A file system that refuses locks gives a warning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: io.FileIO | None = None  # open while the lock is held

    def take(self, kind: int = fcntl.LOCK_EX) -> None:
        """Take the lock, or change the kind of one that is held. Raises Held if another process has it."""
        while True:
            self.file = self.file or self.opened()
            try:
                fcntl.flock(self.file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self.path.read_text() if self.path.exists() else ""
                self.release()
                raise Held(holder or "another process") from None
            except OSError as error:
                if error.errno not in WITHOUT:
                    raise
                logger.warning("%s cannot be locked (%s): start no second run there", self.path, error.strerror)
            if self.path.exists() and os.fstat(self.file.fileno()).st_ino == self.path.stat().st_ino:
                break
            self.release()  # its holder removed the file after it was opened here
        if kind == fcntl.LOCK_EX:
            with contextlib.suppress(OSError):  # a full disk is reported where something needed is written
                self.file.truncate(0)
                self.file.write(f"process {os.getpid()} on {platform.node()}".encode())

    def opened(self) -> io.FileIO:
        file = io.FileIO(self.path, "ab")
        known = weakref.ref(file)

        def close_copy() -> None:
            """A forked process, such as a data loader's, would hold the lock for longer than its parent lives."""
            if copy := known():
                copy.close()

        os.register_at_fork(after_in_child=close_copy)
        return file

    def release(self, remove: bool = False) -> None:
        """Let the lock go; `remove` its file first."""
        if self.file is not None:
            if remove:
                self.path.unlink(missing_ok=True)
            self.file.close()
            self.file = None
