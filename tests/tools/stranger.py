"""Tries what another user of the host can get hold of. It runs as him, with paths, pids and ports as JSON on stdin.

Prints as JSON what he got. Only the standard library, and read from `-c`: he may not be able to read this file.
"""

import json
import os
import signal
import socket
import ssl
import sys
from pathlib import Path

TIMEOUT_S = 5.0


def files(roots: list[str]) -> list[str]:
    """Files below these folders that he can read or write, and folders where he can make files."""
    found = []
    for root in roots:
        for folder, _, names in os.walk(root):
            found += [folder] if os.access(folder, os.W_OK) else []
            for name in names:
                path = Path(folder) / name
                for flags in (os.O_RDONLY, os.O_WRONLY):
                    try:
                        os.close(os.open(path, flags | os.O_NONBLOCK))
                    except OSError:
                        continue
                    found.append(str(path))
    return found


def opened(paths: list[str]) -> list[str]:
    """Those files that he can read or write."""
    found = []
    for path in paths:
        for flags in (os.O_RDONLY, os.O_WRONLY):
            try:
                os.close(os.open(path, flags | os.O_NONBLOCK))
            except OSError:
                continue
            found.append(path)
    return found


def sockets(paths: list[str]) -> list[str]:
    """Those unix sockets that he can connect to and that do not turn him away."""
    found = []
    for path in paths:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            try:
                client.connect(path)
                let_in = client.recv(1) != b""
            except TimeoutError:
                let_in = True
            except OSError:
                let_in = False
            if let_in:
                found.append(path)
    return found


def processes(pids: list[int]) -> list[int]:
    """Those processes whose environment or memory he can read, or that he can send a signal to."""
    found = []
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
            found.append(pid)
        except OSError:
            pass
        found += [pid for name in ("environ", "mem") if opened([f"/proc/{pid}/{name}"])]
    return found


def nats(ports: list[int]) -> list[str]:
    """NATS's answers when he publishes and subscribes, without TLS and with it, unless they refuse him."""
    found = []
    for port in ports:
        for tls in (False, True):
            try:
                with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as plain:
                    plain.recv(4096)
                    with _wrapped(plain) if tls else plain as client:
                        client.sendall(b'CONNECT {"verbose":true}\r\nSUB > 1\r\nPUB a 1\r\nx\r\nPING\r\n')
                        said = b""
                        while chunk := client.recv(4096):
                            said += chunk
                            if b"PONG" in said or b"-ERR" in said:
                                break
            except OSError:
                continue
            if said and b"-ERR" not in said:
                found.append(said.decode("latin-1"))
    return found


def _wrapped(plain: socket.socket) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(plain)


WAYS = {"files": files, "opened": opened, "sockets": sockets, "processes": processes, "nats": nats}

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps({way: WAYS[way](what) for way, what in asked.items()}))
