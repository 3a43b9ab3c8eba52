"""Becomes a worker under a stock circusd: `python -I -S exec_worker.py SOCKET NAME`.

A stock circusd cannot send a process's output to a file without owning a pipe. It cannot pass the GPUs' locks, and it
shows every environment (`circusctl options`). So circusd starts this program. It gets all of these from the plugin's
private socket and then becomes the worker, under the same pid.

A ticket is good for one start. A start behind the plugin's back (`circusctl start`, `restart`, `reload`) gets a process
that ends here, never a second copy of a GPU worker.

It imports little of the standard library and nothing else, because it runs once per worker start.
"""

import ctypes
import json
import os
import signal
import socket
import sys

NO_TICKET = 75
"""Exit code (EX_TEMPFAIL): only the plugin may start this worker."""
HEADER_BYTES = 8
FDS_MAX = 64
_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1


def main(path: str, name: str) -> int:
    """Returns only if the worker could not be started. The plugin, if it listens, gets the reason."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plugin:  # close-on-exec: its closing tells the plugin
        plugin.settimeout(_TIMEOUT_S)
        try:
            plugin.connect(path)
            plugin.sendall(f"{name}\n".encode())
            ticket, fds = _receive(plugin)
        except (OSError, ValueError) as error:
            sys.stderr.write(
                f"{name} was not started ({error}): the dynamo plugin starts its workers, with the GPUs that are "
                "free; use `dynamo restart` or `dynamo scale`\n"
            )
            return NO_TICKET
        try:
            _become(ticket, fds)
        except OSError as error:
            plugin.sendall(f"{error.errno or 0}:{error.strerror or error}: {error.filename or ''}".encode())
        return NO_TICKET


def _receive(plugin: socket.socket) -> "tuple[dict[str, object], list[int]]":
    """The ticket and its descriptors, the log file's first. ValueError without a ticket."""
    header, fds, _flags, _address = socket.recv_fds(plugin, HEADER_BYTES, FDS_MAX)
    if not header:
        raise ValueError("there is no ticket for it")
    while len(header) < HEADER_BYTES:
        header += _some(plugin, HEADER_BYTES - len(header))
    left, body = int.from_bytes(header, "big"), b""
    while len(body) < left:
        body += _some(plugin, left - len(body))
    return json.loads(body), fds


def _some(plugin: socket.socket, count: int) -> bytes:
    data = plugin.recv(count)
    if not data:
        raise ValueError("the plugin went away")
    return data


def _become(ticket: "dict[str, object]", fds: "list[int]") -> None:
    log_fd, *inherited = fds
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(source, target)
    for fd in inherited:
        os.set_inheritable(fd, True)
    for fd in {null, log_fd} - {0, 1, 2}:
        os.close(fd)
    os.chdir(str(ticket["cwd"]))
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and a program would inherit that
        signal.signal(signum, signal.SIG_DFL)
    death_signal, parent = ticket["death_signal"], ticket["parent"]
    if isinstance(death_signal, int):
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:
            raise ProcessLookupError(3, f"circusd (pid {parent}) is gone")
    argv, env = ticket["argv"], ticket["env"]
    assert isinstance(argv, list)
    assert isinstance(env, dict)
    os.execve(argv[0], argv, env)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
